"""'hpctk study': real workers run Optuna trials, and are killed in the middle of them."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpc_toolkit import Run, study
from tests.integration.realrun import Hpctk

TUNE = """\
import json, os, signal, time
import optuna

def kill(trial):
    \"\"\"Once for some trials: the process, the worker with it, or an exception.\"\"\"
    how = {3: "process", 11: "worker", 17: "error", 23: "process", 29: "worker"}.get(trial.number)
    if how is None or os.path.exists(f"killed-{trial.number}"):
        return
    open(f"killed-{trial.number}", "w").close()
    if how == "error":
        raise ValueError("once")
    if how == "worker":  # its log is named after it
        log = os.path.basename(os.readlink("/proc/self/fd/1"))
        os.kill(int(log.split("-")[-2]), signal.SIGKILL)
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)

def objective(trial):
    x = trial.suggest_float("x", -10, 10)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    y = trial.suggest_int("y", 0, 9) if kind == "a" else 0
    if trial.number == 13:
        raise KeyError("always")
    if trial.number == 19:
        return float("nan")
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps([trial.number, trial.params]) + "\\n")
    for step in range(1, 6):
        trial.report(x * x + y + 20 / step, step)
        kill(trial)
        if trial.should_prune():
            raise optuna.TrialPruned
    with open("ends.jsonl", "a") as file:
        file.write(json.dumps([trial.number, x * x + y]) + "\\n")
    return x * x + y
"""
LINE = [
    *("study", "tune.py:objective", "--trials", "40", "--run", "runs/tune", "--seed", "1"),
    *("--pruner", "hyperband", "--max-attempts", "2"),
]


@pytest.fixture(autouse=True)
def objective(hpctk: Hpctk) -> None:
    (hpctk.cwd / "tune.py").write_text(TUNE)


def lines(name: str) -> dict[int, list[Any]]:
    found = defaultdict(list)
    for line in Path(name).read_text().splitlines():
        number, what = json.loads(line)
        found[number].append(what)
    return found


def checked(root: str, trials: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """The trials and rows of a complete study, which agree, and repeat what they were."""
    run = Run.open(root)
    found, rows = study.load(run).trials, run.results()
    assert run.status().complete
    assert [one.number for one in found] == [row["item"]["trial"] for row in rows]
    assert [one.number for one in found] == list(range(trials))
    for number, calls in lines("calls.jsonl").items():
        assert all(one == calls[0] for one in calls), number
        assert calls[0] == found[number].params
    for number, values in lines("ends.jsonl").items():
        assert values == [found[number].value]  # what returned is not run again
    for one, row in zip(found, rows, strict=True):
        assert one.state.is_finished()
        if row["state"] == "done":
            params = {key[7:]: row["value"][key] for key in row["value"] if "params." in key}
            own = one.state.name, one.value, one.params
            assert own == (row["value"]["state"], row["value"]["value"], params)
    assert len({one.params["x"] for one in found}) == trials
    return found, rows


def test_killed_workers_repeat_their_trials_and_no_trial_is_lost(hpctk: Hpctk) -> None:
    ended = hpctk(*LINE, "--workers", "4")

    assert (ended.code, ended.out) == (0, "runs/tune\n")
    assert len(list(Path().glob("killed-*"))) == 5
    found, rows = checked("runs/tune", 40)
    calls = lines("calls.jsonl")
    assert {number for number in calls if len(calls[number]) > 1} >= {3, 11, 17, 23, 29}
    states = Counter(one.state.name for one in found)
    assert [n for n, one in enumerate(found) if one.state.name == "FAIL"] == [13, 19]
    assert [rows[n]["attempts"] for n in (13, 19)] == [2, 1]
    assert "the objective returned nan" in rows[19]["error"]
    assert all(list(one.intermediate_values) == sorted(one.intermediate_values) for one in found)
    best = study.load("runs/tune").best_trial
    shown = hpctk("status", "runs/tune").out
    pruned = f"{states['PRUNED']} pruned"
    assert f"tpe, hyperband, {states['COMPLETE']} complete, 2 fail, {pruned}" in shown
    assert f"{best.value:.6g} in trial {best.number}" in shown
    hpctk("report", "runs/tune")
    assert pruned in Path("runs/tune/report.html").read_text()
    record = json.loads(hpctk("status", "runs/tune", "--json").out)
    assert (record["best"]["reward"], record["best"]["trial"]) == (best.value, best.number)
    hpctk("gather", "runs/tune", "-o", "rows.csv")
    head = Path("rows.csv").read_text().splitlines()[0]
    assert head.endswith("value.state,value.value,value.params.x,value.params.kind,value.params.y")
    export = ("export", "runs/tune", "--to", "optuna")
    assert hpctk(*export).out == "study.log\n"
    journal = optuna.storages.journal.JournalFileBackend("study.log")
    storage = optuna.storages.JournalStorage(journal)
    exported = optuna.load_study(study_name="tune", storage=storage)
    assert [_told(one) for one in exported.trials] == [_told(one) for one in found]
    assert exported.best_value == best.value
    again = hpctk(*export)
    assert again.code == 1
    assert "DuplicatedStudyError" in again.err
    assert hpctk(*LINE, "--workers", "4").code == 0
    assert lines("calls.jsonl") == calls


def _told(trial: Any) -> Any:
    return trial.state, trial.values, trial.params, trial.intermediate_values, trial.system_attrs


def test_workers_elsewhere_run_a_study_and_a_retry_of_what_failed(hpctk: Hpctk) -> None:
    hpctk(*LINE, "--workers", "0")
    assert hpctk("work", "runs/tune", "--workers", "2").code == 0

    checked("runs/tune", 40)
    tune = Path("tune.py")
    tune.write_text(tune.read_text().replace("== 13", "== -1").replace("== 19", "== -1"))
    hpctk("retry", "runs/tune")
    assert study.load("runs/tune").trials[13].state == optuna.trial.TrialState.RUNNING
    assert hpctk("work", "runs/tune").code == 0
    found, _ = checked("runs/tune", 40)
    assert all(one.state.name in ("COMPLETE", "PRUNED") for one in found)


def test_a_script_elsewhere_several_objectives_and_wrong_lines(hpctk: Hpctk) -> None:
    Path("sub").mkdir()
    Path("sub/near.py").write_text("def two(x):\n    return x, -x\n")
    text = "import near\ndef both(trial):\n    return near.two(trial.suggest_float('x', 0, 1))\n"
    Path("sub/two.py").write_text(text)
    line = ("study", "sub/two.py:both", "--trials", "3", "--directions", "minimize,maximize")

    assert hpctk(*line, "--workers", "0").out == "runs/two-both\n"
    assert study.load("runs/two-both").directions == [
        optuna.study.StudyDirection.MINIMIZE,
        optuna.study.StudyDirection.MAXIMIZE,
    ]
    assert {one.state.name for one in study.load("runs/two-both").trials} == {"WAITING"}
    assert hpctk(*line).code == 0
    values = [one.values for one in study.load("runs/two-both").trials]
    assert all(x == -y for x, y in values)
    assert "study    tpe, 3 complete\n" in hpctk("status", "runs/two-both").out
    for words, said in (
        (["study", "tune.py:objective"], "a number of trials is needed"),
        (["study", "tune.py:other", "--trials", "1"], "module 'tune' has no 'other'"),
        (["study", "gone.py:objective", "--trials", "1"], "no module named 'gone'"),
        ([*line[:3], "4", *line[4:]], "runs/two-both was created with other trials"),
        (["study", "tune.py:objective", "--trials", "1", "--direction", "up"], "'up' is not one"),
        (["export", "runs/two-both", "--to", "optuna", "--into", "/gone/a.log"], "/gone/a.log: "),
    ):
        ended = hpctk(*words)
        assert (ended.code, said in ended.err) == (1, True), (words, ended.err)
    assert os.listdir("runs") == ["two-both"]
