"""The workload of a study's run: each of its items is a trial of an Optuna objective.

The study is stored as Optuna's journal, in one file per process instead of a shared one. Optuna
replays operations in one order and numbers trials by it. Here the items of the run are the trials,
so every reader knows their numbers, and operations on different trials may come in any order. Of
one trial, those of a lower attempt come first, then those of the lower file name.
"""

from __future__ import annotations

import json
import os
import time
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zlib import crc32

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.queue.items import Item
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.explain import unit_items
from hpc_toolkit.rundir.files import list_names, share, sync_directory
from hpc_toolkit.rundir.journal import JournalWriter, is_whole, seal_line
from hpc_toolkit.rundir.layout import Manifest, RunPaths, read_manifest
from hpc_toolkit.rundir.pickles import loads
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.worker.loading import load_object

_CREATE_STUDY, _CREATE_TRIAL, _STATE = 0, 4, 6  # codes of operations, as in Optuna's own files
_REST = 9
"""Seconds between two looks at the files of others, for each second that a look takes."""


class TrialFiles(BaseJournalBackend):  # type: ignore[misc]
    """The operations of a study, as far as this process sees them; it appends to its own file."""

    def __init__(
        self, paths: RunPaths, manifest: Manifest, settled: Mapping[int, Any] | None = None
    ) -> None:
        """``settled``: state and values of trials by number, for a study that is only read."""
        self._paths, self._manifest, self._settled = paths, manifest, settled
        self._view = RunView(paths, manifest)
        (self._stage,) = self._view.stages.values()
        self._writer: JournalWriter | None = None
        self._own = ""
        """Name of the file of this process; "" before its first operation."""
        self._begin()

    def __reduce__(self) -> Any:
        return type(self), (self._paths, self._manifest, self._settled)

    def _begin(self) -> None:
        self.trial: int | None = None
        """Number of the trial that this process runs."""
        self._attempt = 1
        self.late = False
        """Whether this is not what a reader that begins now would see: operations came after those
        of later attempts, or a trial that had failed can run again."""
        self._newest: dict[Any, tuple[int, str]] = {}
        """Subject -> attempt and file of its last operation."""
        self._entries, self._offsets = 0, dict[str, int]()
        self._numbers: dict[tuple[int, int], int] = {}
        """Entry and position of an item -> number of the trial."""
        self._failed: set[int] = set()
        given = self._manifest.stages[0].workload.options["directions"]
        directions = [int(StudyDirection[one.upper()]) for one in given]
        name = self._manifest.run
        self._ready = [_made(_CREATE_STUDY, study_name=name, directions=directions)]
        self._look_at = 0.0

    def start(self, trial: int) -> None:
        """Begin an attempt at a trial, after a look at what is known of it and of all others."""
        self.trial = None
        self._look()
        self.trial, self._attempt = trial, self._newest.get(trial, (0, ""))[0] + 1
        self._newest[trial] = self._attempt, self._own

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """The operations that are new since the last call; from 0, all of them."""
        if log_number_from == 0 and not self._ready:
            self._begin()
        if time.monotonic() >= self._look_at:
            began = time.monotonic()
            self._look()
            self._look_at = time.monotonic() + _REST * (time.monotonic() - began)
        found, self._ready = self._ready, []
        return found

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write operations of the trial that runs. Raises OSError: they are not in the file."""
        if self._settled is not None:
            raise RuntimeError("this study is read only: a run's trials are made by its workers")
        for log in logs:
            if log["op_code"] == _STATE and log["state"] == TrialState.FAIL:
                continue  # the queue decides whether the trial gets another attempt
            self._append(log)
            self._ready.append(log)

    def _append(self, log: dict[str, Any]) -> None:
        if self._writer is None:
            host = host_name().replace("/", "-")
            self._own = f"{host}-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
            self._paths.study.mkdir(exist_ok=True)
            share(self._paths.study)
            self._writer = JournalWriter(self._paths.study / self._own)
            sync_directory(self._paths.study)
        subject = _subject(log)
        newest = self._newest.get(subject, (0, ""))
        # The last value of an attribute of the study counts; an attempt keeps its number.
        attempt = self._attempt if subject == self.trial else newest[0] + isinstance(subject, str)
        self.late |= (attempt, self._own) < newest
        self._newest[subject] = max(newest, (attempt, self._own))
        text = json.dumps({**log, "attempt": attempt}, separators=(",", ":"))
        try:
            self._writer.append(seal_line(text[:-1].encode()))
            if log["op_code"] == _STATE and TrialState(log["state"]).is_finished():
                self._writer.sync()
        except OSError:
            self._writer = None  # its last line may be torn
            raise
        self._offsets[self._own] = self._writer.size

    def _look(self) -> None:
        if self.trial is None:
            before = self._stage.log.last_retry
            self._view.poll()  # what failed is of no use within a trial
            self.late |= self._stage.log.last_retry != before and bool(self._failed)
        self._ready += self._new_trials()
        found = [
            (log.pop("attempt"), name, log)
            for name in sorted(list_names(self._paths.study))
            for log in self._read(name)
        ]
        for attempt, name, log in sorted(found, key=lambda one: one[:2]):
            if self._is_next(log, attempt, name):
                self._ready.append(log)
        for number, at in self._new_failures():
            when = datetime.fromtimestamp(at, UTC).isoformat()
            facts = {"state": TrialState.FAIL, "values": None, "datetime_complete": when}
            self._ready.append(_made(_STATE, trial_id=number, **facts))
            self._failed.add(number)

    def _new_trials(self) -> list[dict[str, Any]]:
        """The trials of new items, in the order of their numbers."""
        fixed = {}
        for entry, segment in self._stage.log.segments.items():
            for unit in segment.units if entry > self._entries else ():
                for at, item in zip(unit.items, unit_items(self._stage, unit), strict=True):
                    self._numbers[entry, at] = number = item["trial"]
                    fixed[number] = {"fixed_params": item["params"]} if "params" in item else {}
        self._entries = max(self._stage.log.segments, default=0)
        facts = {"study_id": 0, "state": TrialState.WAITING, "datetime_start": None}
        return [_made(_CREATE_TRIAL, system_attrs=fixed[one], **facts) for one in sorted(fixed)]

    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        start = self._offsets.get(name, 0)
        data = b""
        with suppress(OSError), (self._paths.study / name).open("rb") as file:
            file.seek(start)
            data = file.read()  # what cannot be read now is read later
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[name] = start + len(whole)
        for line in whole.splitlines():
            if is_whole(line):
                log = json.loads(line)
                del log["crc"]
                yield log

    def _is_next(self, log: dict[str, Any], attempt: int, name: str) -> bool:
        """Whether an operation that was read can follow those before it."""
        subject = _subject(log)
        if (attempt, name) < self._newest.get(subject, (0, "")):
            self.late = True
            return False
        self._newest[subject] = attempt, name
        wanted = self._settled.get(subject) if self._settled and isinstance(subject, int) else None
        is_end = log["op_code"] == _STATE and TrialState(log["state"]).is_finished()
        return not is_end or wanted in (None, (TrialState(log["state"]).name, log["values"]))

    def _new_failures(self) -> Iterator[tuple[int, float]]:
        """Numbers of trials that failed for good since the last look, and when."""
        for unit in self._stage.state.units.values():
            for position in unit.histories:
                number = self._numbers[unit.unit.entry, position]
                failed = self._stage.state.item_state(unit, position) is ItemState.FAILED
                if failed and number not in self._failed:
                    floor = self._stage.state.floor(unit.unit.entry, position)
                    ref = unit.histories[position].last_failure(floor)
                    record = self._view.failure(ref) if ref is not None else None
                    yield number, record["at"] if record else time.time()


def _subject(log: dict[str, Any]) -> int | str:
    """What an operation changes: the trial of a number, or an attribute of the study."""
    if "trial_id" in log:
        return int(log["trial_id"])
    return f"{log['op_code']} {[*log.get('user_attr', log.get('system_attr', ()))]}"


def _made(code: int, **fields: Any) -> dict[str, Any]:
    """An operation that follows from the files of the queue; nobody has issued it."""
    return {"op_code": code, "worker_id": "", **fields}


class TrialStorage(JournalStorage):  # type: ignore[misc]
    """Optuna's journal storage, whose next trial is the one that :class:`TrialFiles` started."""

    def __init__(self, files: TrialFiles) -> None:
        self._files = files
        super().__init__(files)

    def create_new_trial(self, study_id: int, template_trial: Any = None) -> int:
        """Refuse: a run has as many trials as it has items."""
        message = "a run's trials are fixed: hpc_toolkit.study.create() takes their number"
        raise RuntimeError(message)

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> Any:
        """Of waiting trials, which Optuna takes the next one from, only that one."""
        if self._files.trial is not None and states == (TrialState.WAITING,):
            return [self.get_trial(self._files.trial)]
        return super().get_all_trials(study_id, deepcopy=deepcopy, states=states)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Any = None) -> bool:
        """Let this process run its trial, also if another one that died had begun it."""
        again = state == TrialState.RUNNING and self.get_trial(trial_id).state == state
        return again or bool(super().set_trial_state_values(trial_id, state, values))


SAMPLERS = {
    "tpe": lambda: optuna.samplers.TPESampler(constant_liar=True),
    "gp": optuna.samplers.GPSampler,
    "cmaes": optuna.samplers.CmaEsSampler,
    "random": optuna.samplers.RandomSampler,
}
PRUNERS = {
    "hyperband": optuna.pruners.HyperbandPruner,
    "median": optuna.pruners.MedianPruner,
    "none": optuna.pruners.NopPruner,
}


class Trials:
    """The workload: it lets the sampler choose the parameters of a trial, and calls the objective.

    The result of a trial is ``state`` (COMPLETE or PRUNED), ``value`` (``values.0`` and so on of
    several objectives), and ``params.NAME`` for each parameter. A trial whose objective returns no
    number, or NaN, fails at once; one whose objective raises has as many attempts as any item.
    """

    def __init__(
        self,
        objective: Any,
        directions: Sequence[str],
        sampler: Any = "tpe",
        pruner: Any = "none",
        seed: int | None = None,
        root: str = "",
    ) -> None:
        self._objective = made(objective) or load_object(objective, ())
        self._sampler = made(sampler) or SAMPLERS[sampler]()
        self._pruner = made(pruner) or PRUNERS[pruner]()
        self._directions, self._seed, self._root = directions, seed, root
        self._storage: TrialStorage | None = None
        self._files: TrialFiles | None = None
        if seed is None:
            self._sampler.reseed_rng()  # each process has a copy of one state

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: None, items: Iterable[Item]) -> Iterator[dict[str, Any]]:
        for item in items:
            yield self._attempt(item["trial"])

    def _attempt(self, number: int) -> dict[str, Any]:
        storage = self._opened(number)
        returned = None
        if not storage.get_trial(number).state.is_finished():
            try:
                returned = self._optimize(storage, number)
            except Exception:
                # A worker that was declared dead may have finished the trial meanwhile.
                if not storage.get_trial(number).state.is_finished():
                    raise
        trial = storage.get_trial(number)
        if not trial.state.is_finished():
            message = f"the objective returned {returned!r:.200}"
            count = len(self._directions)
            numbers = "a number" if count == 1 else f"{count} numbers"
            raise PermanentError(message, hint=f"return {numbers}, and not NaN")
        return row_of(trial)

    def _optimize(self, storage: TrialStorage, number: int) -> Any:
        """Run one trial as Optuna does; what the objective returned."""
        returned = None

        def objective(trial: optuna.Trial) -> Any:
            nonlocal returned
            returned = self._objective(trial)
            return returned

        if self._seed is not None:
            reseed(self._sampler, crc32(f"{self._seed} {number}".encode()))
        used = {"sampler": self._sampler, "pruner": self._pruner}
        study = optuna.load_study(
            study_name=storage.get_study_name_from_id(0), storage=storage, **used
        )
        study.optimize(objective, n_trials=1)
        return returned

    def _opened(self, number: int) -> TrialStorage:
        """The storage with what is known now, in which the trial is the next one to run."""
        if self._files is not None:
            self._files.start(number)
        if self._storage is None or self._files is None or self._files.late:
            root = Path(self._root)
            self._files = TrialFiles(RunPaths(root), read_manifest(root))
            self._storage = TrialStorage(self._files)
            self._files.start(number)
        return self._storage


def made(given: Any) -> Any:
    """The object of a pickle in the options of a run; None for the name of one."""
    return loads(b64decode(given["pickle"])) if isinstance(given, dict) else None


def reseed(sampler: BaseSampler, seed: int) -> None:
    """Set the states of all random numbers of a sampler; ``reseed_rng`` takes no seed."""
    for one in vars(sampler).values():
        if isinstance(one, BaseSampler):
            reseed(one, seed)
        elif hasattr(getattr(one, "rng", None), "seed"):
            one.rng.seed(seed)


def row_of(trial: FrozenTrial) -> dict[str, Any]:
    """The value of a finished trial's item."""
    values = trial.values or []
    named = {f"values.{at}": value for at, value in enumerate(values)}
    named = {"value": values[0]} if len(values) == 1 else named
    params = {f"params.{name}": value for name, value in trial.params.items()}
    return {"state": trial.state.name, **named, **params}


def outcome(value: Mapping[str, Any]) -> tuple[str, list[float] | None]:
    """State and values of a trial, from the value of its item."""
    names = [one for one in value if one == "value" or one.startswith("values.")]
    return value["state"], [value[one] for one in names] or None
