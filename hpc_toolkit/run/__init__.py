"""The Python interface: a run, its snapshots and their verification."""

from hpc_toolkit.run.handle import MAX_WORKERS, Run, check_stage, create_run

__all__ = ["MAX_WORKERS", "Run", "check_stage", "create_run"]
