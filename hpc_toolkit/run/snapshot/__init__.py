"""A run's items and results in one file, from which a new run can start.

A snapshot is a copy to keep, or to resume from elsewhere. The run itself does not need it: its
journals contain every result as soon as the result is reported.
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
