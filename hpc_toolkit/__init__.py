"""Slurm job generation, and a work queue that is only a directory on the shared filesystem."""

__version__ = "0.1.0"
