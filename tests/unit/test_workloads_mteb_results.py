"""Scores in mteb's JSON shape: names, errors of repetitions, files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import RunError
from hpc_toolkit.science.workloads.mteb_tasks import main_error, model_of, write_results

VALUE = {"score": 0.5, "stderr": 0.1, "n": 40, "metric": "ap", "kind": "pair-classification"}


def result(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"scores": {"test": list(entries)}}


def test_error_is_that_of_the_mean_of_repetitions() -> None:
    scores = [0.5, 0.7, 0.6, 0.9]
    of_experiments = result({"scores_per_experiment": [{"accuracy": x, "f1": 0} for x in scores]})
    of_levels = result({"v_measures": {"Level 0": scores[:2], "Level 1": scores[2:]}})
    of_clusterings = result({"v_measures": scores})

    expected = statistics.stdev(scores) / 2
    assert main_error(of_experiments, "accuracy") == pytest.approx(expected)
    assert main_error(of_levels, "v_measure") == pytest.approx(expected)
    assert main_error(of_clusterings, "v_measure") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("checkpoint", "model"),
    [
        ("EleutherAI/pythia-14m@step8", ("EleutherAI/pythia-14m", "step8-layer3")),
        ("org/name@refs/pr/1", ("org/name", "refs_pr_1-layer3")),
        ("mini-s/step0", ("local/mini-s_step0", "layer3")),
        ("/data/model/", ("local/data_model", "layer3")),
    ],
)
def test_layer_of_a_checkpoint_is_a_model_of_its_own(
    checkpoint: str, model: tuple[str, str]
) -> None:
    assert model_of(checkpoint, 3) == model


def test_rows_with_a_score_are_written_and_others_left_out(tmp_path: Path) -> None:
    item = {"checkpoint": "a/b", "layer": 2, "task": "bbc-retrieval"}
    rows: list[dict[str, Any]] = [
        {"item": item, "state": "done", "value": VALUE, "seconds": 1.5},
        {"item": {**item, "layer": 3}, "state": "failed", "value": None, "seconds": 0.1},
        {"item": {**item, "layer": 4}, "state": "done", "value": {"width": 3}, "seconds": 0.1},
    ]

    assert write_results(rows, tmp_path) == write_results(rows, tmp_path) == 1

    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert path == tmp_path / "results/local__a_b/layer2/bbc-retrieval.json"
    written = json.loads(path.read_text())
    assert written["scores"]["test"][0]["main_score"] == 0.5
    assert written["scores"]["test"][0]["ap"] == 0.5
    assert written["scores"]["test"][0]["stderr"] == 0.1
    assert (written["task_name"], written["evaluation_time"]) == ("bbc-retrieval", 1.5)


def done(checkpoint: str, task: str = "lee", layer: Any = 1, **more: Any) -> dict[str, Any]:
    item = {"checkpoint": checkpoint, "layer": layer, "task": task}
    return {"item": item, "state": "done", "value": {**VALUE, **more}, "seconds": 1.0}


def test_a_name_that_leads_out_of_its_directory_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    tasks = ("../../../../escaped", "/tmp/escaped", "lee\0", "")
    rows = [*(done("m", task) for task in tasks), done("..@x"), done("@x")]
    rows += [
        done("m", layer="/../../../../../escaped"),
        done("m", mteb={"task_name": "../../../../escaped", "scores": {}}),
    ]

    for row in rows:
        with pytest.raises(RunError, match="is not the name of a file"):
            write_results([done("fine"), row], tmp_path / "deep/er/still/out")
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "others", [["a/b_c", "a_b/c"], ["a/b_c", "/a/b_c/"], ["o/n@r/1", "o/n@r_1"], ["m", "m"]]
)
def test_rows_that_would_be_one_file_are_refused_with_both_names(
    tmp_path: Path, others: list[str]
) -> None:
    with pytest.raises(RunError, match=r"lee\.json: of both ") as caught:
        write_results(map(done, others), tmp_path)

    assert all(json.dumps(done(one)["item"]) in caught.value.message for one in others)
    assert not list(tmp_path.iterdir())


def test_a_score_that_is_no_result_of_a_task_is_named(tmp_path: Path) -> None:
    row = done("m")
    del row["value"]["metric"]

    with pytest.raises(RunError, match="a score without 'metric' is not a result of a task"):
        write_results([row], tmp_path)
