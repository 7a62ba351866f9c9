"""Every scenario at full size; 'make soak' runs these, and they print what they measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCENARIOS = {
    "kill-storm": ["benchmarks/kill_storm.py"],
    "takeover": ["benchmarks/takeover.py"],
    "grouped-metrics": ["-m", "benchmarks.grouped_metrics"],
    "simulated-clusters": ["benchmarks/simulate.py"],
    "mutants": ["tests/mutants.py"],
}


@pytest.mark.soak
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_at_full_size_keeps_its_promise(name: str) -> None:
    done = subprocess.run([sys.executable, *SCENARIOS[name]], cwd=ROOT, check=False)

    assert done.returncode == 0
