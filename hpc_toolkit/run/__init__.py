"""The Python interface of a run, its snapshots, and the verification of results."""

from hpc_toolkit.run.handle import MAX_WORKERS, Run, check_stage, create_run

__all__ = ["MAX_WORKERS", "Run", "check_stage", "create_run"]
