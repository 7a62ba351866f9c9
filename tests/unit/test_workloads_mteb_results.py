"""Results of mteb: names of models, and errors of repetitions."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from hpc_toolkit.science.workloads.mteb_tasks import main_error, model_of


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
