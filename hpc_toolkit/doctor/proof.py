"""What a paired examination proved of a run's filesystem, kept in the run for its workers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpc_toolkit import files
from hpc_toolkit.doctor.mounts import mount_of

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.layout import RunPaths

_FORMAT = 1


def write_proof(path: Path, record: dict[str, Any]) -> None:
    """Keep what was found; a reader sees the old record or the new one.

    Args:
        path: of the record.
        record: with ``sides`` as :meth:`hpc_toolkit.doctor.sides.Side.to_json` has them, and
            ``locks_proven``.

    Raises:
        OSError: it could not be written; an older record stays.
    """
    files.replace_file(path, [json.dumps({"format": _FORMAT, **record}, indent=2).encode() + b"\n"])


def read_proof(path: Path) -> dict[str, Any] | None:
    """The record; None if there is none that can be read."""
    try:
        record = json.loads(files.read_fresh(path))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == _FORMAT else None


def locks_proven(paths: RunPaths) -> bool:
    """Whether a free lock of another host's worker tells of its death (rule R6).

    True only on the filesystem that was examined: a run may have been copied since, and this host
    may mount it with locks of its own.
    """
    record = read_proof(paths.doctor)
    if record is None or record.get("locks_proven") is not True:
        return False
    here = mount_of(paths.root)
    try:
        known = {(side["mount"]["kind"], side["mount"]["source"]) for side in record["sides"]}
    except (KeyError, TypeError):
        return False
    return (here.kind, here.source) in known and not here.locks_are_local
