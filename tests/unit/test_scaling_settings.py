"""What a scaling run measures: settings, variations, and the commands of its launches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling import program
from hpc_toolkit.training.scaling.launches import (
    Job,
    ScalingRun,
    job_request,
)
from hpc_toolkit.training.scaling.settings import Settings, Variation


@given(
    batch=st.integers(1, 99),
    weak=st.booleans(),
    cost=st.integers(0, 5000).map(lambda micro: micro / 1000),
    precision=st.sampled_from(["float32", "bf16"]),
)
def test_words_of_settings_are_read_back_as_the_same(
    batch: int, weak: bool, cost: float, precision: str
) -> None:
    settings = Settings(batch_size=batch, weak=weak, sample_cost_ms=cost, precision=precision)
    run = ScalingRun(
        directory=Path("out"),
        world_sizes=(1,),
        cluster="lab",
        settings=settings,
        variations=(Variation("accumulate", (1, 2)),),
    )

    assert program.parse(run.words()) == (settings, list(run.variations), Path("out"), "lab")


def test_strong_scaling_shares_the_batch_and_weak_repeats_it() -> None:
    assert Settings(batch_size=8).batch_per_rank(4) == 2
    assert Settings(batch_size=8, weak=True).batch_per_rank(4) == 8
    for size in (3, 16):
        with pytest.raises(ConfigError, match=f"8 samples do not divide among {size}"):
            Settings(batch_size=8).batch_per_rank(size)
    # A batch that can be shared at every world size is advised.
    with pytest.raises(ConfigError) as refused:
        Settings(batch_size=8).batch_per_rank(3, (1, 2, 3))
    assert "such as 12," in refused.value.hint


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("model=1", "'model' cannot vary"),
        ("accumulate", "--vary accumulate: '' is not a list of numbers"),
        ("accumulate=1,two", "--vary accumulate: '1,two' is not a list of numbers"),
    ],
)
def test_a_variation_that_is_none_is_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Variation.parse(text)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batch_size": 0}, "--batch-size: 0 is outside 1"),
        ({"warmup": -1}, "--warmup: -1 is outside 0"),
        ({"precision": "fp8"}, "--precision: 'fp8'"),
        ({"model": "decoder-0x64"}, "is not a decoder"),
        ({"model": "decoder-2x65"}, "is not a decoder"),
        ({"sample_cost_ms": float("nan")}, "--sample-cost: nan"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(
    changes: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        dataclasses.replace(Settings(), **changes)  # type: ignore[arg-type]


def test_a_job_launches_the_ranks_of_its_nodes() -> None:
    directory = Path("/shared/s")
    settings = Settings(batch_size=16)
    run = ScalingRun(directory=directory, world_sizes=(1, 2, 4, 6, 8), settings=settings)
    jobs = {size: Job(size, str(size), tuple(run.program())) for size in run.world_sizes}

    with pytest.raises(ConfigError, match="6 ranks do not fill nodes of 4"):
        job_request(directory, jobs[6], 4, gpus="", launch=None)
    for size, template, ranks, gpus in (
        (1, "train-multi-gpu", 1, "l40s:1"),
        (4, "train-multi-gpu", 4, "l40s:4"),
        (8, "train-multi-node", 4, "l40s:4"),
    ):
        found, values = job_request(directory, jobs[size], 4, gpus="l40s:4", launch=None)
        assert (found, values["nodes"]) == (template, max(1, size // 4))
        assert (values["nproc_per_node"], values["gpus_per_node"]) == (ranks, gpus)
        assert values["command"][:2] == ("-m", "hpc_toolkit.training.scaling.program")
        assert values["command"][-4:] == ("--batch-size", "16", "-o", "/shared/s")
    for gpus in ("", "0"):
        found, _ = job_request(directory, jobs[2], 2, gpus=gpus, launch="task-per-gpu")
        assert found == "train-multi-node"
