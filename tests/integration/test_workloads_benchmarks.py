"""The benchmarks of the model workloads, at a size that takes a second."""

from __future__ import annotations

import argparse
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import mini_pythia

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMPTS = ["The rain fell on the town.", "Shares rose in London.", "A goal, and a win at home."]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: runpy.run_path(str(BENCHMARKS / f"{name}.py"))


@pytest.mark.soak  # test_workloads_onepass.py compares the values
def test_one_pass_has_the_values_of_the_cut_off_models_with_fewer_loads(
    script: Any, tmp_path: Path
) -> None:
    mini_pythia.train({"size": "mini-s", "root": str(tmp_path), "steps": [0], "texts": 20})
    options = argparse.Namespace(rounds=1, max_tokens=16)

    rows = script("onepass")["compared"]("name", tmp_path / "mini-s/step0", PROMPTS, options)

    assert [row[:3] for row in rows] == [
        ["name", "metrics", "one pass"],
        ["", "", "layer by layer"],
        ["name", "embeddings", "one pass"],
        ["", "", "layer by layer"],
    ]
    assert [row[6] for row in rows] == ["1", "5", "1", "5"]
    assert all(float(row[7]) <= 1e-6 for row in rows)


def test_a_value_that_differs_is_the_largest_difference(script: Any) -> None:
    difference = script("onepass")["difference"]

    assert difference([{"a": 1.0, "b": 2.0}], [{"b": 2.25, "a": 1.5}]) == 0.5
    assert difference([np.ones(3), np.zeros(2)], [np.ones(3), np.array([0.0, -0.25])]) == 0.25


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


def test_without_a_gpu_it_is_said_that_there_was_none_and_no_figure_of_one_is_lost(
    script: Any, tmp_path: Path
) -> None:
    cuda = script("cuda")
    results = tmp_path / "results.md"
    results.write_text("# Results\n\n## Other\nkept\n")

    cuda["write_absence"](results)

    said = results.read_text()
    assert "kept\n\n## The metrics stage on a GPU\nNot measured yet: the machine" in said
    measured = said.replace(cuda["ABSENT"], "12 s on a GPU")
    results.write_text(measured)
    cuda["write_absence"](results)
    assert results.read_text() == measured


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_figures_of_a_cpu_are_never_written_as_those_of_a_gpu(
    script: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    cuda = script("cuda")
    main, wrote = cuda["main"], []
    names = main.__globals__
    monkeypatch.setitem(names, "measured", lambda *_: ["3 s"])
    monkeypatch.setitem(names, "write_section", lambda *given: wrote.append(given))
    monkeypatch.setitem(names, "write_absence", lambda path: wrote.append(path.name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["cuda.py", "--device", device, "--write"])

    if device == "cuda":
        with pytest.raises(SystemExit, match="torch sees no GPU here"):
            main()
    else:
        main()

    assert wrote == ["results.md"]


@pytest.mark.cuda
def test_the_gpu_agrees_with_the_cpu(script: Any) -> None:
    cuda = script("cuda")

    text = "\n".join(cuda["measured"](cuda["TINY"], torch.device("cuda")))

    (found,) = re.findall(r"from the CPU: (\S+)\.\n", text)
    assert float(found) < 1e-4
