"""A Gaussian process over the features of arms: its fit, its kernels, draws from it."""
