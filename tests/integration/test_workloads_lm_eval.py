"""Tasks of lm-evaluation-harness on trained checkpoints: its own numbers, in any order, offline."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples import mini_pythia
from hpc_toolkit.errors import ConfigError, PermanentError, WorkloadError
from hpc_toolkit.run import Run
from hpc_toolkit.science.workloads import lm_eval_tasks, no_network_in_jobs
from hpc_toolkit.science.workloads.lm_eval_tasks import LmEvalTasks
from hpc_toolkit.science.workloads.text_tasks import evaluation_articles
from tests.documents import REPOSITORY
from tests.integration.realrun import Hpctk

torch = pytest.importorskip("torch")
pytest.importorskip("lm_eval")
# What the harness and those that it imports warn of is theirs to repair.
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = (0, 4, 12)
TOPICS = sorted({article.topic for article in evaluation_articles()})
WORKLOAD = "hpc_toolkit.science.workloads.lm_eval_tasks:LmEvalTasks"

TOPIC = {
    "task": "bbc-topic",
    "output_type": "multiple_choice",
    "training_split": "train",
    "test_split": "test",
    "doc_to_text": "{{headline}}\nTopic:",
    "doc_to_choice": TOPICS,
    "doc_to_target": "{{topic}}",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        {"metric": "mcc", "aggregation": "matthews_corrcoef", "higher_is_better": True},
    ],
    "metadata": {"version": 1.5},
}
REGEX = {"function": "regex", "regex_pattern": "([a-z]+)"}
FIRST = {"function": "take_first"}
TASKS: dict[str, dict[str, Any]] = {
    "bbc-topic": {**TOPIC, "tag": ["bbc-all"]},
    "bbc-shouted": {
        **TOPIC,
        "tag": ["bbc-all"],
        "task": "bbc-shouted",
        "doc_to_text": "!function prompts.shout",
    },
    "bbc-both": {"group": "bbc-both", "task": ["bbc-topic", {"task": "bbc-shouted"}]},
    "bbc": {
        "group": "bbc",
        "task": ["bbc-topic", "bbc-shouted"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    },
    "bbc-word": {
        **{key: TOPIC[key] for key in ("training_split", "test_split", "doc_to_text")},
        "task": "bbc-word",
        "output_type": "generate_until",
        "doc_to_target": "{{topic}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [
            {"name": "strict-match", "filter": [FIRST]},
            {"name": "word", "filter": [REGEX, FIRST]},
        ],
    },
    "bbc-lead": {
        "task": "bbc-lead",
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{lead}}",
    },
    "elsewhere": {**TOPIC, "task": "elsewhere", "dataset_path": "org/nowhere"},
    "unsafe": {**TOPIC, "task": "unsafe", "unsafe_code": True},
    "needing": {**TOPIC, "task": "needing", "doc_to_text": "!function needing.shout"},
}
PROMPTS = """
def shout(doc):
    return doc["headline"].upper() + "\\nTopic:"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints of a trained model, and a directory of tasks with their data; no home."""
    import datasets
    from lm_eval.tasks import manager

    directory = tmp_path_factory.mktemp("harness")
    # Of the harness's own tasks one is enough: reading the 14,000 files of all takes 8 s.
    shutil.copytree(Path(manager.__file__).with_name("piqa"), directory / "own" / "piqa")
    mini_pythia.train(
        {"size": "mini-s", "root": str(directory / "checkpoints"), "steps": STEPS, "texts": 100}
    )
    rows = [
        {"headline": one.headline, "topic": one.topic, "lead": one.lead}
        for one in evaluation_articles()[::25]
    ]
    (directory / "tasks").mkdir()
    (directory / "tasks/prompts.py").write_text(PROMPTS)
    (directory / "tasks/needing.py").write_text(f"import not_installed_anywhere\n{PROMPTS}")
    data = {}
    for name, some in (("test", rows[:12]), ("train", rows[12:])):
        data[name] = str(directory / f"{name}.json")
        Path(data[name]).write_text("".join(json.dumps(row) + "\n" for row in some))
    for name, task in TASKS.items():
        local = {"dataset_path": "json", "dataset_kwargs": {"data_files": data}}
        source = {} if {"group", "dataset_path"} & task.keys() else local
        # JSON is YAML, but for the tag of a function.
        text = json.dumps({**source, **task})
        text = text.replace('"!function prompts.shout"', "!function prompts.shout")
        text = text.replace('"!function needing.shout"', "!function needing.shout")
        (directory / f"tasks/{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", directory / "cache")
        patch.setattr(manager, "__file__", str(directory / "own" / "manager.py"))
        # As on the second rank of a node; the harness has no results there of its own accord.
        for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
            patch.setenv(name, value)
        yield directory


def made(place: Path, **options: Any) -> LmEvalTasks:
    given = {"root": str(place / "checkpoints"), "include_path": str(place / "tasks")}
    return LmEvalTasks(**{**given, "bootstrap_iters": 100, **options})


@pytest.fixture(scope="module")
def tasks(place: Path) -> LmEvalTasks:
    return made(place)


@pytest.fixture(scope="module")
def context(tasks: LmEvalTasks) -> Any:
    return tasks.load("mini-s/step12")


def value_of(tasks: LmEvalTasks, context: Any, task: object, **keys: Any) -> Any:
    (value,) = tasks.run(context, [{"checkpoint": "mini-s/step12", "task": task, **keys}])
    return value


@pytest.fixture(scope="module")
def wanted(place: Path) -> Any:
    """The results of the harness when it loads the model itself, with two examples per prompt."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name)
        return simple_evaluate(
            model="hf",
            model_args={"pretrained": str(place / "checkpoints/mini-s/step12")},
            tasks=["bbc", "bbc-word", "bbc-lead"],
            task_manager=TaskManager(include_path=str(place / "tasks"), include_defaults=False),
            device="cpu",
            bootstrap_iters=100,
            num_fewshot=2,
        )["results"]


@pytest.mark.parametrize(
    ("task", "score", "names"),
    [
        ("bbc-topic", "acc", {"acc", "acc_norm", "mcc"}),
        ("bbc", "acc", {"acc"}),
        ("bbc-word", "exact_match:strict-match", {"exact_match:strict-match", "exact_match:word"}),
        ("bbc-lead", "word_perplexity", {"word_perplexity", "byte_perplexity", "bits_per_byte"}),
    ],
)
def test_values_are_those_of_the_harness_itself(
    tasks: LmEvalTasks, context: Any, wanted: Any, task: str, score: str, names: set[str]
) -> None:
    random.seed(os.urandom(8))  # whatever ran before
    value = value_of(tasks, context, task, num_fewshot=2)

    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value["metric"] == score
    assert value["n"] == value["documents"] == (24 if task == "bbc" else 12)
    assert {key for key in value if f"{key}_stderr" in value} == names
    for name in names:
        metric, _, kind = name.partition(":")
        kind = kind or "none"
        assert value[name] == pytest.approx(wanted[task][f"{metric},{kind}"], abs=1e-9)
        error = wanted[task][f"{metric}_stderr,{kind}"]
        assert value[f"{name}_stderr"] == (None if error == "N/A" else pytest.approx(error))
    assert value["score"] == (-1 if task == "bbc-lead" else 1) * value[score]
    assert value["stderr"] == value[f"{score}_stderr"]
    assert tasks.loads == 1


def test_tasks_of_a_group_use_one_model_and_no_value_depends_on_those_before(
    tasks: LmEvalTasks, context: Any
) -> None:
    names = ["bbc-topic", "bbc-word", "bbc-lead", "bbc-topic"]
    shots = [3, 0, 0, 3]
    items = [{"task": name, "num_fewshot": few} for name, few in zip(names, shots, strict=True)]

    values = list(tasks.run(context, items))

    assert values[0] == values[3]
    assert values[0]["num_fewshot"] == 3
    assert values[0]["version"] == 1.5
    assert values[2] == value_of(tasks, context, "bbc-lead")
    assert tasks.loads == 1


def test_limit_and_the_metric_of_the_score_are_options(place: Path, context: Any) -> None:
    for limit, count in ((5, 5), (0.25, 3)):
        limited = made(place, limit=limit, metric={"bbc-topic": "acc_norm"}, num_fewshot=1)
        value = value_of(limited, context, "bbc-topic")
        assert (value["n"], value["documents"], value["num_fewshot"]) == (count, 12, 1)
        assert value["metric"] == "acc_norm"
        assert value["score"] == value["acc_norm"]
    assert value_of(made(place, metric="acc"), context, "bbc-topic")["metric"] == "acc"


@pytest.mark.parametrize(
    ("task", "keys", "options", "message", "hint"),
    [
        ("bbc-topics", {}, {}, "lm-evaluation-harness has no task 'bbc-topics'", "'bbc-topic'?"),
        ("piqaa", {}, {}, "has no task 'piqaa'", "'piqa'?"),
        ("tasks/bbc-topic.yaml", {}, {}, "has no task 'tasks/bbc-topic.yaml'", ""),
        (None, {}, {}, "has no task None", ""),
        ("bbc-all", {}, {}, "name for several tasks", "an item for each: bbc-shouted, bbc-topic"),
        ("bbc-both", {}, {}, "name for several tasks", "an item for each: bbc-topic, bbc-shouted"),
        ("needing", {}, {}, "needs the package 'not_installed_anywhere'", "pip install"),
        ("bbc-topic", {}, {"metric": "ac"}, "has no metric 'ac'", "did you mean 'acc'?"),
        (
            "bbc-topic",
            {"layer": 2},
            {},
            "layer 2: the harness evaluates complete models",
            "last one, 4",
        ),
        ("elsewhere", {}, {}, "not in the local cache, and HF_HUB_OFFLINE", "hpctk items fetch"),
    ],
)
def test_item_that_cannot_run_is_a_permanent_failure_that_says_why(
    place: Path,
    context: Any,
    monkeypatch: pytest.MonkeyPatch,
    task: object,
    keys: dict[str, Any],
    options: dict[str, Any],
    message: str,
    hint: str,
) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.chdir(place)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(PermanentError, match=message) as caught:
        value_of(made(place, **options), context, task, **keys)

    assert hint in caught.value.hint


def test_code_of_the_model_runs_only_if_that_is_confirmed(
    place: Path, tasks: LmEvalTasks, context: Any
) -> None:
    with pytest.raises(PermanentError, match="runs code that the model wrote"):
        value_of(tasks, context, "unsafe")

    assert value_of(made(place, confirm_run_unsafe_code=True), context, "unsafe")["n"] == 12


def test_tasks_and_groups_are_found_without_an_index_of_all(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has 14,000 files, which each worker would read."""
    from lm_eval.tasks import manager

    read: list[str] = []
    build = manager.TaskIndex.build

    def recorded(paths: list[Path], **keys: Any) -> Any:
        read.extend(map(str, paths))
        return build(paths, **keys)

    monkeypatch.setattr(manager.TaskIndex, "build", staticmethod(recorded))
    lm_eval_tasks._index.cache_clear()
    tasks = made(place)

    assert len(tasks.load_task("bbc")["tasks"]) == 2
    assert tasks._known("piqa").task_index["piqa"]
    assert set(read) == {str(place / "tasks"), str(place / "own/piqa")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include_path": "nowhere"}, "include_path: nowhere is not a directory"),
        ({"dtype": "float8"}, "dtype: 'float8' is not one of auto, float32"),
        ({"limit": 0}, "limit: 0 is not a positive number"),
        ({"limit": "5"}, "limit: '5' is not a positive number"),
        ({"batch_size": "auto"}, "batch_size: 'auto' is not a positive integer"),
    ],
)
def test_option_that_is_not_usable_is_refused_when_the_run_is_created(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LmEvalTasks(**options)


def test_batches_are_halved_when_memory_runs_out(place: Path) -> None:
    tasks = made(place, batch_size=4)
    context = tasks.load("mini-s/step0")
    wanted, sizes = value_of(tasks, context, "bbc-topic"), []
    forward = context.model.forward

    def small(input_ids: Any, **keys: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > 1:
            raise torch.OutOfMemoryError("injected")
        return forward(input_ids, **keys)

    context.model.forward = small
    assert not tasks.on_oom(None, [])
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            value_of(tasks, context, "bbc-topic")
        assert tasks.on_oom(context, [{"task": "bbc-topic"}])

    assert value_of(tasks, context, "bbc-topic")["acc"] == wanted["acc"]
    assert sizes[:3] == [4, 2, 1]
    assert not tasks.on_oom(context, [{"task": "bbc-topic"}])


def test_harness_that_is_not_installed_is_named_with_its_extra(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)

    tasks = made(place, include_path=str(place))  # of which there is no index yet
    for call in (tasks.load, tasks.load_task):
        with pytest.raises(WorkloadError, match="need the package 'lm_eval") as caught:
            call("mini-s/step0")
        assert caught.value.hint.endswith(" -m pip install 'hpctk[harness]'")


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "1"),
        ({"PBS_JOBID": "7.server"}, "1"),
        ({"SLURM_JOB_ID": "7", "HF_HUB_OFFLINE": "0"}, "0"),
    ],
)
def test_jobs_use_no_network_unless_they_are_told_to(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], wanted: str | None
) -> None:
    for name in ("HF_HUB_OFFLINE", "SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever sets it
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    no_network_in_jobs()

    assert os.environ.get("HF_HUB_OFFLINE") == wanted


# Imported by every Python process, since it is on PYTHONPATH.
REFUSE = """
import os, sys

def refuse(event, arguments):
    address = arguments[1] if event == "socket.connect" else arguments[:2]
    if event in ("socket.connect", "socket.getaddrinfo") and isinstance(address, tuple):
        with open(os.environ["ATTEMPTS"], "a") as file:
            file.write(f"{address}\\n")
        raise OSError("the network is blocked")

sys.addaudithook(refuse)
"""


def block_network(directory: Path) -> dict[str, str]:
    """The environment of processes that import a module of ``directory`` that blocks them."""
    (directory / "blocked").mkdir()
    (directory / "blocked/sitecustomize.py").write_text(REFUSE)
    return {
        "PYTHONPATH": f"{directory}/blocked:{REPOSITORY}",
        "ATTEMPTS": str(directory / "attempts"),
    }


def attempts_of(directory: Path) -> list[str]:
    """The addresses that these processes tried to reach."""
    path = directory / "attempts"
    return path.read_text().splitlines() if path.exists() else []


CAMPAIGN = """
name = "harness"
[arms]
grid = { checkpoint = ["mini-s/step0", "mini-s/step4", "mini-s/step12"] }
[tasks]
workload = "hpc_toolkit.science.workloads.lm_eval_tasks:LmEvalTasks"
names = ["bbc-topic", "bbc-shouted"]
options = { root = "checkpoints", include_path = "tasks", limit = 10, bootstrap_iters = 5 }
[search]
policy = "random"
budget = 3
"""


def test_campaign_over_checkpoints_and_tasks_runs_without_a_network(
    hpctk: Hpctk, place: Path, context: Any, tmp_path: Path
) -> None:
    """Its scores are those of a process that has the model already."""
    for name in ("checkpoints", "tasks"):
        (tmp_path / name).symlink_to(place / name)
    (tmp_path / "harness.toml").write_text(CAMPAIGN)
    lacking = CAMPAIGN.replace('"bbc-shouted"', '"elsewhere"')
    (tmp_path / "lacking.toml").write_text(lacking)
    environ = {**block_network(tmp_path), "HF_HOME": str(tmp_path / "hf")}

    unready = hpctk("items", "fetch", "lacking.toml", "--offline", env=environ)
    offline = {**environ, "HF_HUB_OFFLINE": "1"}  # otherwise the hub counts uses of data sets
    ended = hpctk("campaign", "run", "harness.toml", "--workers", 1, env=offline)
    ready = hpctk("items", "fetch", "runs/harness", "--offline", env=environ)

    assert unready.code == 1
    assert 'data set of "bbc-topic": ready\n' in unready.out
    assert "task 'elsewhere': its data set is not in the local cache" in unready.out
    assert "missing: 1 data set\n" in unready.err
    wanted = 'data set of "bbc-topic": ready\ndata set of "bbc-shouted": ready\n'
    assert (ready.code, ready.out) == (0, wanted)
    assert ended.code == 0, ended.err
    assert attempts_of(tmp_path) == []
    rows = {
        (row["item"]["checkpoint"], row["item"]["task"]): row["value"]
        for row in Run.open(tmp_path / "runs/harness").results()
    }
    assert len(rows) == 6
    here = made(place, limit=10, bootstrap_iters=5)
    for task in ("bbc-topic", "bbc-shouted"):
        assert rows["mini-s/step12", task] == value_of(here, context, task)
