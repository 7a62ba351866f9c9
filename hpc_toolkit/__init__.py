"""Slurm job generation and a work queue that is nothing but a directory on the shared filesystem."""

__version__ = "0.1.0"
