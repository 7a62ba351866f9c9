"""What a doctor examination by two hosts proved about a run's filesystem, stored for workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir import files
from hpc_toolkit.system.record import Record

if TYPE_CHECKING:
    from hpc_toolkit.rundir.layout import RunPaths

_FORMAT = 1
_MAX_LEAST_LEASE_S = 3600.0
"""Longer than any examination measures; a longer lease would keep deaths from being seen."""


def write_proof(path: Path, record: dict[str, Any]) -> None:
    """Store the result of an examination; a reader sees the old record or the new one.

    ``record`` has ``sides`` as :meth:`hpc_toolkit.doctor.sides.Side.to_json` returns them, and
    ``locks_proven``. After an OSError an older record stays.
    """
    files.replace_file(path, [json.dumps({"format": _FORMAT, **record}, indent=2).encode() + b"\n"])


def read_proof(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(files.read_fresh(path))
    except (OSError, RecursionError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == _FORMAT else None


class Proof(Record):
    """Proven properties of a run's filesystem, as this host mounts it."""

    locks: bool = False
    """Whether a free lock proves that a worker on another host is dead (rule R6)."""
    least_lease_s: float = 0.0
    """Twice the longest delay of a change; silence shorter than this proves nothing."""
    said: str = ""
    """Summary for people; "" if there was no problem and locks are not proven."""


def believed(paths: RunPaths) -> Proof:
    """Read the proof that applies to a run as this host mounts it.

    A record from another filesystem is ignored, because the run may have been copied since. Proven
    locks do not count if this host's mount keeps locks local.
    """
    record = read_proof(paths.doctor)
    if record is None:
        return Proof()
    from hpc_toolkit.rundir.mounts import mount_of

    here = mount_of(paths.root)
    try:
        if (here.kind, here.source) not in {
            (side["mount"]["kind"], side["mount"]["source"]) for side in record["sides"]
        }:
            return Proof()
        locks = record["locks_proven"] is True and not here.locks_are_local
        troubles = dict.fromkeys(one["check"] for one in record.get("troubles", ()))
        said = [f"{record.get('verdict', 'unknown')}: {', '.join(troubles)}"] if troubles else []
        said += ["locks are proven between hosts"] if locks else []
        least_s = float(record.get("least_lease_s", 0.0))
        if not 0 <= least_s <= _MAX_LEAST_LEASE_S:  # NaN as well
            said.append(f"least_lease_s = {least_s:g} in {paths.doctor.name} is ignored")
            least_s = 0.0
        return Proof(locks, least_s, "; ".join(said))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return Proof()
