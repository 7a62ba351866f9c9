"""Slurm job generation, and a work queue that is only a directory on the shared filesystem."""

from __future__ import annotations

__version__ = "0.2.0"
