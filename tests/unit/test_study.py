"""Optuna studies on a run: the storage, each trial as an item, and what is refused."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.testing.pytest_storages import StorageTestCase
from optuna.trial import TrialState

from hpc_toolkit import study
from hpc_toolkit.errors import ConfigError, PermanentError, RunError
from hpc_toolkit.rundir.journal import seal_line
from hpc_toolkit.run import Run
from hpc_toolkit.study import studies
from hpc_toolkit.study.storage import TrialFiles, TrialStorage
from hpc_toolkit.study.trials import Trials, reseed
from tests.unit.test_architecture import loaded

optuna.logging.set_verbosity(optuna.logging.WARNING)
RUNNING, WAITING, COMPLETE = TrialState.RUNNING, TrialState.WAITING, TrialState.COMPLETE
PRUNED, FAIL = TrialState.PRUNED, TrialState.FAIL


def square(trial: optuna.Trial) -> float:
    return float(trial.suggest_float("x", -10, 10)) ** 2


def made(root: Path, objective: Any = square, trials: int = 4, **given: Any) -> Run:
    return study.create(root / "run", objective, trials, **given)


def workload(run: Run) -> Trials:
    """What a process of a worker has."""
    return Trials(**run.manifest.stages[0].workload.options, root=str(run.root))


def ran(run: Run, *numbers: int, by: Trials | None = None) -> list[dict[str, Any]]:
    """The values of these trials, as one process runs them; all of them without numbers."""
    items = [{"trial": one} for one in numbers or range(len(run.snapshot().items))]
    return list((by or workload(run)).run(None, iter(items)))


class _Free(TrialFiles):
    """The files without the trials of the run, so that Optuna's own tests can create some."""

    def _begin(self) -> None:
        super()._begin()
        self._ready.clear()

    def _new_trials(self) -> list[dict[str, Any]]:
        return []

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        for log in logs:
            self._append(log)
            self._ready.append(log)


class TestStorage(StorageTestCase):
    """Optuna's tests for storages."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Any:
        run = made(tmp_path)
        return optuna.storages.JournalStorage(_Free(run.paths, run.manifest))
