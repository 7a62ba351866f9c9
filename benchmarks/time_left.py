"""Compare the time left that hpctk shows during a campaign with the time that it then took.

    .venv/bin/python benchmarks/time_left.py examples/boosting.toml --workers 2 --every 4

At each moment it asks 'hpctk status' and 'hpctk plan', which must agree.
The time that it took is until the last result. Moments before the first evaluation have no
forecast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HPCTK = [sys.executable, "-m", "hpc_toolkit"]
_APART = 1.25
"""Largest ratio of the forecasts of two commands that ran one after the other."""


def asked(*words: str) -> dict[str, Any]:
    done = subprocess.run([*HPCTK, *words], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.stdout.startswith("{") else {}


def moment(run: Path) -> tuple[float, list[tuple[float, float, float]]]:
    """When it was, and low, median and high seconds by each command."""
    at = time.time()
    status = asked("status", str(run), "--json", "--no-slurm")
    plan = asked("plan", str(run), "--json").get("now") or {"time_s": {}}
    keys = ("eta_low_s", "eta_s", "eta_high_s")
    found: list[tuple[Any, ...]] = [tuple(status.get(key) for key in keys)]
    found.append(tuple(plan["time_s"].get(key) for key in ("low", "median", "high")))
    return at, [(one[0], one[1], one[2]) for one in found if None not in one]


def last_result(run: Path) -> float:
    lines = (line for path in run.glob("journals/*.jsonl") for line in path.open())
    return max(float(json.loads(line)["at"]) for line in lines if '"type":"done"' in line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("campaign")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=float, default=5.0)
    given = parser.parse_args()
    run = Path(tempfile.mkdtemp()) / "run"
    words = [*HPCTK, "campaign", "run", given.campaign, "--run", str(run)]
    moments = []
    with subprocess.Popen([*words, "--workers", str(given.workers)], stdout=-3, stderr=-3) as work:
        while work.poll() is None:
            time.sleep(given.every)
            if run.exists():
                moments.append(moment(run))
    ended = last_result(run)
    inside, widths, apart = [], [], 0
    for at, found in moments:
        if not found or at >= ended:
            continue
        (low, median, high), real = found[0], ended - at
        inside.append(low <= real <= high)
        widths.append(high / max(low, 0.1))
        medians = [max(one[1], 1.0) for one in found]
        apart += max(medians) / min(medians) > _APART
        print(f"{real:8.1f} s  {low:8.1f} {median:8.1f} {high:8.1f}  {inside[-1]}  of {len(found)}")
    print(f"{sum(inside)} of {len(inside)} inside, high/low median {statistics.median(widths):.2f}")
    print(f"commands more than {_APART} apart at {apart} moments")


if __name__ == "__main__":
    main()
