"""What a paired examination proved of a run's filesystem, kept in the run for its workers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir import files
from hpc_toolkit.system.mounts import mount_of

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.rundir.layout import RunPaths

_FORMAT = 1
_MAX_LEAST_LEASE_S = 3600.0
"""No examination measures for so long; a lease beyond it would have no death be seen."""


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
    except (OSError, RecursionError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == _FORMAT else None


@dataclass(frozen=True, slots=True)
class Proof:
    """What may be believed of a run's filesystem, as it is mounted here."""

    locks: bool = False
    """Whether a free lock of another host's worker tells of its death (rule R6)."""
    least_lease_s: float = 0.0
    """Twice the longest time for which a change was not seen: a shorter silence says nothing."""
    said: str = ""
    """The verdict on the directory, in a few words; "" if all of it was fine and proved nothing."""


def believed(paths: RunPaths) -> Proof:
    """What an examination by two hosts left.

    Nothing on any other filesystem than the one that was examined: a run may have been copied
    since. Nothing of locks where this host mounts it with locks of its own.
    """
    record = read_proof(paths.doctor)
    if record is None:
        return Proof()
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
