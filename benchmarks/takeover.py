"""How soon does an item run elsewhere after its worker was killed?

    python benchmarks/takeover.py [--rounds 10] [--workers 4] [--shared] [--write]

Local workers with the default heartbeat and lease run items of 0.1 s. In every round one of them is
killed by SIGKILL in the middle of an item, as the item's own trace tells, and the time until the
same item starts in another process is measured: for the worker and its executor together, and for
the executor alone. A suspect of a death runs last in its unit, so the rest of the unit, about 12
items here at most, is part of the time. Exit code 0 if both medians are below 2 s and no attempt
was charged. With ``--shared``, as root, the cases of ``benchmarks/sharedfs_takeover.py`` follow.

Takes about a second a round and case, and with ``--shared`` some ten minutes more, in which leases
run out. Needs nothing, but with ``--shared`` root and the packages that ``.ci/system`` installs.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arguments import number, parser
from ending import ended, interrupted
from resultsfile import facts, table, write_section
from tracefile import Execution, Trace, lives, send, wait_for

from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, heartbeat_interval_s
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.trust import mount_of

_LIMIT_S = 2.0
_ITEM_S = 0.1
_SHARED = [
    "On the shared filesystems all other workers wait, and so look rarely. Not proven: `hpctk",
    "doctor` did not check the run, or locks do not reach the other host. Dead node: with proven",
    "locks, the host's link is cut, then its filesystem client and all its workers are killed;",
    "the server still holds their locks. If Slurm reports a dead node, the takeover is faster:",
    "see 'A queue on a real Slurm'.",
]


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
        # The target may be a rerun itself: a rerun that began before the kill does not count.
        return [one for one in trace.executions if one.item == target.item and one.started > at]

    wait_for(lambda: bool(again()), f"item {target.item} to start elsewhere")
    return target.item, again()[0].started - at


def run_rounds(
    directory: Path, rounds: int, workers: int, *, whole: bool
) -> tuple[list[float], bool]:
    """One run with ``rounds`` kills; what each took, and whether all is well."""
    directory.mkdir()
    path = directory / "trace"
    trace = Trace(path)
    count = rounds * workers * 20
    items = [{"id": i, "seconds": _ITEM_S, "trace": str(path)} for i in range(count)]
    run = Run.create(
        directory / "run", items, workload="hpc_toolkit.science.workloads.synthetic:Sleep"
    )
    argv = [sys.executable, "-m", "hpc_toolkit", "work", str(run.root), "--workers", str(workers)]
    pool = subprocess.Popen(argv)
    with ended(pool):
        found = [measure(trace, workers, whole=whole) for _ in range(rounds)]
    seconds = [took for _, took in found]
    attempts = {row["item"]["id"]: row["attempts"] for row in run.results(partial=True)}
    charged = [item for item, _ in found if attempts.get(item, 1) != 1]
    good = statistics.median(seconds) < _LIMIT_S and not charged
    return seconds, good and run.status().deaths >= rounds


def row(title: str, where: str, seconds: list[float], evidence: str) -> list[str]:
    """A line of the table."""
    if not seconds:
        return [title, where, "", "", "0", evidence]
    median = f"{statistics.median(seconds):.2f} s"
    return [title, where, median, f"{max(seconds):.2f} s", str(len(seconds)), evidence]


def shared_rows(directory: Path) -> list[list[str]]:
    """What is measured on shared filesystems."""
    from sharedfs_takeover import measure as measure_shared

    return [
        row(one.title, one.filesystem, one.seconds, ", ".join(sorted(set(one.evidence))))
        for one in measure_shared(directory)
    ]


def main() -> int:
    """Parse, measure, print."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=number, default=10, help="kills of each case")
    options.add_argument("--workers", type=number, default=4, help="that are at work")
    options.add_argument("--shared", action="store_true", help="on shared filesystems too, as root")
    options.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    given = options.parse_args()
    fine, rows = True, []
    with tempfile.TemporaryDirectory(prefix="takeover-", ignore_cleanup_errors=True) as directory:
        for whole in (True, False):
            path = Path(directory, "whole" if whole else "executor")
            seconds, good = run_rounds(path, given.rounds, given.workers, whole=whole)
            title = "same host, all at work" + ("" if whole else "; executor alone")
            rows.append(row(title, mount_of(path).kind, seconds, "lock" if whole else "its worker"))
            fine = fine and good
        if given.shared:
            shared = shared_rows(Path(directory))
            rows += shared
            fine = fine and all(cells[4] != "0" for cells in shared)
    beat_s = heartbeat_interval_s(given.workers)
    head = ["killed", "filesystem", "median", "longest", "kills", "seen by"]
    lines = [
        facts(),
        "",
        f"Heartbeat every {beat_s:g} s, lease {DEFAULT_LEASE_S:g} s (the defaults); from SIGKILL",
        "to the start of the item in another process.",
        *(_SHARED if given.shared else []),
        "",
        *table(head, rows),
    ]
    print("\n".join(lines), flush=True)
    if given.write:
        write_section("Takeover", lines)
    return 0 if fine else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        interrupted()
