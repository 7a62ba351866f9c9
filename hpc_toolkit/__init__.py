"""Slurm job generation, and a work queue that is only a directory on the shared filesystem."""

from __future__ import annotations

__version__ = "0.2.0"

__all__ = ["Executor", "Run", "__version__"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpc_toolkit.futures import Executor
    from hpc_toolkit.run import Run


def __getattr__(name: str) -> object:
    # Thousands of ranks import this package at once, and need neither.
    if name == "Executor":
        from hpc_toolkit.futures import Executor

        return Executor
    if name == "Run":
        from hpc_toolkit.run import Run

        return Run
    raise AttributeError(f"module 'hpc_toolkit' has no attribute {name!r}")
