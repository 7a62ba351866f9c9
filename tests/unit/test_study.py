"""Optuna studies on a run: the storage, each trial as an item, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.testing.pytest_storages import StorageTestCase
from optuna.trial import TrialState

from hpc_toolkit import study
from hpc_toolkit.campaign.arms import arm_id
from hpc_toolkit.errors import ConfigError, PermanentError, RunError
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.journal import JournalWriter, seal_line
from hpc_toolkit.study.trials import TrialFiles, Trials, TrialStorage
from tests.unit.playedcampaign import NOOP, Play, toy
from tests.unit.test_architecture import loaded
from tests.unit.test_campaign_arms import campaign

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore:.constraints_func. has been deprecated"),
]
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
    items = [{"trial": one} for one in numbers or range(len(run.items()))]
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


class TestStorage(StorageTestCase):  # type: ignore[misc]
    """Optuna's tests for storages."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Any:
        run = made(tmp_path)
        return optuna.storages.JournalStorage(_Free(run.paths, run.manifest))


def attempted(attempt: int, value: float) -> list[bytes]:
    """The lines of a file whose process attempted three trials, the first without an end."""
    own = {"worker_id": "w", "attempt": attempt}
    space = optuna.distributions.distribution_to_json(FloatDistribution(0, 99))
    begun = {"op_code": 6, "state": 0, "values": None, "datetime_start": "2026-01-01T00:00:00"}
    param = {"op_code": 5, "param_name": "x", "param_value_internal": value, "distribution": space}
    report = {"op_code": 7, "step": attempt, "intermediate_value": value}
    end = {"op_code": 6, "state": 1, "values": [value], "datetime_complete": "2026-01-02T00:00:00"}
    return [
        seal_line(json.dumps({**own, "trial_id": at, **log})[:-1].encode())
        for at in range(3)
        for log in (begun, param, report, *([end] if at else []))
    ]


FILES = {"b.jsonl": attempted(1, 3.0), "a.jsonl": attempted(2, 5.0), "c.jsonl": attempted(2, 7.0)}
WANTED = [
    (RUNNING, None, {"x": 7.0}, {1: 3.0, 2: 7.0}),
    *[(COMPLETE, [3.0], {"x": 3.0}, {1: 3.0})] * 2,
]


def seen(storage: TrialStorage) -> list[Any]:
    trials = storage.get_all_trials(0)
    return [(one.state, one.values, one.params, one.intermediate_values) for one in trials]


@given(
    st.lists(st.tuples(st.sampled_from(sorted(FILES)), st.booleans()), max_size=40),
    st.integers(0, 60),
)
@settings(max_examples=50)
def test_readers_that_see_files_in_any_order_see_one_study(
    tmp_path: Path, order: list[tuple[str, bool]], torn: int
) -> None:
    """Three workers attempt the same trials, and a reader sees their lines mixed, late and torn."""
    root = tmp_path / "run"
    run = Run.open(root) if root.exists() else made(tmp_path, trials=3)
    shutil.rmtree(run.paths.study, ignore_errors=True)
    run.paths.study.mkdir()
    reader = TrialFiles(run.paths, run.manifest)
    storage, left = TrialStorage(reader), {name: [*some] for name, some in FILES.items()}

    def write(name: str, data: bytes) -> None:
        with (run.paths.study / name).open("ab") as file:
            file.write(data)

    for name, look in order:
        data = left[name].pop(0) if left[name] else b""
        write(name, data[:torn])
        if look:
            reader._look_at = 0.0
            storage.get_all_trials(0)
        write(name, data[torn:])
    for name, some in left.items():
        write(name, b"".join(some))
    reader._look_at = 0.0
    now = seen(storage)

    assert seen(TrialStorage(TrialFiles(run.paths, run.manifest))) == WANTED
    assert reader.late or now == WANTED


def all_kinds(trial: optuna.Trial) -> Any:
    kind = trial.suggest_categorical("kind", ["deep", None, 3, 0.5, True])
    values = [
        trial.suggest_float("float", -1, 1),
        trial.suggest_float("log", 1e-9, 1e3, log=True),
        trial.suggest_float("step", 0, 1, step=0.1),
        trial.suggest_int("int", 1, 64),
        trial.suggest_int("int log", 1, 1 << 40, log=True),
        trial.suggest_int("int step", 0, 98, step=7),
        trial.suggest_float("constant", 2, 2),
    ]
    if kind == "deep":
        values.append(trial.suggest_float("deep", 0, 1))
    trial.set_user_attr("nested", {"list": [1, "two", None], "kind": str(kind)})
    for step in range(4):
        trial.report(math.inf if step == 1 else values[0] / (step + 1), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return sum(values) / 3


class Nan(optuna.pruners.NopPruner):  # type: ignore[misc]
    """Prunes every third trial."""

    def prune(self, study: optuna.Study, trial: Any) -> bool:
        return bool(trial.number % 3 == 2)


def test_values_parameters_reports_and_attributes_come_back_exactly(tmp_path: Path) -> None:
    seen: dict[Any, Any] = {}

    def watched(trial: optuna.Trial) -> Any:
        try:
            value = all_kinds(trial)
        finally:
            seen[trial.number] = trial.params
        seen[trial.number, "value"] = value
        return value

    run = made(tmp_path, all_kinds, 12, seed=1, pruner=Nan())
    by = workload(run)
    by._objective = watched
    rows = ran(run, by=by)

    for number, (trial, row) in enumerate(zip(study.load(run).trials, rows, strict=True)):
        assert trial.params == seen[number]
        named = {key.removeprefix("params."): row[key] for key in row if key.startswith("params.")}
        assert named == seen[number]
        assert list(map(type, named.values())) == list(map(type, seen[number].values()))
        assert trial.user_attrs["nested"]["list"] == [1, "two", None]
        assert (trial.state, row["state"]) == (
            (PRUNED, "PRUNED") if number % 3 == 2 else (COMPLETE, "COMPLETE")
        )
        steps = [0] if trial.state == PRUNED else [0, 1, 2, 3]
        assert list(trial.intermediate_values) == steps
        value = seen.get((number, "value"), trial.intermediate_values[0])
        assert trial.value == row["value"] == value
        assert trial.datetime_start <= trial.datetime_complete
    assert {"deep" in seen[one] for one in range(12)} == {True, False}


class Died(BaseException):
    """The end of a process, as far as Optuna sees it."""


def test_a_trial_of_a_process_that_died_runs_again_with_its_parameters(tmp_path: Path) -> None:
    calls: list[tuple[float, ...]] = []

    def objective(trial: optuna.Trial) -> Any:
        x, y = (trial.suggest_float(name, 0, 1) for name in "xy")
        calls.append((x, y))
        trial.report(x, 1)
        trial.report(y, 2)
        if len(calls) == 1:
            raise Died
        return x + y + trial.suggest_float("z", 0, 1)

    run = made(tmp_path, square, 2)  # without a seed, so that other parameters would be drawn
    first, second = workload(run), workload(run)
    first._objective = second._objective = objective
    with pytest.raises(Died):
        ran(run, 0, by=first)
    (elsewhere,) = [one for one in study.load(run).trials if one.number == 0]
    (row,) = ran(run, 0, by=second)
    again = ran(run, 0, by=first)

    assert elsewhere.state == RUNNING
    assert len(calls) == 2  # a trial that was finished is not run again
    assert calls[0] == calls[1]
    assert again == [row]
    trial = study.load(run).trials[0]
    assert trial.state == COMPLETE
    assert trial.intermediate_values == {1: calls[0][0], 2: calls[0][1]}
    assert trial.value == sum(calls[0]) + trial.params["z"]


def test_a_worker_that_was_declared_dead_gives_the_result_of_the_other(tmp_path: Path) -> None:
    run = made(tmp_path, square, 2)
    slow, fast = workload(run), workload(run)

    def overtaken(trial: optuna.Trial) -> float:
        trial.suggest_float("x", -10, 10)
        found.extend(ran(run, 0, by=fast))
        assert slow._files is not None
        slow._files._look_at = 0.0  # a busy machine looks again only later
        return 1e9

    found: list[dict[str, Any]] = []
    slow._objective = overtaken

    assert ran(run, 0, by=slow) == found
    assert study.load(run).trials[0].value == found[0]["value"] < 1e3


@pytest.mark.parametrize(
    ("returned", "directions"),
    [
        (math.nan, 1),
        (None, 1),
        ("text", 1),
        ([1.0, 2.0], 1),
        (1.0, 2),
        ([1.0, math.nan], 2),
        ([], 1),
    ],
)
def test_what_is_no_number_fails_a_trial_for_good(
    tmp_path: Path, returned: Any, directions: int
) -> None:
    run = made(tmp_path, lambda _: returned, 1, directions=["minimize"] * directions)

    with pytest.raises(PermanentError, match="the objective returned") as caught:
        ran(run)

    assert "not NaN" in caught.value.hint
    assert study.load(run).trials[0].state == RUNNING  # until the queue has it


def test_several_objectives_constraints_and_enqueued_trials(tmp_path: Path) -> None:
    def objective(trial: optuna.Trial) -> tuple[float, float]:
        x = trial.suggest_float("x", 0, 1)
        trial.set_user_attr("over", x - 0.5)
        return x, -x

    sampler = optuna.samplers.NSGAIISampler(
        population_size=4, constraints_func=lambda trial: (trial.user_attrs["over"],)
    )
    run = made(
        tmp_path,
        objective,
        12,
        sampler=sampler,
        directions=["minimize", "maximize"],
        enqueue=[{"x": 0.25}, {"x": 0.75}],
        seed=3,
    )
    rows = ran(run)
    found = study.load(run)

    assert [row["params.x"] for row in rows[:2]] == [0.25, 0.75]
    assert [(row["values.0"], row["values.1"]) for row in rows[:2]] == [
        (0.25, -0.25),
        (0.75, -0.75),
    ]
    assert [tuple(one.values) for one in found.trials] == [
        (row["values.0"], row["values.1"]) for row in rows
    ]
    assert all(one.system_attrs["constraints"] == [one.user_attrs["over"]] for one in found.trials)
    assert {one.number for one in found.best_trials} <= {
        n for n, row in enumerate(rows) if row["params.x"] <= 0.5
    }


SAMPLERS: dict[str, Any] = {
    **{name: (lambda name=name: name) for name in study.SAMPLERS},
    "qmc": lambda: optuna.samplers.QMCSampler(
        scramble=True, seed=1, warn_independent_sampling=False
    ),
    "grid": lambda: optuna.samplers.GridSampler({"x": [1.0, 2.0, 3.0], "y": [0, 1, 2, 3]}),
    "brute": optuna.samplers.BruteForceSampler,
    "nsga3": lambda: optuna.samplers.NSGAIIISampler(population_size=4),
    "fixed": lambda: optuna.samplers.PartialFixedSampler(
        {"y": 2}, optuna.samplers.TPESampler(seed=1)
    ),
}


@pytest.mark.parametrize(("name", "pruner"), [*zip(SAMPLERS, study.PRUNERS * 3, strict=True)])
def test_every_sampler_and_pruner_works_in_several_processes(
    tmp_path: Path, name: str, pruner: str
) -> None:
    def objective(trial: optuna.Trial) -> Any:
        if name == "brute":
            x = float(trial.suggest_int("x", 1, 3))
        else:
            x = trial.suggest_float("x", 1, 3)
        y = trial.suggest_int("y", 0, 3)
        for step in range(1, 6):
            trial.report(x * y + step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return x * y

    run = made(tmp_path, objective, 12, sampler=SAMPLERS[name](), pruner=pruner, seed=5)
    processes = [workload(run) for _ in range(3)]
    rows = [ran(run, number, by=processes[number % 3])[0] for number in range(12)]

    trials = study.load(run).trials
    assert [one.state for one in trials].count(COMPLETE) >= 2
    assert all(one.state in (COMPLETE, PRUNED) for one in trials)
    assert [one.state.name for one in trials] == [row["state"] for row in rows]
    pairs = {(row["params.x"], row["params.y"]) for row in rows}
    assert len(pairs) >= (12 if name in ("grid", "brute", "random", "qmc") else 6)
    if name == "fixed":
        assert {row["params.y"] for row in rows} == {2}


# The last one has another sampler inside.
@pytest.mark.parametrize("sampler", ["tpe", "random", "gp", "cmaes", "fixed"])
def test_a_seed_gives_each_trial_its_own_parameters_and_the_same_ones_again(
    tmp_path: Path, sampler: str
) -> None:
    def values(name: str, seed: int | None) -> list[float]:
        run = made(tmp_path / name, square, 8, sampler=SAMPLERS[sampler](), seed=seed)
        return [row["params.x"] for row in ran(run)]

    first, again, other = values("a", 1), values("b", 1), values("c", 2)

    assert first == again != other
    assert len({*first, *other}) == 16
    assert values("d", None) != values("e", None)


def test_what_a_study_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str, **given: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            made(tmp_path, **given)

    refused("'best' is not one of tpe, gp, cmaes, random", sampler="best")
    refused("'some' is not one of hyperband", pruner="some")
    refused("'up' is not one of minimize, maximize", directions=["up"])
    lock = threading.Lock()
    refused("the objective", objective=lambda _: lock)
    with monkeypatch.context() as patch:
        for sampler, package in (("cmaes", "cmaes"), ("gp", "torch"), ("tpe", "optuna")):
            patch.setattr(
                study, "find_spec", lambda name, package=package: None if name == package else 1
            )
            with pytest.raises(ConfigError, match=f"needs {package}") as caught:
                made(tmp_path, sampler=sampler)
            assert f"install {package}" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()

    run = made(tmp_path, seed=1)
    assert made(tmp_path, seed=1).root == run.root
    refused("other seed", seed=2)
    refused("other objective", seed=1, objective=lambda trial: trial.suggest_float("x", 0, 1))
    refused("3 trials are enqueued", trials=1, enqueue=[{"x": at} for at in range(3)])
    refused("other sampler and pruner", seed=1, sampler="random", pruner="median")
    refused("other trials", seed=1, trials=5)
    refused("other max attempts", seed=1, max_attempts=1)
    found = study.load(run)
    changes: list[Any] = [
        lambda: found.enqueue_trial({"x": 1}),
        lambda: found.optimize(square, n_trials=1),
        lambda: found.set_user_attr("a", 1),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match="a run's trials"):
            change()
    other = Run.create(tmp_path / "list", [{"n": 1}], command="true {n}")
    with pytest.raises(RunError, match="is not a study"):
        study.load(other)


def test_a_disk_that_was_full_costs_the_attempt_and_no_line_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path, square, 2)
    by = workload(run)
    ran(run, 0, by=by)

    def torn(self: Any, data: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(data[:7])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(JournalWriter, "append", torn)
        with pytest.raises(OSError, match="No space"):
            ran(run, 1, by=by)
    (row,) = ran(run, 1, by=by)

    assert [one.value for one in study.load(run).trials][1] == row["value"]
    assert len(list(run.paths.study.iterdir())) == 2


def test_reading_a_study_imports_no_optuna(tmp_path: Path) -> None:
    run = made(tmp_path)
    root = str(run.root)

    for argv in (["status", root], ["status", root, "--json"], ["gather", root, "--partial"]):
        assert not loaded(*argv) & {"optuna", "torch", "pandas", "matplotlib"}


ROWS = """rows = [
  { lr = 0.1, depth = 2, model = "a", opt = [1, 2], on = true },
  { lr = 0.01, depth = 4, model = "b", opt = [1, 2], on = false },
  { lr = 0.001, depth = 8, model = "fails", on = true },
  { lr = 0.01, depth = 2, model = "b", opt = [3], on = true },
]"""


def test_a_campaign_is_a_study_of_its_arms(tmp_path: Path, play: Play) -> None:
    def value(item: dict[str, Any]) -> dict[str, Any] | None:
        return None if item["model"] == "fails" else {"score": item["depth"] / 8, "stderr": 0.01}

    tasks = f"workload = '{NOOP}'\nnames = ['a']"
    own = campaign(tmp_path, ROWS, "budget = 4\npolicy = 'random'", tasks=tasks)
    played = play(own, value)
    assert played.killed(1)
    early = study.load(played.root)
    played.coordinate()

    found = study.load(played.root)

    assert {one.state for one in early.trials} <= {COMPLETE, RUNNING, FAIL}
    by_arm = {arm_id({**one.keys}): one for one in own.arms()}
    states = {"a": COMPLETE, "b": COMPLETE, "fails": FAIL}
    assert len(found.trials) == 4
    for one in found.trials:
        keys = by_arm.pop(one.user_attrs["arm"]).keys
        told = {**keys, "opt": json.dumps(keys["opt"])} if "opt" in keys else keys
        assert (one.params, one.state) == (told, states[keys["model"]])
        if one.state == COMPLETE:
            assert one.value == one.user_attrs["score.a"] == keys["depth"] / 8
            assert one.user_attrs["stderr"] == 0.01
    spaces = found.best_trial.distributions
    assert spaces["lr"] == FloatDistribution(0.001, 0.1, log=True)
    assert spaces["depth"] == IntDistribution(2, 8, log=True)
    assert spaces["model"].choices == ("a", "b", "fails")
    assert spaces["opt"].choices == ("[1, 2]", "[3]")
    assert spaces["on"].choices == (True, False)
    assert set(found.trials_dataframe()["params_depth"]) == {2, 4, 8}


def test_an_arm_that_a_race_dropped_is_a_pruned_trial(play: Play) -> None:
    played = play(toy({"policy": "racing", "options": {"first": 2, "c": 3.0}}))
    played.coordinate()

    found = study.load(played.root)

    dropped = [one for one in found.trials if one.state == PRUNED]
    assert dropped
    assert all(len(one.user_attrs) == 4 and one.values is None for one in dropped)
    best = played.summary().best
    assert best is not None
    assert found.best_trial.user_attrs["arm"] == best.arm
    assert found.best_trial.params == best.keys
