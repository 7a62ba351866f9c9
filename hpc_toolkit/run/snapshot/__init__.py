"""A run's items and results as one file, and a new run that begins from it.

A snapshot is a copy for keeping, and for resuming elsewhere. The run itself needs none: its
journals hold every result from the moment on that it was reported.
"""

from hpc_toolkit.run.snapshot.file import Snapshot, read_snapshot, take_snapshot, write_snapshot
from hpc_toolkit.run.snapshot.following import Snapshots
from hpc_toolkit.run.snapshot.restoring import restore_run

__all__ = [
    "Snapshot",
    "Snapshots",
    "read_snapshot",
    "restore_run",
    "take_snapshot",
    "write_snapshot",
]
