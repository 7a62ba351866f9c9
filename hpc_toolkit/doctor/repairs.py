"""Plan the repairs of a run as data, and carry them out.

A repair only creates a missing name. It writes no journal, no log entry and no payload, so it
cannot lose a result.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.claims import claim_name
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader
from hpc_toolkit.rundir.layout import RunPaths, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from hpc_toolkit.rundir.layout import StagePaths

PAYLOADS = ("items", "retries", "results")
_SHOWN = 3

_WHY_DIRECTORY = {
    "claims": "no worker can claim without it; the claims that it held are gone, and a unit that "
    "was begun without a line in a journal is begun once more",
    "journals": "no worker can start without it; results that no table holds are gone with it",
    "workers": "no worker can start without it; workers that it knew count as silent",
    "control": "no worker can be asked to exit without it; earlier drain requests are lost",
}
_WHY_ANY = "it is written to, and was empty or is not read"
_WHY_CLAIMS = "journals have lines of them; without them a generation would have a second owner"

_NOW = "somebody did it meanwhile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    kind: Literal["directory", "claim"]
    names: tuple[str, ...]
    """Paths below the run."""
    owners: tuple[str, ...] = ()
    """For claims: the worker of each."""
    why: str
    """The cost of the damage, and the evidence for the repair."""

    @property
    def words(self) -> str:
        return f"make {'' if self.kind == 'directory' else 'again '}{self.some}"

    @property
    def some(self) -> str:
        return first_names(self.names)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": list(self.names), "why": self.why}


@dataclass(frozen=True, slots=True)
class Plan:
    repairs: tuple[Repair, ...]
    """The repairs in their order of execution."""
    left: tuple[str, ...]
    """Damage that stays as it is, and why."""

    def findings(self) -> Iterator[Finding]:
        for repair in self.repairs:
            known = "" if repair.kind == "directory" else ", and journals tell whose they were"
            fix = "'hpctk doctor RUN --repair' shows what it would do, and asks"
            found = f"missing{known}: {repair.some}"
            yield Finding("to repair", Verdict.UNSAFE, found, repair.why, fix)


def plan_repairs(root: Path) -> Plan:
    """Plan the repairs of a run, which may be active.

    Raises RunError if ``root`` is not a run, or a file is in the place of one of its directories.
    """
    paths, manifest = RunPaths(root), read_manifest(root)
    left: list[str] = []
    repairs: list[Repair] = []
    wanted = [paths.workers, paths.journals, paths.logs, paths.control, paths.bandit]
    repairs += _directories(root, wanted, left)
    owners = _owners(paths, left)
    for spec in manifest.stages:
        stage = paths.stage(spec.name)
        log, fault = read_log(stage)
        if fault:
            left.append(f"the log of {stage.name}: {fault}; restore it from a backup")
        # Without a fault every payload that an entry names exists.
        wanted = [stage.claims, *(stage.root / kind for kind in PAYLOADS if not fault)]
        repairs += _directories(root, wanted, left)
        if not fault:
            repairs += _claims(root, log, owners[stage.name])
    return Plan(tuple(repairs), tuple(left))


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


def _directories(root: Path, wanted: list[Path], left: list[str]) -> Iterator[Repair]:
    for path in wanted:
        name = str(path.relative_to(root))
        if path.is_dir():
            continue
        if os.path.lexists(path):
            left.append(f"{name} is not a directory: move it away and look again")
            continue
        why = _WHY_DIRECTORY.get(path.name, _WHY_ANY)
        yield Repair(kind="directory", names=(name,), why=why)


def _owners(paths: RunPaths, left: list[str]) -> dict[str, dict[tuple[str, int], str]]:
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
    owner = journal.name.removesuffix(".jsonl")
    seen = set()
    for found in JournalReader(journal).poll():
        record = found.record
        stage, _, unit = record["unit"].rpartition("/")
        generation = record["generation"]
        worker = record["worker"] if record["type"] == "death" else owner
        if worker and (unit, generation, worker) not in seen:
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
    owned = tuple(missing.values())
    return [Repair(kind="claim", names=tuple(missing), owners=owned, why=_WHY_CLAIMS)]


def first_names(names: Sequence[str]) -> str:
    """The first names, and the number of further ones: ``a, b, c and 2 more``."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def repair_run(root: Path, repairs: Iterable[Repair]) -> Iterator[tuple[str, str]]:
    """Carry out planned repairs; yield (name, problem) for each file, with "" for success.

    Each checks again that it is still needed. A repair that fails is reported, and the others are
    still carried out.
    """
    for repair in repairs:
        directory = (root / repair.names[0]).parent
        if repair.kind == "claim" and not directory.is_dir():
            # Each of thousands of claims would report the same.
            yield repair.some, f"left: {directory.relative_to(root)} could not be made"
            continue
        for name, owner in zip(repair.names, repair.owners or repair.names, strict=True):
            try:
                made = _make if repair.kind == "directory" else _claim
                yield name, made(root / name, owner)
            except OSError as error:
                yield name, f"failed: {error.strerror or error}"


def _claim(path: Path, owner: str) -> str:
    found = files.create_name(path, owner)
    return "" if found == owner else f"{found} has it meanwhile"


def _make(directory: Path, _owner: str) -> str:
    try:
        directory.mkdir()
    except FileExistsError:
        if not directory.is_dir():
            raise
        return _NOW
    files.sync_directory(directory.parent)
    return ""
