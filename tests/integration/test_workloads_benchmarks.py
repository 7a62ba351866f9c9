"""The benchmarks of the model workloads, at a size that takes a second."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: runpy.run_path(str(BENCHMARKS / f"{name}.py"))


def test_the_parts_of_a_checkpoints_time_are_told_with_what_bounds_it(script: Any) -> None:
    cuda = script("cuda")

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
def test_the_gpu_agrees_with_the_cpu(script: Any) -> None:
    cuda = script("cuda")

    text = "\n".join(cuda["measured"](cuda["TINY"], torch.device("cuda")))

    (found,) = re.findall(r"from the CPU: (\S+)\.\n", text)
    assert float(found) < 1e-4
