"""The CPUs, memory and GPUs of each of several workers of a node."""
