"""The metrics workload on a real, tiny checkpoint."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples import mini_pythia
from hpc_toolkit.errors import ConfigError, PermanentError
from hpc_toolkit.science.metrics import (
    METRICS,
    STANDARD,
    anisotropy,
    curvature,
    effective_rank,
    matrix_entropy,
)
from hpc_toolkit.science.workloads import onepass
from hpc_toolkit.science.workloads.checkpoints import load_checkpoint
from hpc_toolkit.science.workloads.layer_metrics import LayerMetrics, augment
from hpc_toolkit.science.workloads.onepass import BatchSize
from tests.documents import REPOSITORY

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

NAME = "mini-s/step0"
LAYERS = 5
PROMPTS = [
    "The cat sat on the mat and looked at the rain.",
    "Shares fell in London.",
    "A goal in the last minute of the match gave the home side its first win of the season.",
    "He said that the vote would be held in May, and not before.",
    "Music sales rose.",
]


def workload(root: str, **options: Any) -> LayerMetrics:
    return LayerMetrics(**{"root": root, "prompts": PROMPTS, "batch_size": 2, **options})


def measure(workload: LayerMetrics, layers: range | list[int] = range(LAYERS)) -> list[Any]:
    items = [{"checkpoint": NAME, "layer": layer} for layer in layers]
    return list(workload.run(workload.load(NAME), items))


@pytest.mark.parametrize("again", [0, 3])
def test_values_equal_each_prompt_run_alone_through_the_model(root: str, again: int) -> None:
    loaded = load_checkpoint(root, NAME)
    prompts = [*PROMPTS, *PROMPTS[:1] * again]
    states = []
    for prompt in prompts:
        ids = torch.tensor([loaded.tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            states.append(loaded.model(ids, output_hidden_states=True).hidden_states)

    measured = measure(workload(root, prompts=prompts))

    for layer, value in enumerate(measured):
        tokens = [state[layer][0] for state in states]
        means = torch.stack([t.double().mean(0) for t in tokens])
        entropies = [matrix_entropy(t, center=True, normalize="max") for t in tokens]
        assert value["layer"] == layer
        assert value["prompt_entropy"] == pytest.approx(
            float(sum(entropies)) / len(prompts), rel=1e-5
        )
        angles = sum(map(float, map(curvature, tokens)))
        assert value["curvature"] == pytest.approx(angles / len(prompts))
        assert value["anisotropy"] == pytest.approx(float(anisotropy(torch.cat(tokens))), abs=1e-5)
        rank = float(effective_rank(means, center=True))
        assert value["effective_rank"] == pytest.approx(rank, rel=1e-5)


def test_one_load_and_one_forward_serve_every_run_of_a_context(root: str) -> None:
    metrics = workload(root)
    context = metrics.load(NAME)

    first = list(metrics.run(context, [{"layer": 1}, {"layer": 2}]))
    second = list(metrics.run(context, [{"layer": 2}, {"layer": 1}]))

    assert first == second[::-1]
    assert (metrics.loads, metrics.forwards) == (1, 1)


@pytest.fixture
def forward_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Forward passes run out of memory with more than 2 prompts at once; the sizes tried."""
    tried: list[int] = []
    real = onepass.forward

    def forward(*args: Any, size: BatchSize, **options: Any) -> None:
        tried.append(size.texts)
        if size.texts > 2:
            raise torch.cuda.OutOfMemoryError
        real(*args, size=size, **options)

    monkeypatch.setattr(onepass, "forward", forward)
    return tried


def test_forward_pass_that_runs_out_of_memory_is_halved_until_it_fits(
    root: str, forward_batches: list[int]
) -> None:
    plain = measure(workload(root))
    metrics = workload(root, batch_size=16)
    items = [{"layer": layer} for layer in range(LAYERS)]

    context = None
    while context is None:
        try:
            context = metrics.load(NAME)
        except torch.cuda.OutOfMemoryError:
            assert metrics.on_oom(None, items) is True

    assert forward_batches == [2, 16, 8, 4, 2]
    assert metrics.on_oom(context, items) is False  # smaller batches would not help any more
    assert list(metrics.run(context, items)) == plain


MORE = [f"{prompt} {other}" for prompt in PROMPTS for other in PROMPTS]


def test_views_are_passes_of_their_own_that_are_compared_prompt_by_prompt(root: str) -> None:
    names = ["lidar", "dime", "infonce"]
    metrics = workload(root, prompts=MORE, metrics=["rankme", *names], views=3)
    loaded = load_checkpoint(root, NAME)

    measured = measure(metrics)

    assert (metrics.loads, metrics.forwards) == (1, 4)
    means = [
        [loaded_mean(loaded, augment(text, view), layer=2) for text in MORE] for view in range(3)
    ]
    z = torch.stack([torch.stack(view) for view in means])
    for name in names:
        expected = float(METRICS[name].function(z))
        assert measured[2][name] == pytest.approx(expected, rel=1e-4), name


def loaded_mean(loaded: Any, text: str, layer: int) -> Any:
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        states = loaded.model(ids, output_hidden_states=True).hidden_states
    return states[layer][0].double().mean(0)


@pytest.mark.parametrize("layer", [5, -1, 1.0, "1", True, None])
def test_layer_that_does_not_exist_is_permanent(root: str, layer: Any) -> None:
    with pytest.raises(PermanentError, match=r"mini-s/step0: no layer .*; it has layers 0 to 4"):
        measure(workload(root), [layer])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("missing.txt", r"missing\.txt: no such file of prompts"),
        (["only one prompt is here"], r"prompts: 1 prompt, at least 2"),
        (["this one is long enough", "a"], r"prompt 2 has 1 token: 'a'"),
    ],
)
def test_prompts_that_cannot_be_measured_are_named(root: str, prompts: Any, message: str) -> None:
    with pytest.raises(PermanentError, match=message):
        workload(root, prompts=prompts).load(NAME)


@pytest.mark.parametrize(
    ("metrics", "prompts", "message"),
    [
        (["rankme", "alpha_req"], MORE[:8], "8 different .*, but alpha_req needs 9"),
        (["alpha_req"], [*MORE[:8], *MORE[:8]], "8 different .*, but alpha_req needs 9"),
    ],
)
def test_prompts_too_few_for_a_metric_are_refused_before_a_checkpoint_is_loaded(
    metrics: list[str], prompts: list[str], message: str
) -> None:
    measures = workload("no such root", metrics=metrics, prompts=prompts)

    with pytest.raises(PermanentError, match=message) as caught:
        measures.load(NAME)

    assert (measures.loads, measures.forwards) == (0, 0)
    assert "remove it from metrics" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["anisotropi"]}, "unknown metric 'anisotropi'"),
        ({"metrics": []}, r"metrics: \[\] is not a list of names"),
        ({"metrics": "rankme"}, "metrics: 'rankme' is not a list of names"),
        ({"metrics": ["rankme", "lidar"], "views": 1}, "views: 1, but lidar compares at least 2"),
        ({"final_norm": "cooked"}, "final_norm: 'cooked' is neither raw nor paper"),
        ({"max_batch_tokens": 0}, "max_batch_tokens: 0 is not"),
        ({"batch_size": 0}, "batch_size: 0 is not a positive integer"),
        ({"max_tokens": 1.5}, r"max_tokens: 1\.5 is not"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(".", **options)


def damage(root: str, target: Path, name: str, value: float) -> str:
    """A copy of the checkpoint in which one tensor holds ``value`` everywhere."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(f"{root}/{NAME}", target / NAME)
    path = target / NAME / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, path, metadata={"format": "pt"})
    return str(target)


def test_weights_that_are_nan_are_permanent_and_name_the_layer(root: str, tmp_path: Path) -> None:
    bias = "gpt_neox.layers.2.mlp.dense_4h_to_h.bias"

    damaged = damage(root, tmp_path, bias, float("nan"))

    with pytest.raises(PermanentError, match="hidden states of layer 3 hold NaN"):
        workload(damaged).load(NAME)


def test_a_metric_that_is_not_defined_is_null_with_its_reason_beside_the_others(
    root: str, tmp_path: Path
) -> None:
    damaged = damage(root, tmp_path, "gpt_neox.embed_in.weight", 0.0)

    (value,) = measure(workload(damaged), [0])

    assert json.loads(json.dumps(value, allow_nan=False)) == value
    reason = "anisotropy needs at least 2 rows that are not zero, got 0"
    assert value.pop("undefined") == {"anisotropy": reason}
    assert value.pop("anisotropy") is None
    assert set(value) == {"layer", *STANDARD} - {"anisotropy"}
    assert all(isinstance(one, int | float) for one in value.values())


def test_tokenizer_of_another_model_is_permanent(root: str, tmp_path: Path) -> None:
    mini_pythia.train({"size": "mini-s", "root": str(tmp_path), "steps": [0], "texts": 5})
    shutil.copy(f"{root}/{NAME}/tokenizer.json", tmp_path / NAME / "tokenizer.json")

    with pytest.raises(PermanentError, match="the tokenizer gives id"):
        workload(str(tmp_path)).load(NAME)


OWN = """
from hpc_toolkit.science.metrics import Metric

def spread(means):
    "Largest norm of a prompt's mean."
    return means.norm(dim=-1).max()

length = Metric("prompt", lambda states, lengths: lengths.double(), "mean tokens of a prompt")
anisotropy = spread
tokens = Metric("tokens", spread, "")
number = 3
"""


def test_metrics_of_the_users_own_see_the_states_of_the_one_pass(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownmetrics.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["rankme", "ownmetrics:spread", "ownmetrics:length"]
    metrics = workload(root, metrics=names, prompts=MORE)

    (value,) = measure(metrics, [2])

    assert list(value) == ["layer", "rankme", "spread", "length"]
    assert value["spread"] > 0
    assert value["length"] >= 3
    assert metrics.forwards == 1
    for name, says in (
        ("ownmetrics:anisotropy", "second metric 'anisotropy'"),
        ("ownmetrics:tokens", "for anisotropy only"),
        ("ownmetrics:number", "is a int"),
        ("ownmetrics:absent", "has no attribute 'absent'"),
        ("absentmodule:x", "No module named"),
    ):
        with pytest.raises(ConfigError, match=says):
            workload(root, metrics=["anisotropy", name])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark of a checkpoint's time, at a size that takes a second."""
    benchmarks = REPOSITORY / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    return runpy.run_path(str(benchmarks / "cuda.py"))


def test_the_parts_of_a_checkpoints_time_are_told_with_what_bounds_it(cuda: Any) -> None:
    text = "\n".join(cuda["measured"](cuda["TINY"], torch.device("cpu")))

    shares = {
        part: int(share) for part, share in re.findall(r"\| (\w+) \| [\d.]+ \| (\d+)% \|", text)
    }
    assert set(shares) == {"load", "forward", "metrics"}
    assert sum(shares.values()) == pytest.approx(100, abs=1)
    (bound,) = re.findall(r"Bound by: (\w+)\.", text)
    assert shares[bound] == max(shares.values())
    assert "difference of a value from the CPU: 0e+00" in text


@pytest.mark.cuda
def test_the_gpu_agrees_with_the_cpu(cuda: Any) -> None:
    text = "\n".join(cuda["measured"](cuda["TINY"], torch.device("cuda")))

    (found,) = re.findall(r"from the CPU: (\S+)\.\n", text)
    assert float(found) < 1e-4
