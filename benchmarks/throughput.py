"""Items a second of the queue beside other directory queues, all in one run.

    python benchmarks/throughput.py --items 100000 --workers 8 --repeats 3 \
        --peers DIR --peer-python PY --peer dirq --peer jug --peer naive_filelock

Ours: ``hpctk work`` on Noop items of about 100 bytes of result, through the ordinary function path,
default units, synced per unit and at least twice a second; the start of all workers is included.
A peer is a script ``DIR/peer_NAME.py`` that prints one JSON object with ``items_per_s``: the rate
of its drain alone, without start-up and without filling the queue.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HPCTK = [sys.executable, "-m", "hpc_toolkit"]
NOOP = "hpc_toolkit.workloads.synthetic:Noop"


def ours(base: Path, items: int, workers: int) -> dict[str, Any]:
    """One run of this project's queue; seconds and rates."""
    root = base / "run"
    lines = "".join(json.dumps({"id": i, "pad": "x" * 75}) + "\n" for i in range(items))
    began = time.perf_counter()
    subprocess.run(
        [*HPCTK, "init", str(root), "--items", "-", "--workload", NOOP],
        input=lines.encode(),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    init_s = time.perf_counter() - began
    began = time.perf_counter()
    subprocess.run([*HPCTK, "work", str(root), "--workers", str(workers)], check=True)
    work_s = time.perf_counter() - began
    began = time.perf_counter()
    out = subprocess.run([*HPCTK, "status", str(root), "--json"], capture_output=True, check=True)
    status_s = time.perf_counter() - began
    began = time.perf_counter()
    subprocess.run(
        [*HPCTK, "gather", str(root), "-o", str(base / "rows.jsonl")],
        stderr=subprocess.DEVNULL,
        check=True,
    )
    gather_s = time.perf_counter() - began
    inodes = sum(len(names) + len(files) for _, names, files in os.walk(root))
    done = json.loads(out.stdout)["stages"]["items"]["done"]
    with (base / "rows.jsonl").open("rb") as rows:
        gathered = sum(1 for _ in rows)
    assert done == gathered == items
    shutil.rmtree(root)
    return {
        "items_per_s": items / work_s,
        "init_s": init_s,
        "work_s": work_s,
        "status_s": status_s,
        "gather_s": gather_s,
        "inodes": inodes,
    }


def peer(name: str, base: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of a peer; items a second of its drain alone."""
    script = Path(options.peers) / f"peer_{name}.py"
    argv = [options.peer_python, str(script), "--items", str(options.items)]
    argv += ["--workers", str(options.workers), "--dir", str(base / name)]
    argv += ["--cap", str(options.cap)]
    out = subprocess.run(argv, capture_output=True, text=True, check=False)
    lines = [line for line in out.stdout.splitlines() if line.startswith("{")]
    if not lines:
        message = f"{name}: {out.stderr[-500:]}"
        raise SystemExit(message)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cap", type=float, default=240.0, help="seconds a peer may take")
    parser.add_argument("--peers", help="directory with peer_NAME.py")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--dir", help="where the queues are made")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(dir=options.dir))
    mine: list[dict[str, Any]] = []
    theirs: dict[str, list[float]] = {name: [] for name in options.peer}
    capped: set[str] = set()
    try:
        for _ in range(options.repeats):
            mine.append(ours(base, options.items, options.workers))
            for name in options.peer:
                found = peer(name, base, options)
                theirs[name].append(found["items_per_s"])
                if found["capped"]:
                    capped.add(name)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    rate = statistics.median(one["items_per_s"] for one in mine)
    print(f"{options.items} items, {options.workers} workers, {options.repeats} interleaved runs")
    print(f"{'queue':<16}{'items/s (median)':>18}{'min':>10}{'max':>10}{'hpctk is':>12}")
    spread = [one["items_per_s"] for one in mine]
    print(f"{'hpctk':<16}{rate:>18.0f}{min(spread):>10.0f}{max(spread):>10.0f}")
    for name, rates in theirs.items():
        middle = statistics.median(rates)
        note = "  (cut at the cap)" if name in capped else ""
        print(
            f"{name:<16}{middle:>18.0f}{min(rates):>10.0f}{max(rates):>10.0f}"
            f"{rate / middle:>11.1f}x{note}"
        )
    for key in ("init_s", "work_s", "status_s", "gather_s"):
        print(f"hpctk {key:<10} {statistics.median(one[key] for one in mine):.3f}")
    print(f"hpctk inodes     {mine[-1]['inodes']}")


if __name__ == "__main__":
    main()
