"""A Gaussian process over the features of arms: its kernels, its fit, and draws from it."""
