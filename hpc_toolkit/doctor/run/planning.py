"""Plan the repairs of a run as data. Writes nothing.

A repair creates a missing name, or moves away a temporary file that no process uses. It writes no
journal, no log entry and no payload, so it cannot lose a result.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.claims import claim_name
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader, Line
from hpc_toolkit.rundir.layout import RunPaths, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpc_toolkit.rundir.layout import StagePaths

LEFT_ALONE_S = 3600.0
"""Seconds after its last change within which a file may still be in use."""
PAYLOADS = ("items", "retries", "results")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
_SHOWN = 3

_WHY_DIRECTORY = {
    "claims": "no worker can claim without it; the claims that it held are gone, and a unit that "
    "was begun without a line in a journal is begun once more",
    "journals": "no worker can start without it; results that no table holds are gone with it",
    "workers": "no worker can start without it; workers that it knew count as silent",
    "control": "nobody can be asked to drain without it; what was asked for is forgotten",
}
_WHY_ANY = "it is written to, and was empty or is not read"
_WHY_CLAIMS = "journals have lines of them; without them a generation would have a second owner"
_WHY_TEMPORARY = "a process died while it replaced a file; nobody reads them"

Kind = Literal["directory", "claim", "aside"]

_ACTS: dict[Kind, str] = {
    "directory": "make",
    "claim": "make again",
    "aside": "move into repaired/",
}
_FOUND: dict[Kind, tuple[Verdict, str]] = {
    "directory": (Verdict.UNSAFE, "missing"),
    "claim": (Verdict.UNSAFE, "missing, and journals tell whose they were"),
    "aside": (Verdict.FINE, "left over"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One action for one or more files of a kind."""

    kind: Kind
    """``directory``: create it; ``claim``: create it again; ``aside``: move it to the same path
    below ``repaired/``."""
    names: tuple[str, ...]
    """Paths below the run."""
    owners: tuple[str, ...] = ()
    """For claims: the worker of each."""
    stage: str = ""
    """The stage that the files belong to; "" for files of the run itself."""
    why: str
    """The cost of the damage, and the evidence for the repair."""

    @property
    def words(self) -> str:
        """The action in words: "make stages/items/claims"."""
        return f"{_ACTS[self.kind]} {self.some}"

    @property
    def some(self) -> str:
        return first_names(self.names)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``hpctk doctor --repair --json`` prints them."""
        return {"kind": self.kind, "names": list(self.names), "stage": self.stage, "why": self.why}


@dataclass(frozen=True, slots=True)
class Plan:
    """The repairs of a run."""

    repairs: tuple[Repair, ...]
    """The repairs in their order of execution."""
    left: tuple[str, ...]
    """Damage that stays as it is, and why."""

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each repair, for the report of an examination."""
        for repair in self.repairs:
            verdict, what = _FOUND[repair.kind]
            fix = "'hpctk doctor RUN --repair' shows what it would do, and asks"
            found = f"{what}: {repair.some}"
            if verdict is Verdict.FINE:
                found += "; --repair takes it away"
            yield Finding("to repair", verdict, found, repair.why, fix)


def plan_repairs(root: Path) -> Plan:
    """Plan the repairs of a run, which may be active.

    Raises:
        RunError: ``root`` is not a run, its run.json cannot be read, or a file is in the place of
            one of its directories.
    """
    paths, manifest = RunPaths(root), read_manifest(root)
    left: list[str] = []
    repairs: list[Repair] = []
    wanted = [paths.workers, paths.journals, paths.logs, paths.control, paths.bandit]
    repairs += _directories(root, wanted, "", left)
    owners = _owners(paths, left)
    for spec in manifest.stages:
        stage = paths.stage(spec.name)
        log, fault = read_log(stage)
        if fault:
            left.append(f"the log of {stage.name}: {fault}; restore it from a backup")
        # Without a fault every payload that an entry names exists.
        wanted = [stage.claims, *(stage.root / kind for kind in PAYLOADS if not fault)]
        repairs += _directories(root, wanted, stage.name, left)
        if not fault:
            repairs += _claims(root, log, owners[stage.name])
    return Plan((*repairs, *_temporaries(paths, left)), tuple(left))


def read_log(stage: StagePaths) -> tuple[StageLog, str]:
    """Read a stage's log; also return what is wrong with it, "" if it can be read to its end."""
    log = StageLog(stage)
    try:
        # Listed before the log is read, so that an entry added meanwhile is not missing. ``head``
        # is written after an entry, so it reveals the deletion of the last entries.
        numbers = [int(name) for name in files.list_names(stage.log) if name.isdigit()]
        numbers.append(log.hint())
        log.poll()
    except (HpcToolkitError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return log, f"entry {log.length + 1} cannot be read: {error}"
    if max(numbers) > log.length:
        return log, f"entry {log.length + 1}, or what it names, is missing"
    return log, "" if stage.log.is_dir() else "its directory is missing"


def _directories(root: Path, wanted: list[Path], stage: str, left: list[str]) -> Iterator[Repair]:
    for path in wanted:
        name = str(path.relative_to(root))
        if path.is_dir():
            continue
        if os.path.lexists(path):
            left.append(f"{name} is not a directory: move it away and look again")
            continue
        why = _WHY_DIRECTORY.get(path.name, _WHY_ANY)
        yield Repair(kind="directory", names=(name,), why=why, stage=stage)


def _owners(paths: RunPaths, left: list[str]) -> dict[str, dict[tuple[str, int], str]]:
    """Return stage -> (unit, generation) -> the worker that the journals name."""
    found: dict[str, dict[tuple[str, int], str]] = defaultdict(dict)
    for name in sorted(files.list_names(paths.journals)):
        if not name.endswith(".jsonl"):
            continue
        try:
            for stage, unit, generation, worker in _passes(paths.journals / name):
                # Of two owners take the one whose results count (rule R11).
                known = found[stage].setdefault((unit, generation), worker)
                found[stage][unit, generation] = min(known, worker)
        except OSError as error:
            left.append(f"journals/{name} cannot be read: {error.strerror}")
    return found


def _passes(journal: Path) -> Iterator[tuple[str, str, int, str]]:
    """Yield (stage, unit, generation, worker) of the claims in a journal's lines."""
    owner = journal.name.removesuffix(".jsonl")
    seen = set()
    for found in JournalReader(journal).poll():
        record = found.record if isinstance(found, Line) else found.release
        stage, _, unit = str(record.get("unit", "")).rpartition("/")
        generation = record.get("generation")
        worker = record.get("worker") if record.get("type") == "death" else owner
        if not isinstance(generation, int) or not isinstance(worker, str) or not worker:
            continue
        if (unit, generation, worker) not in seen:
            seen.add((unit, generation, worker))
            yield stage, unit, generation, worker


def _claims(root: Path, log: StageLog, owners: dict[tuple[str, int], str]) -> list[Repair]:
    units = {unit.name for segment in log.segments.values() for unit in segment.units}
    claims = log.paths.claims
    there = set(files.list_names(claims))
    missing: dict[str, str] = {}
    for (unit, generation), owner in sorted(owners.items()):
        name = claim_name(unit, generation)
        known = unit in units and generation > 0
        # A listing may be a minute old, so look for each name that it lacks.
        if known and name not in there and not (claims / name).is_symlink():
            missing[str((claims / name).relative_to(root))] = owner
    if not missing:
        return []
    names, workers = tuple(missing), tuple(missing.values())
    stage = log.paths.name
    return [Repair(kind="claim", names=names, owners=workers, why=_WHY_CLAIMS, stage=stage)]


def _temporaries(paths: RunPaths, left: list[str]) -> list[Repair]:
    found = [
        directory / name
        for directory in (paths.root, paths.bandit, paths.jobs)
        for name in sorted(files.list_names(directory))
        if _TEMPORARY.fullmatch(name)
    ]
    old = tuple(str(path.relative_to(paths.root)) for path in found if _is_old(path))
    if len(old) < len(found):
        left.append(f"{len(found) - len(old)} temporary files: changed within the last hour")
    return [Repair(kind="aside", names=old, why=_WHY_TEMPORARY)] if old else []


def _is_old(path: Path) -> bool:
    """Return whether a file was last changed an hour ago; the repair asks the filesystem's time."""
    try:
        return time.time() - path.stat().st_mtime > LEFT_ALONE_S
    except OSError:
        return False


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones: ``a, b, c and 2 more``."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
