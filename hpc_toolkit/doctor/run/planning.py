"""Plan the repairs of a run as data, and find the damage that cannot be repaired. Writes nothing.

A repair creates a missing name, rewrites a hint, or moves away files that no process reads. It
writes no journal, no log entry and no payload, so it cannot lose a result.
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
from hpc_toolkit.queue.presence import FINISHED, read_presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader, Line
from hpc_toolkit.rundir.layout import RunPaths, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpc_toolkit.rundir.layout import Manifest, StagePaths

LEFT_ALONE_S = 3600.0
"""Seconds after its last change within which a file may still be in use."""
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")
_PAYLOAD = re.compile(r"(?:items|retries|results)/[^/]+\.jsonl?")
PAYLOADS = ("items", "retries", "results")
_BEING_WRITTEN_S = 0.2

_WHY_DIRECTORY = {
    "claims": "no worker can claim without it; the claims that it held are gone, and a unit that "
    "was begun without a line in a journal is begun once more",
    "journals": "no worker can start without it; results that no table holds are gone with it",
    "workers": "no worker can start without it; workers that it knew count as silent",
    "control": "nobody can be asked to drain without it; what was asked for is forgotten",
}
_WHY_ANY = "it is written to, and was empty or is not read"
_WHY_CLAIMS = "journals have lines of them; without them a generation would have a second owner"
_WHY_HEAD = "idle workers look there for new items; the log says how many entries there are"
_WHY_TEMPORARY = "a process died while it replaced a file; nobody reads them"
_WHY_PAYLOADS = "a process died before it added them to the log; they do not exist"
_WHY_BACK = "an entry of the log names them after all, and everybody waits for them"

_SHOWN = 3

Kind = Literal["directory", "claim", "head", "aside", "back"]

_ACTS: dict[Kind, str] = {
    "directory": "make",
    "claim": "make again",
    "head": "write anew",
    "aside": "move into repaired/",
    "back": "move back from repaired/",
}
_FOUND: dict[Kind, tuple[Verdict, str]] = {
    "directory": (Verdict.UNSAFE, "missing"),
    "claim": (Verdict.UNSAFE, "missing, and journals tell whose they were"),
    "head": (Verdict.SLOWER, "damaged, or not what the log says"),
    "aside": (Verdict.FINE, "left over"),
    "back": (Verdict.UNSAFE, "taken away, and named by the log"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One action for one or more files of a kind."""

    kind: Kind
    """``directory``: create it; ``claim``: create it again; ``head``: rewrite it; ``aside``: move
    it to the same path below ``repaired/``; ``back``: the reverse."""
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
        RunError: ``root`` is not a run, or its run.json cannot be read.
    """
    paths, manifest = RunPaths(root), read_manifest(root)
    if wrong := not_directories(paths, manifest):
        # As long as a part of the run cannot be listed, missing files cannot be determined.
        fix = "is not a directory: move it away and look again"
        return Plan((), tuple(f"{name} {fix}" for name in wrong))
    return _Planning(paths, manifest).plan()


class _Planning:
    def __init__(self, paths: RunPaths, manifest: Manifest) -> None:
        self._paths = paths
        self._manifest = manifest
        self._repairs: list[Repair] = []
        self._left: list[str] = []
        self._logs = {spec.name: self._read_log(spec.name) for spec in manifest.stages}
        self._present = present_workers(paths, time.time())

    def plan(self) -> Plan:
        self._plan_directories()
        owners = self._owners()
        for name, log in self._logs.items():
            if log is not None:
                self._plan_claims(log, owners[name])
                self._plan_head(log)
        self._plan_temporaries()
        self._plan_payloads()
        return Plan(tuple(self._repairs), tuple(self._left))

    def _read_log(self, name: str) -> StageLog | None:
        """Return a stage's log; None, with the reason noted, if it is not readable to its end."""
        stage = self._paths.stage(name)
        log = StageLog(stage)
        gone = self._gone_aside(stage)
        if gone:
            self._add("back", gone, _WHY_BACK, stage=name)
            return None
        try:
            # Listed before the log is read, so that an entry added meanwhile is not missing.
            known = [int(one) for one in files.list_names(stage.log) if one.isdigit()]
            known.append(log.hint())
            log.poll()
        except (HpcToolkitError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            self._left.append(f"entry {log.length + 1} of {name} cannot be read: {error}")
            return None
        if max(known) > log.length or not stage.log.is_dir():
            what = f"entry {log.length + 1}, or what it names," if log.length else "every entry"
            fix = "look again in a minute; if it stays away, restore it from a backup"
            self._left.append(f"the log of {name}: {what} is gone; {fix}")
            return None
        return log

    def _gone_aside(self, stage: StagePaths) -> list[str]:
        """Return the payloads that an entry names, and that an earlier repair moved away."""
        # A target outside the stage would make a repair move files that are not the run's.
        named = sorted(one for one in targets(stage) if _PAYLOAD.fullmatch(one))
        names = [self._below(stage.root / one) for one in named if not (stage.root / one).exists()]
        return [name for name in names if (self._paths.repaired / name).exists()]

    def _plan_directories(self) -> None:
        paths = self._paths
        wanted = dict.fromkeys(run_directories(paths), "")
        for name, log in self._logs.items():
            stage = paths.stage(name)
            wanted[stage.claims] = name
            if log is not None:  # every payload that its entries name exists
                wanted |= {stage.root / kind: name for kind in PAYLOADS}
        for path, name in wanted.items():
            if not path.is_dir():
                why = _WHY_DIRECTORY.get(path.name, _WHY_ANY)
                self._add("directory", [self._below(path)], why, stage=name)

    def _owners(self) -> dict[str, dict[tuple[str, int], str]]:
        """Return stage -> (unit, generation) -> the worker that the journals name."""
        found: dict[str, dict[tuple[str, int], str]] = defaultdict(dict)
        for name in sorted(files.list_names(self._paths.journals)):
            if not name.endswith(".jsonl"):
                continue
            try:
                for stage, unit, generation, worker in _passes(self._paths.journals / name):
                    # Of two owners take the one whose results count (rule R11).
                    known = found[stage].setdefault((unit, generation), worker)
                    found[stage][unit, generation] = min(known, worker)
            except OSError as error:
                self._left.append(f"journals/{name} cannot be read: {error.strerror}")
        return found

    def _plan_claims(self, log: StageLog, owners: dict[tuple[str, int], str]) -> None:
        units = {unit.name for segment in log.segments.values() for unit in segment.units}
        there = set(files.list_names(log.paths.claims))
        missing = {
            claim_name(unit, generation): owner
            for (unit, generation), owner in sorted(owners.items())
            if unit in units and generation > 0 and claim_name(unit, generation) not in there
        }
        # A listing may be a minute old, so look for each name.
        missing = {
            name: owner
            for name, owner in missing.items()
            if not (log.paths.claims / name).is_symlink()
        }
        names = [self._below(log.paths.claims / name) for name in missing]
        self._add("claim", names, _WHY_CLAIMS, stage=log.paths.name, owners=tuple(missing.values()))

    def _plan_head(self, log: StageLog) -> None:
        if log.length and head_is_wrong(log):
            self._add("head", [self._below(log.paths.head)], _WHY_HEAD, stage=log.paths.name)

    def _plan_temporaries(self) -> None:
        found = [
            directory / name
            for directory in (self._paths.root, self._paths.bandit, self._paths.jobs)
            for name in sorted(files.list_names(directory))
            if TEMPORARY.fullmatch(name)
        ]
        self._plan_aside(found, _WHY_TEMPORARY, "temporary files")

    def _plan_payloads(self) -> None:
        for name, log in self._logs.items():
            if log is None:
                continue
            named = targets(log.paths)
            found = [
                log.paths.root / kind / payload
                for kind in PAYLOADS
                if not (log.paths.root / kind).is_symlink()  # it may lead out of the run
                for payload in sorted(files.list_names(log.paths.root / kind))
                if f"{kind}/{payload}" not in named
            ]
            if found and not _is_complete(self._paths, self._manifest, name):
                self._left.append(f"{len(found)} payloads without an entry: {name} is incomplete")
            else:
                self._plan_aside(found, _WHY_PAYLOADS, "payloads without an entry", stage=name)

    def _plan_aside(self, found: list[Path], why: str, what: str, *, stage: str = "") -> None:
        if found and self._present:
            who = ", ".join(self._present[:3])
            self._left.append(f"{len(found)} {what}: workers may be alive: {who}")
            return
        old = [path for path in found if _is_old(path, time.time())]
        if len(old) < len(found):
            young = [path for path in found if path not in old]
            self._left.append(f"{len(young)} {what}: changed within the last hour")
        self._add("aside", [self._below(path) for path in old], why, stage=stage)

    def _add(
        self,
        kind: Kind,
        names: list[str],
        why: str,
        *,
        stage: str = "",
        owners: tuple[str, ...] = (),
    ) -> None:
        if names:
            one = Repair(kind=kind, names=tuple(names), why=why, stage=stage, owners=owners)
            self._repairs.append(one)

    def _below(self, path: Path) -> str:
        return str(path.relative_to(self._paths.root))


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of further ones: ``a, b, c and 2 more``."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def run_directories(paths: RunPaths) -> list[Path]:
    """Return the directories of a run that every command expects."""
    return [paths.workers, paths.journals, paths.logs, paths.control, paths.bandit]


def not_directories(paths: RunPaths, manifest: Manifest) -> list[str]:
    """Return the names below a run that exist, but are not the directories they should be."""
    wanted = [*run_directories(paths), paths.jobs]
    for spec in manifest.stages:
        stage = paths.stage(spec.name)
        wanted += [stage.root.parent, stage.root, stage.log, stage.claims]
        wanted += [stage.root / kind for kind in PAYLOADS]
    found = [path for path in dict.fromkeys(wanted) if os.path.lexists(path) and not path.is_dir()]
    return [str(path.relative_to(paths.root)) for path in found]


def targets(stage: StagePaths) -> set[str]:
    """Return the files that the entries of a stage's log name."""
    paths = (stage.log / name for name in files.list_names(stage.log))
    return {files.read_name(path) for path in paths if path.is_symlink()}


def head_is_wrong(log: StageLog) -> bool:
    """Return whether ``head`` is missing, damaged, or shows a wrong number of entries."""
    for pause_s in (_BEING_WRITTEN_S, 0.0):
        shown = log.hint()
        log.poll()
        if shown == log.length:
            return False
        # A process may be about to write it.
        time.sleep(pause_s)
    return True


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


def present_workers(paths: RunPaths, now_s: float) -> list[str]:
    """Return the workers that may be alive: not finished, and not silent for an hour.

    ``now_s`` is the filesystem's time. Processes are not checked, because a worker may run in
    another container.
    """
    found = []
    for name in sorted(files.list_names(paths.workers)):
        if not name.endswith(".json") or _is_old(paths.workers / name, now_s):
            continue
        one = read_presence(paths.workers / name)
        if one is None or one.state != FINISHED:
            found.append(name.removesuffix(".json"))
    return found


def _is_complete(paths: RunPaths, manifest: Manifest, stage: str) -> bool:
    view = RunView(paths, manifest)
    try:
        view.poll_claims()
        view.poll()
    except (HpcToolkitError, OSError, ValueError, KeyError, TypeError):
        return False
    return view.stages[stage].complete


def _is_old(path: Path, now_s: float) -> bool:
    try:
        return now_s - path.stat().st_mtime > LEFT_ALONE_S
    except OSError:
        return False
