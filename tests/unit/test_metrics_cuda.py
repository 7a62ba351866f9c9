"""Every metric on a GPU gives what it gives on the CPU, and stays there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpc_toolkit.science.metrics import METRICS

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.cuda]


def given(name: str, n: int, d: int) -> list[Any]:
    scope = METRICS[name].scope
    shape = (1, 4, n, d) if scope == "views" else (1, n, d)
    return list(torch.from_numpy(np.random.default_rng(0).normal(size=shape)))


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_on_a_gpu_is_that_on_the_cpu(name: str) -> None:
    on_cpu = given(name, 300, 200)

    value = METRICS[name].function(*(one.cuda() for one in on_cpu))

    assert value.is_cuda
    assert value.dtype == torch.float64
    assert float(value) == pytest.approx(float(METRICS[name].function(*on_cpu)), rel=1e-9)


@pytest.mark.parametrize("name", [n for n in METRICS if METRICS[n].scope in ("prompt", "tokens")])
def test_lengths_may_be_on_the_cpu(name: str) -> None:
    z = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 9, 6)))
    lengths = torch.tensor([9, 3, 5])

    got = METRICS[name].function(z.cuda(), lengths)

    assert got.tolist() == pytest.approx(METRICS[name].function(z, lengths).tolist(), rel=1e-9)
