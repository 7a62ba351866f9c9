"""Check a run's files: which are damaged, missing or left over. Writes nothing, takes no lock."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from hpc_toolkit.campaign.settings import read_settings
from hpc_toolkit.doctor.findings import Finding, Verdict, fine
from hpc_toolkit.doctor.repairs import first_names, read_log
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.claims import claim_name, parse_claim
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.results.tables import row_fault
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader
from hpc_toolkit.rundir.layout import RunPaths, read_manifest
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.queue.log import StageLog
    from hpc_toolkit.rundir.layout import Manifest, StagePaths

_BEING_WRITTEN_S = 0.2

_AGAIN = "they are skipped; what they said is not known, and pending items run again"
_UNREAD = "what they say is not known here: results are made again, and no table can be published"
_ASK = "check the owner and the permissions, and have the disk checked"
_FOREIGN = "a line about an unknown item does not count; other lines of a wrong generation do"
_TIMED = "their owners are timed by the lease, from the moment they are first seen"
_GAP = "somebody deleted them: a generation may have had two owners, and items may run twice"
_KEEP = "delete nothing below a run while it exists"
_BACKUP = "look again in a minute; if it stays, restore the stage's files from a backup"


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
    findings += _check_settings(paths, manifest)
    return [*findings, *journals, _check_workers(paths, workers)]


def _check_settings(paths: RunPaths, manifest: Manifest) -> list[Finding]:
    """Check the settings of a campaign's update; those in run.json never change."""
    if manifest.campaign is None or not os.path.lexists(paths.campaign):
        return []
    try:
        read_settings(paths, manifest.campaign)
    except HpcToolkitError as error:
        means = "no coordinator can continue this campaign"
        return [Finding(paths.campaign.name, Verdict.UNSAFE, error.message, means, error.hint)]
    return [fine(paths.campaign.name, "the settings of an update, whole")]


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
    return [
        *_some_fault(check, Verdict.UNSAFE, "cannot be read", unreadable, _UNREAD, _ASK),
        *_some_fault(check, slower, "damaged", damaged, _AGAIN, "have the disk checked"),
        *_some_fault(check, slower, "torn at the end", torn, _AGAIN),
        *_some_fault(check, slower, "lines that do not fit the run", foreign, _FOREIGN),
    ] or [
        fine(
            check,
            f"{counted(lines, 'line')} of {counted(len(names), 'worker')}, all checksums match",
        )
    ]


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
