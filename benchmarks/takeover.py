"""How soon does an item run elsewhere after its worker was killed?

    python benchmarks/takeover.py [--rounds 10] [--workers 4]

Local workers with the default heartbeat and lease run items of 0.1 s. In every round one of them is
killed by SIGKILL in the middle of an item, as the item's own trace tells, and the time until the
same item starts in another process is measured: for the worker and its executor together, and for
the executor alone. A suspect of a death runs last in its unit, so the rest of the unit, about 12
items here at most, is part of the time. Exit code 0 if both medians are below 2 s and no attempt
was charged.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tracefile import Execution, Trace, lives, send, wait_for

from hpc_toolkit.run import Run

_LIMIT_S = 2.0
_ITEM_S = 0.1


def middle(trace: Trace, workers: int) -> Execution:
    """An execution in the middle of its item, when all workers are at work."""
    found: list[Execution] = []

    def look() -> bool:
        inside = trace.inside()
        now = time.time()
        found[:] = [one for one in inside if 0.02 < now - one.started < 0.06]
        return len(inside) >= workers and bool(found)

    wait_for(look, f"{workers} workers inside items")
    return found[0]


def measure(trace: Trace, workers: int, *, whole: bool) -> tuple[int, float]:
    """Kill once; the item and the seconds until it started elsewhere."""
    target = middle(trace, workers)
    at = time.time()
    send(signal.SIGKILL, *([target.worker] if whole else []), target.executor)
    wait_for(lambda: not lives(target.executor), "the executor to be gone")
    trace.poll()
    if target.ended is not None:  # too late: the item had just ended
        return measure(trace, workers, whole=whole)

    def again() -> list[Execution]:
        trace.poll()
        # The target may be a rerun itself: what began before the kill is no answer to it.
        return [one for one in trace.executions if one.item == target.item and one.started > at]

    wait_for(lambda: bool(again()), f"item {target.item} to start elsewhere")
    return target.item, again()[0].started - at


def run_rounds(directory: Path, rounds: int, workers: int, *, whole: bool) -> tuple[str, bool]:
    """One run with ``rounds`` kills; a line that reports it, and whether all is well."""
    directory.mkdir()
    path = directory / "trace"
    trace = Trace(path)
    count = rounds * workers * 20
    items = [{"id": i, "seconds": _ITEM_S, "trace": str(path)} for i in range(count)]
    run = Run.create(directory / "run", items, workload="hpc_toolkit.workloads.synthetic:Sleep")
    argv = [sys.executable, "-m", "hpc_toolkit", "work", str(run.root), "--workers", str(workers)]
    pool = subprocess.Popen(argv)
    try:
        found = [measure(trace, workers, whole=whole) for _ in range(rounds)]
    finally:
        pool.send_signal(signal.SIGTERM)
        pool.wait(timeout=60)
    seconds = [took for _, took in found]
    attempts = {row["item"]["id"]: row["attempts"] for row in run.results(partial=True)}
    charged = [item for item, _ in found if attempts.get(item, 1) != 1]
    deaths = run.status().deaths
    median = statistics.median(seconds)
    what = "worker and executor" if whole else "executor alone"
    line = (
        f"{what:<20} median {median:6.3f} s  max {max(seconds):6.3f} s  "
        f"rounds {rounds}  deaths {deaths}  attempts charged {len(charged)}"
    )
    return line, median < _LIMIT_S and not charged and deaths >= rounds


def main() -> int:
    """Parse, measure both, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    fine = True
    with tempfile.TemporaryDirectory(prefix="takeover-") as directory:
        for whole in (True, False):
            path = Path(directory, "whole" if whole else "executor")
            line, good = run_rounds(path, given.rounds, given.workers, whole=whole)
            print(line, flush=True)
            fine = fine and good
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
