"""The tasks workload on a real, tiny checkpoint and the texts that packages carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import mini_pythia
from hpc_toolkit.errors import ConfigError, PermanentError
from hpc_toolkit.science.workloads import corpora
from hpc_toolkit.science.workloads.checkpoints import load_checkpoint, quiet_transformers
from hpc_toolkit.science.workloads.embeddings import SharedEmbeddings
from hpc_toolkit.science.workloads.onepass import BatchSize
from hpc_toolkit.science.workloads.text_tasks import (
    SCORERS,
    TASKS,
    TextTasks,
    texts,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

NAME = "mini-s/step0"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("checkpoints")
    mini_pythia.train({"size": "mini-s", "root": str(root), "steps": [0], "texts": 40})
    return str(root)


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


def test_task_that_does_not_exist_names_the_nearest(root: str) -> None:
    tasks = TextTasks(root=root)

    with pytest.raises(PermanentError, match="no task 'bbc-cluster'") as caught:
        list(tasks.run(tasks.load(NAME), [{"layer": 0, "task": "bbc-cluster"}]))

    assert "bbc-clusters" in caught.value.hint


def test_texts_of_the_tasks_are_not_trained_on() -> None:
    trained = set(corpora.training_stories()) | set(corpora.training_tweets())
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


def test_embeddings_are_taken_from_the_directory_that_workers_share(
    root: str, tmp_path: Path, results: dict[str, Any]
) -> None:
    items = [{"layer": 2, "task": name} for name in ("lee-similarity", "word-similarity")]
    first, second = (TextTasks(root=root, cache=str(tmp_path)) for _ in range(2))
    values = list(first.run(first.load(NAME), items))
    context = second.load(NAME)

    found = list(second.run(context, items))

    assert found == values == [results["lee-similarity"], results["word-similarity"]]
    assert context.forwards == 0
    assert len(list(tmp_path.glob("*/*.npz"))) == 2


def test_settings_and_weights_are_in_the_name_of_kept_embeddings(root: str, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(f"{root}/{NAME}", tmp_path / NAME)
    options: list[dict[str, Any]] = [
        {},
        {"max_tokens": 7},
        {"final_norm": "paper"},
        {},
    ]
    for number, option in enumerate(options):
        if number == 3:
            rewrite_weights(tmp_path / NAME / "model.safetensors")
        tasks = TextTasks(root=str(tmp_path), cache=str(tmp_path / "cache"), **option)
        context = tasks.load(NAME)

        list(tasks.run(context, [{"layer": 1, "task": "lee-similarity"}]))

        assert context.forwards == 1


def test_layer_behind_the_final_norm_is_that_of_a_model_cut_off_there(root: str) -> None:
    text = "the rain fell in the north"
    context = TextTasks(root=root, final_norm="paper").load(NAME)
    model, ids = context.loaded.model, context.loaded.tokenizer(text)["input_ids"]
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states

        for layer in range(context.layers):
            last = layer == context.layers - 1
            wanted = states[layer] if last else model.final_layer_norm(states[layer])
            assert np.allclose(context.of([text], layer), wanted.mean(1), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"final_norm": "papr"}, "final_norm: 'papr' is neither raw nor paper"),
        ({"batch_size": 0}, "batch_size: 0 is not a positive integer"),
        ({"max_batch_tokens": -1}, "max_batch_tokens: -1 is not a positive integer"),
        ({"max_tokens": 1.5}, r"max_tokens: 1\.5 is not a positive integer"),
    ],
)
def test_option_that_cannot_be_is_refused_by_its_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TextTasks(**options)


def rewrite_weights(path: Path) -> None:
    """Change one number of the weights; the file's size stays."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
