"""The guide of the ready-made workloads names what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from hpc_toolkit.science.workloads.layer_metrics import LayerMetrics
from hpc_toolkit.science.workloads.onepass import OfCheckpoints
from hpc_toolkit.science.workloads.text_tasks import TASKS

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "workloads.md"


def test_the_guide_names_the_tasks_and_no_others() -> None:
    listed = GUIDE.read_text(encoding="utf-8").partition("Tasks: ")[2].partition(".")[0]

    assert re.findall(r"`([^`]+)`", listed) == list(TASKS)


def test_the_guide_names_the_options_that_decide_numbers_and_memory() -> None:
    named = set(re.findall(r"`(\w+)`", GUIDE.read_text(encoding="utf-8")))

    options = {"final_norm", "max_batch_tokens", "batch_size", "views", "view_seed", "metrics"}
    shared = set(inspect.signature(OfCheckpoints).parameters)
    assert options <= shared | set(inspect.signature(LayerMetrics).parameters)
    assert options <= named
