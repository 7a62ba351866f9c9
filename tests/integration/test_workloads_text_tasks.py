"""The tasks workload on a real, tiny checkpoint and the texts that packages carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.science.workloads.checkpoints import load_checkpoint, quiet_transformers
from hpc_toolkit.science.workloads.embeddings import SharedEmbeddings
from hpc_toolkit.science.workloads.onepass import BatchSize
from hpc_toolkit.science.workloads.text_tasks import (
    SCORERS,
    TASKS,
    TextTasks,
    texts,
    training_stories,
    training_tweets,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

NAME = "mini-s/step0"


@pytest.fixture(scope="module")
def results(root: str) -> dict[str, Any]:
    tasks = TextTasks(root=root)
    items = [{"checkpoint": NAME, "layer": 2, "task": task} for task in TASKS]
    return dict(zip(TASKS, tasks.run(tasks.load(NAME), items), strict=True))


def test_tasks_are_of_every_kind() -> None:
    assert len(TASKS) == 7
    assert {task.kind for task in TASKS.values()} == set(SCORERS)


@pytest.mark.parametrize("name", TASKS)
def test_task_gives_a_score_with_its_error_as_strict_json(
    results: dict[str, Any], name: str
) -> None:
    value = results[name]

    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert -1 <= value["score"] <= 1
    assert 0 <= value["stderr"] < 0.2
    assert value["n"] >= 300
    assert (value["metric"], value["kind"]) == (SCORERS[TASKS[name].kind][0], TASKS[name].kind)


def test_scores_are_the_same_in_another_context_and_order(
    root: str, results: dict[str, Any]
) -> None:
    tasks = TextTasks(root=root)
    names = list(reversed(TASKS))

    again = tasks.run(tasks.load(NAME), [{"layer": 2, "task": name} for name in names])

    assert dict(zip(names, again, strict=True)) == results


def test_layers_and_tasks_of_a_checkpoint_share_one_forward_a_text_set(root: str) -> None:
    tasks = TextTasks(root=root)
    context = tasks.load(NAME)
    names = ["bbc-retrieval", "bbc-headline-topic", "bbc-clusters"]

    list(tasks.run(context, [{"layer": k, "task": name} for name in names for k in (0, 1)]))

    assert (tasks.loads, context.forwards) == (1, 2)


def bidirectional(root: str, target: Path) -> str:
    """A model whose tokens see the ones after them, padding included where it is not masked."""
    import shutil

    from transformers import BertConfig, BertModel

    shutil.copytree(f"{root}/{NAME}", target / NAME)
    vocabulary = json.loads((target / NAME / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=vocabulary, num_hidden_layers=4, **sizes)
    with quiet_transformers():
        BertModel(config).save_pretrained(target / NAME)
    return str(target)


@pytest.mark.parametrize("causal", [True, False])
def test_embedding_is_the_mean_of_the_texts_own_tokens(
    root: str, tmp_path: Path, causal: bool
) -> None:
    loaded = load_checkpoint(root if causal else bidirectional(root, tmp_path), NAME)
    chosen = ["the rain fell", "rain", "a long story about the rain in the north", "so it is"]
    cached = SharedEmbeddings(loaded, max_tokens=64, size=BatchSize(3))

    got = cached.of(chosen, 3)

    for row, text in enumerate(chosen):
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            states = loaded.model(ids, output_hidden_states=True).hidden_states[3]
        assert np.allclose(got[row], states[0].mean(0).numpy(), atol=1e-5)
    assert not got.flags.writeable  # other tasks get the same rows


def test_task_that_does_not_exist_names_the_nearest(root: str) -> None:
    tasks = TextTasks(root=root)

    with pytest.raises(PermanentError, match="no task 'bbc-cluster'") as caught:
        list(tasks.run(tasks.load(NAME), [{"layer": 0, "task": "bbc-cluster"}]))

    assert "bbc-clusters" in caught.value.hint


def test_texts_of_the_tasks_are_not_trained_on() -> None:
    trained = set(training_stories()) | set(training_tweets())
    stories = {story.partition("\n")[0] for story in trained}

    assert len(trained) > 10_000
    assert not set(texts("tweets")) & trained
    assert not set(texts("bbc-headlines")) & stories
    assert not set(texts("lee")) & trained


def test_texts_that_run_out_of_memory_are_embedded_in_smaller_batches(root: str) -> None:
    tried: list[int] = []

    def refuse(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        tried.append(len(inputs["input_ids"]))
        if tried[-1] > 8:
            raise torch.cuda.OutOfMemoryError

    tasks = TextTasks(root=root, batch_size=16)
    context = tasks.load(NAME)
    context.loaded.model.register_forward_pre_hook(refuse, with_kwargs=True)
    items = [{"checkpoint": NAME, "layer": 2, "task": "lee-similarity"}]
    with pytest.raises(torch.cuda.OutOfMemoryError):
        list(tasks.run(context, items))
    assert tried[-1] == 16

    assert tasks.on_oom(context, items) is True

    assert next(tasks.run(context, items))["n"] >= 300
    assert tried[-1] <= 8
    assert [tasks.on_oom(context, items) for _ in range(4)] == [True, True, True, False]
    assert tasks.on_oom(None, items) is False
