"""Tasks of lighteval on trained checkpoints: its own numbers, in any order, without a network.

lighteval is not among the packages of this process, since its pins contradict theirs; .ci/setup
puts it into a directory that other processes have on their path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import mini_pythia
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.science.workloads.corpora import evaluation_articles
from hpc_toolkit.science.workloads.lighteval_tasks import LightevalTasks
from tests.documents import REPOSITORY
from tests.integration import lighteval_program
from tests.integration.blockednetwork import attempts_of, block_network

pytest.importorskip("torch")
LIGHTEVAL = Path(sys.prefix) / "lighteval"
pytestmark = [pytest.mark.torch, pytest.mark.slow]

STEPS = (0, 4, 12)
TOPICS = sorted({article.topic for article in evaluation_articles()})
OWN = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

TOPICS = {topics!r}

def choose(line, task, query=None):
    choices = [f" {{topic}}" for topic in TOPICS]
    query = (query or line["headline"]) + "\\nTopic:"
    return Doc(query=query, choices=choices, gold_index=TOPICS.index(line["topic"]))

def shout(line, task):
    return choose(line, task, line["headline"].upper())

def word(line, task):
    return Doc(query=line["headline"] + "\\nTopic:", choices=[line["topic"]], gold_index=0)

def lead(line, task):
    return Doc(query="", original_query=line["lead"], choices=[line["lead"]], gold_index=0)

def task(name, prompt, metrics, repo={data!r}, **more):
    return LightevalTaskConfig(
        name=name, prompt_function=prompt, metrics=metrics, hf_repo=repo, hf_subset="default",
        hf_avail_splits=["train", "test"], evaluation_splits=["test"], few_shots_split="train",
        version=2, **more,
    )

CHOICE = [Metrics.loglikelihood_acc]
TASKS_TABLE = [
    task("bbc:topic", choose, CHOICE),
    task("bbc:shouted", shout, CHOICE),
    task(
        "bbc-word", word, [Metrics.exact_match, Metrics.f1_score],
        generation_size=4, stop_sequence=["\\n"],
    ),
    task("bbc-lead", lead, [Metrics.byte_perplexity]),
    task("elsewhere", choose, CHOICE, repo="org/nowhere"),
]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a trained model, and a file of tasks with their data."""
    directory = tmp_path_factory.mktemp("lighteval")
    mini_pythia.train(
        {"size": "mini-s", "root": str(directory / "checkpoints"), "steps": STEPS, "texts": 100}
    )
    (directory / "data").mkdir()
    rows = [
        {"headline": one.headline, "topic": one.topic, "lead": one.lead}
        for one in evaluation_articles()[::25]
    ]
    for name, some in (("test", rows[:12]), ("train", rows[12:])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (directory / f"data/{name}.jsonl").write_text(text)
    own = OWN.format(topics=TOPICS, data=str(directory / "data"))
    (directory / "own.py").write_text(own)
    return directory


def environment(directory: Path) -> dict[str, str]:
    """Lighteval on the path and no network, as in a job."""
    blocked = block_network(directory)
    return {
        **blocked,
        "PYTHONPATH": f"{blocked['PYTHONPATH']}:{LIGHTEVAL}",
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def told(place: Path) -> Any:
    """What `lighteval_program` found."""
    if not LIGHTEVAL.is_dir():
        pytest.skip("needs lighteval")
    command = [sys.executable, "-m", lighteval_program.__name__, str(place)]
    env = {**os.environ, **environment(place)}
    ended = subprocess.run(
        command, check=False, env=env, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert attempts_of(place) == []
    return json.loads((place / "told.json").read_text())


@pytest.mark.parametrize(
    ("index", "task", "names"),
    [(0, "bbc:topic:2", ["acc"]), (2, "bbc-word:2", ["em", "f1"]), (4, "bbc:shouted:2", ["acc"])],
)
def test_values_are_those_of_lighteval_itself(
    told: Any, index: int, task: str, names: list[str]
) -> None:
    value, wanted = told["values"][index], told["direct"][task]

    assert [key for key in value if f"{key}_stderr" in value] == names
    for name in names:
        assert value[name] == pytest.approx(wanted[name], rel=1e-6)
        assert value[f"{name}_stderr"] == pytest.approx(wanted[f"{name}_stderr"], rel=1e-6)
    assert value["metric"] == names[0]
    assert value["score"] == value[names[0]]
    assert value["stderr"] == value[f"{names[0]}_stderr"]
    assert (value["n"], value["documents"], value["version"]) == (12, 12, 2)
    assert value["num_fewshot"] == int(task[-1])


def test_tasks_of_a_group_use_one_model_and_no_value_depends_on_those_before(told: Any) -> None:
    topic, lead, _, both, shouted, again = told["values"]

    assert topic == again
    assert told["loads"] == 1
    assert told["written"] == []
    # Less is better. lighteval's own command has no results for a perplexity: its cache loses them.
    assert lead["score"] == -lead["byte_perplexity"] < -1
    assert lead["stderr"] == lead["byte_perplexity_stderr"] > 0
    # The common name of two tasks has their mean.
    assert both["n"] == 24
    assert both["acc"] == pytest.approx(told["direct"]["bbc:_average:2"]["acc"])
    errors = [part["acc_stderr"] for part in (topic, shouted)]
    assert both["stderr"] == pytest.approx((errors[0] ** 2 + errors[1] ** 2) ** 0.5 / 2)


@pytest.mark.parametrize(
    ("case", "message", "hint"),
    [
        ("near", "lighteval has no task 'bbc:topics'", "'bbc:topic'?"),
        ("own", "lighteval has no task 'hellaswags'", "'hellaswag'?"),
        ("file", "lighteval has no task '/", ""),
        ("none", "lighteval has no task None", ""),
        ("layer", "layer 2: the harness evaluates complete models", "last one, 4"),
        ("data", "not in the local cache, and HF_HUB_OFFLINE", "hpctk items fetch"),
        ("metric", "has no metric 'ac'", "did you mean 'acc'?"),
    ],
)
def test_item_that_cannot_run_is_a_permanent_failure_that_says_why(
    told: Any, case: str, message: str, hint: str
) -> None:
    kind, text, suggestion = told["failures"][case]

    assert kind == "PermanentError"
    assert message in text
    assert hint in suggestion


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"custom_tasks": "nowhere.py"}, "custom_tasks: nowhere.py is not a file"),
        ({"dtype": "float8"}, "dtype: 'float8' is not one of auto, float32"),
        ({"limit": 0.5}, "limit: 0.5 is not a positive integer"),
    ],
)
def test_option_that_is_not_usable_is_refused_when_the_run_is_created(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LightevalTasks(**options)
