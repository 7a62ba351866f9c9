"""The guides of metrics and of ready-made workloads name what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from hpc_toolkit.science import metrics
from hpc_toolkit.science.metrics import METRICS, STANDARD
from hpc_toolkit.science.workloads.layer_metrics import LayerMetrics
from hpc_toolkit.science.workloads.onepass import OfCheckpoints
from hpc_toolkit.science.workloads.text_tasks import TASKS

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "representations.md"

GIVEN = {
    "prompt": "tokens of each prompt",
    "tokens": "all tokens of all prompts",
    "dataset": "prompt means",
    "views": "means of",
}


def rows() -> dict[str, list[str]]:
    """The cells behind each name, those of ``the same`` filled in."""
    text = GUIDE.read_text(encoding="utf-8")
    table = text.partition("| name in results |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found: dict[str, list[str]] = {}
    last: list[str] = []
    for name, *others in cells[2:]:
        last = [a if b == "the same" else b for a, b in zip(last or others, others, strict=True)]
        found[name.strip("`")] = last
    return found


def test_the_guide_has_every_metric_in_order_and_the_standard_ones_first() -> None:
    names = list(rows())

    assert names == list(METRICS)
    assert set(names[: len(STANDARD)]) == set(STANDARD)


@pytest.mark.parametrize("name", METRICS)
def test_the_guide_says_what_a_metric_is_given_and_its_range(name: str) -> None:
    function, given, told, cost = rows()[name]

    (called,) = re.findall(r"^`(\w+)`", function)
    assert called in metrics.__all__
    assert given.startswith(GIVEN[METRICS[name].scope])
    assert told.startswith(METRICS[name].about.rpartition(": ")[2].replace("..", " to "))
    assert set(re.findall(r"[a-z]\w*", cost)) <= {"n", "d", "q", "d1", "d2", "min", "max"}
    fewest = METRICS[name].fewest
    assert fewest <= 3 or f"at least {fewest} prompts" in GUIDE.read_text(encoding="utf-8")


WORKLOADS = Path(__file__).parents[2] / "docs" / "how-to" / "workloads.md"


def test_the_guide_names_the_tasks_and_no_others() -> None:
    listed = WORKLOADS.read_text(encoding="utf-8").partition("Tasks: ")[2].partition(".")[0]

    assert re.findall(r"`([^`]+)`", listed) == list(TASKS)


def test_the_guide_names_the_options_that_decide_numbers_and_memory() -> None:
    named = set(re.findall(r"`(\w+)`", WORKLOADS.read_text(encoding="utf-8")))

    options = {"final_norm", "max_batch_tokens", "batch_size", "views", "metrics"}
    shared = set(inspect.signature(OfCheckpoints).parameters)
    assert options <= shared | set(inspect.signature(LayerMetrics).parameters)
    assert options <= named
