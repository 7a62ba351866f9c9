"""How soon does an item run that is added while all workers wait?

    python benchmarks/wakeup.py [--rounds 20] [--workers 4] [--shared] [--write]

Workers wait on an open run; every few seconds one item is added, and the time is measured from
the moment at which ``add`` returned until the item starts, as its own trace tells. With
``--shared`` the workers take the filesystem for a shared one, each with a host of its own. Exit
code 0 if the median is below 0.1 s, or below 5 s with ``--shared``.

Takes about a second a round and ten more, with ``--shared`` three times as long. Needs nothing.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arguments import directory, number, parser
from ending import end
from resultsfile import facts, table, write_section
from tracefile import Trace, wait_for

from hpc_toolkit.run import Run

_LIMIT_S, _SHARED_LIMIT_S = 0.1, 5.0


def start(root: Path, workers: int, *, shared: bool) -> list[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "hpc_toolkit", "work", str(root), "--workers"]
    if not shared:
        return [subprocess.Popen([*argv, str(workers)])]
    environ = {**os.environ, "HPCTK_FILESYSTEM": "shared"}
    return [
        subprocess.Popen([*argv, "1"], env={**environ, "HPCTK_HOST": f"n{number}"})
        for number in range(workers)
    ]


def measure(base: Path, rounds: int, workers: int, *, shared: bool) -> list[float]:
    """Seconds from each ``add`` to the start of its item."""
    trace = Trace(base / "trace")
    workload = "hpc_toolkit.science.workloads.synthetic:Sleep"

    def items(*ids: int) -> list[dict[str, object]]:
        return [{"id": n, "seconds": 0.0, "trace": str(base / "trace")} for n in ids]

    def started(item: int) -> list[float]:
        trace.poll()
        return [one.started for one in trace.executions if one.item == item]

    def wait_start(item: int) -> float:
        wait_for(lambda: bool(started(item)), f"item {item} to start")
        return started(item)[0]

    # Two for each, so that every executor is likely to have begun before the first measurement.
    first = 2 * workers
    run = Run.create(base / "run", items(*range(first)), workload=workload, open_end=True)
    processes = start(run.root, workers, shared=shared)
    chance = random.Random(0)
    found = []
    try:
        for item in range(first):
            wait_start(item)
        directory = run.paths.workers
        wait_for(lambda: len(list(directory.glob("*.json"))) == workers, "all workers")
        time.sleep(5.0)
        for item in range(first, first + rounds):
            time.sleep(chance.uniform(0.5, 1.5) * (3.0 if shared else 1.0))
            run.add(items(item))
            at = time.time()
            found.append(max(0.0, wait_start(item) - at))
    finally:
        end(*processes)
    return found


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--rounds", type=number, default=20, help="items that are added")
    given.add_argument("--workers", type=number, default=4, help="that wait")
    given.add_argument("--shared", action="store_true", help="as on a shared filesystem")
    given.add_argument("--dir", type=directory, help="where the run is made")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        found = measure(Path(name), options.rounds, options.workers, shared=options.shared)
        where = facts(Path(name))
    kind = "shared" if options.shared else "local"
    head = ["filesystem taken for", "workers", "added", "median", "longest"]
    middle = statistics.median(found)
    cells = [kind, str(options.workers), str(len(found)), f"{middle:.3f} s", f"{max(found):.3f} s"]
    lines = table(head, [cells])
    print("\n".join(lines))
    if options.write:
        write_section(f"Wake-up ({kind})", [where, "", *lines])
    sys.exit(0 if middle < (_SHARED_LIMIT_S if options.shared else _LIMIT_S) else 1)


if __name__ == "__main__":
    main()
