"""The files of a run: which are damaged, missing or left over, and repairs of missing names.

A check writes nothing and takes no lock. A repair only creates a missing name, so it cannot lose a
result.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpc_toolkit.campaign.settings import read_settings
from hpc_toolkit.doctor.sides import Finding, Verdict, fine
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.graph import GRAPH, Graph
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.queue.units import claim_name, parse_claim
from hpc_toolkit.results.tables import row_fault
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader
from hpc_toolkit.rundir.layout import RunPaths, StagePaths, read_manifest
from hpc_toolkit.system.quantities import counted, first_names

_BEING_WRITTEN_S = 0.2

_WHY_DIRECTORY = {
    "claims": "no worker can claim without it; the claims that it held are gone, and a unit that "
    "was begun without a line in a journal is begun once more",
    "journals": "no worker can start without it; results that no table holds are gone with it",
    "workers": "no worker can start without it; workers that it knew count as silent",
    "control": "no worker can be asked to exit without it; earlier drain requests are lost",
}
_WHY_CLAIMS = "journals have lines of them; without them a generation would have a second owner"

_AGAIN = "they are skipped; what they said is not known, and pending items run again"
_UNREAD = "what they say is not known here: results are made again, and no table can be published"
_ASK = "check the owner and the permissions, and have the disk checked"
_FOREIGN = "a line about an unknown item does not count; other lines of a wrong generation do"
_TIMED = "their owners are timed by the lease, from the moment they are first seen"
_GAP = "somebody deleted them: a generation may have had two owners, and items may run twice"
_KEEP = "delete nothing below a run while it exists"
_BACKUP = "look again in a minute; if it stays, restore the stage's files from a backup"


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
        return f"make {'' if self.kind == 'directory' else 'again '}{first_names(self.names)}"


@dataclass(frozen=True, slots=True)
class Plan:
    repairs: tuple[Repair, ...]
    """The repairs in their order of execution."""
    left: tuple[str, ...]
    """Damage that stays as it is, and why."""


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
        wanted = [
            stage.claims,
            *(stage.root / kind for kind in ("items", "retries", "results") if not fault),
        ]
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
        why = _WHY_DIRECTORY.get(path.name, "it is written to, and was empty or is not read")
        yield Repair(kind="directory", names=(name,), why=why)


def _owners(paths: RunPaths, left: list[str]) -> dict[str, dict[tuple[str, int], str]]:
    """The workers whose lines journals have, by stage, unit and generation."""
    found: dict[str, dict[tuple[str, int], str]] = defaultdict(dict)
    for name in sorted(files.list_names(paths.journals)):
        if not name.endswith(".jsonl"):
            continue
        try:
            for line in JournalReader(paths.journals / name).poll():
                stage, _, unit = line.record["unit"].rpartition("/")
                died = line.record["type"] == "death"
                worker = line.record["worker"] if died else name.removesuffix(".jsonl")
                if worker:
                    # Of two owners take the one whose results count (rule R11).
                    key = unit, line.record["generation"]
                    found[stage][key] = min(worker, found[stage].get(key, worker))
        except OSError as error:
            left.append(f"journals/{name} cannot be read: {error.strerror}")
    return found


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


def repair_run(root: Path, repairs: Iterable[Repair]) -> Iterator[tuple[str, str]]:
    """Carry out planned repairs; yield (name, problem) for each file, with "" for success.

    Each checks again that it is still needed. A repair that fails is reported, and the others are
    still carried out.
    """
    for repair in repairs:
        directory = (root / repair.names[0]).parent
        if repair.kind == "claim" and not directory.is_dir():
            # Each of thousands of claims would report the same.
            yield (
                first_names(repair.names),
                f"left: {directory.relative_to(root)} could not be made",
            )
            continue
        for name, owner in zip(repair.names, repair.owners or repair.names, strict=True):
            try:
                if repair.kind == "directory":
                    yield name, _make(root / name)
                else:
                    found = files.create_name(root / name, owner)
                    yield name, "" if found == owner else f"{found} has it meanwhile"
            except OSError as error:
                yield name, f"failed: {error.strerror or error}"


def _make(directory: Path) -> str:
    try:
        directory.mkdir()
    except FileExistsError:
        if not directory.is_dir():
            raise
        return "somebody did it meanwhile"
    files.sync_directory(directory.parent)
    return ""


def check_run(root: Path) -> list[Finding]:
    """Read the complete run; return a finding for each kind of file, also if all are in order.

    An active run changes meanwhile, so references are read before the files that they refer to.
    """
    paths = RunPaths(root)
    try:
        manifest = read_manifest(root)
    except HpcToolkitError as error:
        means = "nobody can work on this run"
        return [Finding("run.json", Verdict.UNSAFE, error.message, means, error.hint)]
    stages = [paths.stage(spec.name) for spec in manifest.stages]
    claims = {stage.name: files.list_names(stage.claims) for stage in stages}
    journals = _check_journals(paths, stages)
    findings = [_check_log(stage) for stage in stages]
    workers = {name[:-5] for name in files.list_names(paths.workers) if name.endswith(".json")}
    for stage in stages:
        findings += _check_claims(stage, claims[stage.name], workers)
    if manifest.campaign is not None and os.path.lexists(paths.campaign):
        name, found = paths.campaign.name, "the settings of an update, whole"
        try:
            read_settings(paths, manifest.campaign)
            findings.append(fine(name, found))
        except HpcToolkitError as error:
            means = "no coordinator can continue this campaign"
            findings.append(Finding(name, Verdict.UNSAFE, error.message, means, error.hint))
    return [*findings, *journals, _check_workers(paths, workers)]


def _check_log(stage: StagePaths) -> Finding:
    """Check that entries have no gap and all their payloads."""
    check = f"log ({stage.name})"
    log, found = read_log(stage)
    means = "workers wait for this entry and cannot see later ones"
    if not found and log.table is not None:
        line = _bad_line(log, stage.root / log.table[1])
        if line:
            found = f"line {line} of {log.table[1]}, the published table, is damaged or missing"
            means = "'hpctk gather' gives no rows"
    if not found:
        found, means = _bad_segment(log), "commands that need these items end there"
    if found:
        return Finding(check, Verdict.UNSAFE, found, means, _BACKUP)
    entries = "1 entry" if log.length == 1 else f"{log.length:,} entries"
    return fine(check, f"{entries} in order, each with its payload")


def _bad_segment(log: StageLog) -> str:
    for segment in log.segments.values():
        try:
            for unit in segment.units:
                segment.lines(unit)
            if segment.numbers and segment.entry == 1:
                graph = Graph(log.paths.root / GRAPH)
                for number in range(len(graph)):
                    graph.item(number)
        except (HpcToolkitError, OSError) as error:
            return str(error)
    return ""


def _bad_line(log: StageLog, table: Path) -> int:
    """Return the number of the table's first invalid or missing line; 0 if all are valid."""
    try:
        wanted = log.table_header()[0] + 1
    except HpcToolkitError:
        return 1
    number = 1
    with table.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                if number > 1:
                    _, _ = record["at"]
            except (ValueError, KeyError, TypeError, RecursionError):
                return number
            if number > 1 and row_fault(record):
                return number
    return number + 1 if number < wanted else 0


def _check_claims(stage: StagePaths, names: list[str], workers: set[str]) -> list[Finding]:
    check = f"claims ({stage.name})"
    generations: dict[str, set[int]] = defaultdict(set)
    unreadable, ownerless = [], []
    for name in sorted(names):
        if (parsed := parse_claim(name)) is None:
            continue
        generations[parsed[0]].add(parsed[1])
        try:
            owner = (stage.claims / name).readlink().as_posix()
        except OSError:
            unreadable.append(name)
            continue
        if owner not in workers:
            ownerless.append(name)
    gaps = [
        claim_name(unit, generation)
        for unit, known in generations.items()
        for generation in range(1, max(known))
        if generation not in known
    ]
    return [
        *_some_fault(check, Verdict.UNSAFE, "missing", gaps, _GAP, _KEEP),
        *_some_fault(check, Verdict.SLOWER, "cannot be read", unreadable, _TIMED),
        *_some_fault(check, Verdict.SLOWER, "of workers without a file", ownerless, _TIMED, _KEEP),
    ] or [fine(check, f"{len(names)}, of known workers, without a gap")]


def _check_journals(paths: RunPaths, stages: list[StagePaths]) -> list[Finding]:
    names = [name for name in sorted(files.list_names(paths.journals)) if name.endswith(".jsonl")]
    units: _Units = {}
    lines = 0
    damaged, torn, unreadable, foreign = [], [], [], []
    for name in names:
        reader = JournalReader(paths.journals / name, singly=True)
        for _ in range(2):
            try:
                for line in reader.poll():
                    lines += 1
                    if why := _mismatch(stages, name[:-6], line.record, units):
                        foreign.append(f"{name} at byte {line.start} ({why})")
            except OSError as error:
                unreadable.append(f"{name} ({error.strerror})")
                break
            if not reader.torn_bytes:
                break
            # Its worker may be writing this line.
            time.sleep(_BEING_WRITTEN_S)
        damaged += [f"{name} at byte {at} ({why})" for at, why in reader.bad_lines.items()]
        if reader.torn_bytes:
            torn.append(f"{name} ({reader.torn_bytes} bytes)")
    check, slower = "journals", Verdict.SLOWER
    read = f"{counted(lines, 'line')} of {counted(len(names), 'worker')}"
    return [
        *_some_fault(check, Verdict.UNSAFE, "cannot be read", unreadable, _UNREAD, _ASK),
        *_some_fault(check, slower, "damaged", damaged, _AGAIN, "have the disk checked"),
        *_some_fault(check, slower, "torn at the end", torn, _AGAIN),
        *_some_fault(check, slower, "lines that do not fit the run", foreign, _FOREIGN),
    ] or [fine(check, f"{read}, all checksums match")]


_Units = dict[str, tuple[range, "StagePaths"]]


def _mismatch(stages: list[StagePaths], worker: str, record: dict[str, Any], units: _Units) -> str:
    """Why a line does not fit the run; "" if it does. ``units``: those that are known so far."""
    name, generation = record["unit"], record["generation"]
    if name not in units:  # the segment may be newer than the last look
        for stage in stages:
            for segment in read_log(stage)[0].segments.values():
                units.update((f"{stage.name}/{u.name}", (u.items, stage)) for u in segment.units)
    if name not in units:
        return f"there is no unit {name:.80}"
    items, stage = units[name]
    if record["type"] != "release" and record["item"] not in items:
        return f"unit {name} has no item {record['item']}"
    owner = record["worker"] if record["type"] == "death" else worker
    claim = stage.claims / claim_name(name.partition("/")[2], generation)
    try:
        claimed = os.readlink(claim) == owner
    except OSError:
        claimed = os.path.lexists(claim)  # an unreadable claim is reported with the claims
    return "" if claimed else f"{owner} did not claim generation {generation} of unit {name}"


def _check_workers(paths: RunPaths, workers: set[str]) -> Finding:
    unreadable = [name for name in sorted(workers) if read_presence(paths.worker(name)) is None]
    if unreadable:
        # A file that was read during a write is complete a moment later.
        time.sleep(_BEING_WRITTEN_S)
        unreadable = [name for name in unreadable if read_presence(paths.worker(name)) is None]
    for found in _some_fault("workers", Verdict.SLOWER, "cannot be read", unreadable, _TIMED):
        return found
    return fine("workers", f"{counted(len(workers), 'file')}, none damaged")


def _some_fault(
    check: str, verdict: Verdict, what: str, names: list[str], means: str, fix: str = ""
) -> list[Finding]:
    if not names:
        return []
    return [Finding(check, verdict, f"{what}: {first_names(names)}", means, fix)]
