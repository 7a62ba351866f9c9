"""The workload of a study's run: each of its items is a trial of an Optuna objective."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import optuna
from optuna.samplers import BaseSampler

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.rundir.layout import RunPaths, read_manifest
from hpc_toolkit.rundir.pickles import loads
from hpc_toolkit.study.storage import TrialFiles, TrialStorage
from hpc_toolkit.worker.loading import load_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from optuna.trial import FrozenTrial

    from hpc_toolkit.queue.items import Item

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
    named = {"value": values[0]} if len(values) == 1 else enumerated(values)
    params = {f"params.{name}": value for name, value in trial.params.items()}
    return {"state": trial.state.name, **named, **params}


def enumerated(values: Sequence[float]) -> dict[str, float]:
    return {f"values.{at}": value for at, value in enumerate(values)}


def outcome(value: Mapping[str, Any]) -> tuple[str, list[float] | None]:
    """State and values of a trial, from the value of its item."""
    names = [one for one in value if one == "value" or one.startswith("values.")]
    return value["state"], [value[one] for one in names] or None
