"""Check a run's files: which are damaged, missing or left over. Writes nothing, takes no lock."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_toolkit.campaign.settings import read_settings
from hpc_toolkit.doctor.findings import Finding, Verdict, fine
from hpc_toolkit.doctor.run.planning import PAYLOADS, first_names, not_directories
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.claims import claim_name, parse_claim
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.results.tables import row_fault
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader, Line
from hpc_toolkit.rundir.layout import RunPaths, read_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.rundir.layout import Manifest, StagePaths

_BEING_WRITTEN_S = 0.2

_AGAIN = "they are skipped; what they said is not known, and pending items run again"
_UNREAD = "what they say is not known here: results are made again, and no table can be published"
_ASK = "check the owner and the permissions, and have the disk checked"
_HARMLESS = "nobody reads them"
_TIMED = "their owners are timed by the lease, from the moment they are first seen"
_GAP = "somebody deleted them: a generation may have had two owners, and items may run twice"
_UNLISTED = "commands end there, and what was below it is gone"
_AWAY = "move it away; --repair then makes what can be made again, the rest is in a backup"
_KEEP = "delete nothing below a run while it exists"
_BACKUP = "look again in a minute; if it stays, restore the stage's files from a backup"


@dataclass(slots=True)
class _Journals:
    """The lines and the faults of all journals."""

    lines: int = 0
    damaged: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    """Unit -> the first line that names it."""
    workers: list[str] = field(default_factory=list)


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
    claims = {stage.name: _names(stage.claims) for stage in stages}
    payloads = {stage.name: _payloads(stage) for stage in stages}
    journals = _read_journals(paths)
    logs = {stage.name: StageLog(stage) for stage in stages}
    findings = [_check_log(log, payloads[name]) for name, log in logs.items()]
    wrong = not_directories(paths, manifest)
    whole = all(one.verdict is Verdict.FINE for one in findings)
    units = {
        f"{name}/{unit.name}"
        for name, log in logs.items()
        for segment in log.segments.values()
        for unit in segment.units
    }
    workers = {name[:-5] for name in _names(paths.workers) if name.endswith(".json")}
    findings += _some_fault(
        "directories", Verdict.UNSAFE, "not a directory", wrong, _UNLISTED, _AWAY
    )
    for stage in stages:
        findings += _check_claims(stage, claims[stage.name], units if whole else None, workers)
    foreign = [place for unit, place in journals.units.items() if whole and unit not in units]
    findings += _check_settings(paths, manifest)
    return [*findings, *_judge_journals(journals, foreign, workers), _check_workers(paths, workers)]


def _check_settings(paths: RunPaths, manifest: Manifest) -> list[Finding]:
    """Check the settings of a campaign's update; those in run.json never change."""
    if manifest.campaign is None or not os.path.lexists(paths.campaign):
        return []
    try:
        read_settings(paths, manifest.campaign)
    except HpcToolkitError as error:
        means = "nobody can decide for this campaign"
        return [Finding(paths.campaign.name, Verdict.UNSAFE, error.message, means, error.hint)]
    return [fine(paths.campaign.name, "the settings of an update, whole")]


def _names(directory: Path) -> list[str]:
    """Return the names in a directory; [] for a file in its place, which is a separate finding."""
    try:
        return files.list_names(directory)
    except HpcToolkitError:
        return []


def _payloads(stage: StagePaths) -> set[str]:
    return {
        f"{kind}/{name}"
        for kind in PAYLOADS
        for name in _names(stage.root / kind)
        if not name.startswith(".")
    }


def _check_log(log: StageLog, payloads: set[str]) -> Finding:
    """Check that entries have no gap and all their payloads; report payloads without an entry."""
    check = f"log ({log.paths.name})"
    means = "workers wait for it, and everything behind it does not exist for them"
    numbers = {int(name) for name in _names(log.paths.log) if name.isdigit()}
    try:
        # The hint is written after an entry, so it reveals entries that were deleted.
        numbers.add(log.hint())
        log.poll()
        named = [log.paths.entry(n).readlink().as_posix() for n in range(1, log.length + 1)]
    except (HpcToolkitError, OSError, ValueError, KeyError, TypeError) as error:
        found = f"entry {log.length + 1} cannot be read: {error}"
        return Finding(check, Verdict.UNSAFE, found, means, _BACKUP)
    if max(numbers, default=0) > log.length:
        found = f"entry {log.length + 1}, or what it names, is missing"
        return Finding(check, Verdict.UNSAFE, found, means, _BACKUP)
    if log.table is not None and (line := _bad_line(log, log.paths.root / log.table[1])):
        found = f"line {line} of {log.table[1]}, the published table, is damaged or missing"
        return Finding(check, Verdict.UNSAFE, found, "'hpctk gather' gives no rows", _BACKUP)
    for segment in log.segments.values():
        try:
            for unit in segment.units:
                segment.lines(unit)
        except (HpcToolkitError, OSError) as error:
            means = "commands that need these items end there"
            return Finding(check, Verdict.UNSAFE, str(error), means, _BACKUP)
    left = sorted(payloads.difference(named))
    if not left:
        return fine(check, f"{log.length} entries in order, each with its payload")
    found = f"{log.length} entries in order; no entry names {first_names(left)}"
    means = "it is being added, or a process died while it added it; it does not exist"
    fix = "it may be removed by hand once the stage is complete and nothing runs"
    return Finding(check, Verdict.FINE, found, means, fix)


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


def _check_claims(
    stage: StagePaths, names: list[str], units: set[str] | None, workers: set[str]
) -> list[Finding]:
    """Check the claims of a stage; ``units`` are its known units, None if some are unknown."""
    check = f"claims ({stage.name})"
    generations: dict[str, set[int]] = defaultdict(set)
    foreign, unreadable, ownerless = [], [], []
    for name in sorted(names):
        parsed = parse_claim(name)
        if parsed is None or (units is not None and f"{stage.name}/{parsed[0]}" not in units):
            foreign.append(name)
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
    faults = [
        _some_fault(check, Verdict.UNSAFE, "missing", gaps, _GAP, _KEEP),
        _some_fault(check, Verdict.SLOWER, "cannot be read", unreadable, _TIMED),
        _some_fault(check, Verdict.SLOWER, "of workers without a file", ownerless, _TIMED, _KEEP),
        _some_fault(check, Verdict.SLOWER, "of no known unit", foreign, _HARMLESS),
    ]
    found = [one for fault in faults for one in fault]
    return found or [fine(check, f"{len(names)}, of known units and workers, without a gap")]


def _read_journals(paths: RunPaths) -> _Journals:
    told = _Journals()
    for name in sorted(_names(paths.journals)):
        if not name.endswith(".jsonl"):
            continue
        told.workers.append(name.removesuffix(".jsonl"))
        reader = JournalReader(paths.journals / name)
        try:
            _read_journal(reader, told)
        except OSError as error:
            told.unreadable.append(f"{name} ({error.strerror})")
            continue
        if reader.torn_bytes:
            # Its worker may be writing this line.
            time.sleep(_BEING_WRITTEN_S)
            _read_journal(reader, told)
        told.damaged += [f"{name} at byte {offset}" for offset in reader.bad_lines]
        if reader.torn_bytes:
            told.torn.append(f"{name} ({reader.torn_bytes} bytes)")
    return told


def _read_journal(reader: JournalReader, told: _Journals) -> None:
    for found in reader.poll():
        one = isinstance(found, Line)
        record = found.record if isinstance(found, Line) else found.release
        told.lines += 1 if one else record["lines"] + 1
        unit = str(record.get("unit", ""))
        told.units.setdefault(unit, f"{reader.path.name} at byte {found.start}")


def _judge_journals(told: _Journals, foreign: list[str], workers: set[str]) -> list[Finding]:
    ownerless = [name for name in told.workers if name not in workers]
    slower = Verdict.SLOWER
    faults = [
        _some_fault("journals", Verdict.UNSAFE, "cannot be read", told.unreadable, _UNREAD, _ASK),
        _some_fault("journals", slower, "damaged", told.damaged, _AGAIN, "have the disk checked"),
        _some_fault("journals", slower, "torn at the end", told.torn, _AGAIN),
        _some_fault("journals", slower, "of no known unit", foreign, _HARMLESS),
        _some_fault("journals", slower, "of workers without a file", ownerless, _TIMED, _KEEP),
    ]
    found = [one for fault in faults for one in fault]
    whole = f"{told.lines} lines of {len(told.workers)} workers, each with its right sum"
    return found or [fine("journals", whole)]


def _check_workers(paths: RunPaths, workers: set[str]) -> Finding:
    unreadable = [name for name in sorted(workers) if read_presence(paths.worker(name)) is None]
    if unreadable:
        # A file that was read during a write is complete a moment later.
        time.sleep(_BEING_WRITTEN_S)
        unreadable = [name for name in unreadable if read_presence(paths.worker(name)) is None]
    for found in _some_fault("workers", Verdict.SLOWER, "cannot be read", unreadable, _TIMED):
        return found
    return fine("workers", f"{len(workers)} files, each whole")


def _some_fault(
    check: str, verdict: Verdict, what: str, names: list[str], means: str, fix: str = ""
) -> list[Finding]:
    if not names:
        return []
    return [Finding(check, verdict, f"{what}: {first_names(names)}", means, fix)]
