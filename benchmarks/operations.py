"""What the queue asks of a filesystem, counted by strace at small size, and projected.

    python benchmarks/operations.py [--idle 120] [--write]

Counted are the system calls below the run directory that name a file or list a directory: each may
be a question to the server of a shared filesystem. Reading and writing what is open is not; synced
writes are shown apart. Workers take the filesystem for a shared one, each with a host of its own.
Counting among waiting workers begins when all have started and their number of calls falls no more.

Takes for each number of workers twice the time that is counted (--idle) and about twice a minute
until they have settled, mostly waiting. Needs strace.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import directory, number, parser, seconds
from ending import children, end
from resultsfile import facts, table, write_section
from tracefile import send, wait_for

from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, heartbeat_interval_s
from hpc_toolkit.queue.pacing import NAMES_EVERY, POLLS_PER_S, SCANS_PER_S, Pacing
from hpc_toolkit.queue.presence import RUNNING, Presence, read_presence
from hpc_toolkit.system.clock import SystemClock

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

HPCTK = [sys.executable, "-m", "hpc_toolkit"]
SYNTHETIC = "hpc_toolkit.science.workloads.synthetic:"
NAMED = (
    *("open", "openat", "readlink", "readlinkat", "symlink", "symlinkat", "stat", "lstat"),
    *("newfstatat", "statx", "access", "faccessat", "faccessat2", "mkdir", "mkdirat", "unlink"),
    *("unlinkat", "rename", "renameat", "renameat2", "link", "linkat", "utimensat", "chmod"),
)
LISTED = ("getdents64",)
SYNCED = ("fdatasync", "fsync")
_START_S = 60.0
_WINDOW_S, _STEP_S = 30.0, 5.0
"""No pause between two looks of the same kind is longer, for as few workers as run here."""
_SETTLED_S = 180.0
CALL = re.compile(r"^(?:\d+ +)?(\d+\.\d+) (\w+)\(")


class Trace:
    """Calls of some processes and their children below one directory."""

    def __init__(self, root: Path, output: Path) -> None:
        self._root = str(root)
        self._output = output

    def argv(self) -> list[str]:
        """What goes before a command to have it traced."""
        calls = ",".join((*NAMED, *LISTED, *SYNCED))
        flags = ["-f", "--seccomp-bpf", "-qqq", "-ttt", "-y", "-e", "signal=none"]
        return ["strace", *flags, "-e", f"trace={calls}", "-o", str(self._output)]

    def calls(self, since: float = 0.0, until: float = float("inf")) -> Counter[str]:
        """How often each call was made, by the clock on the wall."""
        found: Counter[str] = Counter()
        for line in self._output.read_text(errors="replace").splitlines():
            match = CALL.match(line)
            # Of an open file its attributes are at hand.
            if match is None or self._root not in line or "AT_EMPTY_PATH" in line:
                continue
            if since <= float(match[1]) <= until:
                found[match[2]] += 1
        return found


def metadata(calls: Counter[str]) -> int:
    """Questions about names; a listing counts once, not once for each of its answers."""
    return sum(calls[name] for name in NAMED)


def synced(calls: Counter[str]) -> int:
    return sum(calls[name] for name in SYNCED)


def make(root: Path, items: int, *flags: str, workload: str = "Noop") -> None:
    lines = "".join(json.dumps({"id": n, "seconds": 3600.0}) + "\n" for n in range(items))
    argv = [*HPCTK, "init", str(root), "--items", "-", "--workload", SYNTHETIC + workload, *flags]
    subprocess.run(argv, input=lines.encode(), stdout=subprocess.DEVNULL, check=True)


def worker(root: Path, number: int) -> subprocess.Popen[bytes]:
    """One traced worker on a host of its own."""
    environ = {**os.environ, "HPCTK_FILESYSTEM": "shared", "HPCTK_HOST": f"n{number}"}
    argv = [*trace_of(root, number).argv(), *HPCTK, "work", str(root)]
    return subprocess.Popen([*argv, "--workers", "1"], env=environ)


def trace_of(root: Path, number: int) -> Trace:
    return Trace(root, root.with_name(f"{root.name}.trace.{number}"))


def leave(processes: list[subprocess.Popen[bytes]]) -> None:
    """Have the workers leave; strace takes no signal, and ends with the last that it traces."""
    for process in processes:
        send(signal.SIGTERM, *children(process.pid))
    end(*processes)


def working(base: Path, items: int) -> tuple[int, int, int, int]:
    """One worker through a list: items, units, questions and syncs."""
    root = base / f"work-{items}"
    make(root, items)
    process = worker(root, 0)
    try:
        process.wait(timeout=600)
    finally:
        leave([process])
    calls = trace_of(root, 0).calls()
    units = len(os.listdir(root / "stages" / "items" / "claims"))
    return items, units, metadata(calls), synced(calls)


def settle(count: Callable[[float, float], int]) -> None:
    """Wait until those who wait do so at their lasting pace.

    A start is many calls, and the pauses between the first looks double until they are as long as
    they get: the calls of a window fall until the start has left it.

    Args:
        count: calls between two times.
    """
    began = time.time()
    counts: list[int] = []
    time.sleep(_WINDOW_S)
    while time.time() < began + _SETTLED_S:
        now = time.time()
        counts.append(count(now - _WINDOW_S, now))
        if is_settled(counts):
            return
        time.sleep(_STEP_S)
    message = f"error: the workers did not settle within {_SETTLED_S:.0f} s; calls in windows of "
    raise SystemExit(message + f"{_WINDOW_S:.0f} s: {counts}\nhint: is the machine busy?")


def is_settled(counts: list[int]) -> bool:
    """Whether the last of overlapping windows has about as many calls as the one before."""
    return len(counts) > 1 and counts[-1] >= 0.8 * counts[-2]


def waiting(base: Path, workers: int, idle_s: float, *, busy: bool) -> tuple[float, float]:
    """(questions a second of all idle workers and one that works, or none; of one of them)."""
    root = base / f"idle-{workers}-{busy}"
    make(root, 1, "--open", workload="Sleep" if busy else "Noop")
    claims = root / "stages" / "items" / "claims"
    processes = [worker(root, 0)]

    def present() -> list[Presence]:
        found = [read_presence(path) for path in (root / "workers").glob("*.json")]
        return [one for one in found if one is not None and one.state == RUNNING]

    def all_wait() -> bool:
        found = present()
        # The one item is done, or it is being worked on and not to end.
        return len(found) == workers and (busy or sum(one.done for one in found) == 1)

    def count(since: float, until: float) -> list[int]:
        return [metadata(trace_of(root, n).calls(since, until)) for n in range(workers)]

    try:
        wait_for(lambda: bool(os.listdir(claims)), "a claim", limit_s=_START_S)
        processes += [worker(root, number) for number in range(1, workers)]
        wait_for(all_wait, f"{workers} workers that wait", limit_s=_START_S + workers)
        settle(lambda since, until: sum(count(since, until)))
        since = time.time()
        time.sleep(idle_s)
        until = time.time()
        if busy:
            # Its executor sleeps; the worker is told that time is up.
            subprocess.run([*HPCTK, "drain", str(root)], check=False, stderr=subprocess.DEVNULL)
    finally:
        leave(processes)
    counts = count(since, until)
    return sum(counts) / idle_s, counts[-1] / idle_s


def asking(base: Path, workers: int) -> int:
    """Metadata requests of one `hpctk status` on a finished run of N workers."""
    root = base / f"status-{workers}"
    make(root, 40 * workers)
    subprocess.run([*HPCTK, "work", str(root), "--workers", str(workers)], check=True)
    trace = trace_of(root, 0)
    argv = [*trace.argv(), *HPCTK, "status", str(root), "--json"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return metadata(trace.calls())


def projected(workers: int) -> list[str]:
    """Metadata requests of N waiting workers, computed from Pacing's constants."""
    pacing = Pacing(
        SystemClock(), local=False, workers=workers, lease_s=DEFAULT_LEASE_S, seed="projection"
    )
    # Upper bounds: each scans as soon as it may, of one stage and one owner, or all use their part.
    polls = min(workers / 1.0, POLLS_PER_S)
    looks = min(workers, pacing.at_most or workers)
    listings = 2 if looks == workers else 1 + 1 / NAMES_EVERY
    watched = workers * (listings + looks) / pacing.watch_s
    scans = min(workers * (4 + 2) / 15.0, SCANS_PER_S)
    return [
        f"{workers:,}",
        f"{max(1.0, workers / POLLS_PER_S):.0f} s",
        f"{looks} in {pacing.watch_s:.0f} s",
        f"{polls:.0f}",
        f"{watched:.0f}",
        f"{scans:.0f}",
        f"{polls + watched + scans:.0f}",
        f"{workers / heartbeat_interval_s(workers):.0f}",
    ]


def arguments() -> Namespace:
    given = parser(__doc__)
    given.add_argument(
        "--items",
        type=number,
        nargs=2,
        metavar=("FEW", "MANY"),
        default=[1_000, 9_000],
        help="of two lists, which are compared",
    )
    given.add_argument("--workers", type=number, nargs="*", default=[2, 4, 8], help="that wait")
    given.add_argument("--idle", type=seconds, default=60.0, help="seconds of waiting to count")
    given.add_argument("--dir", type=directory, help="where the runs are made")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if options.items[0] >= options.items[1]:
        given.error("--items: the second list is to be the longer one")
    if shutil.which("strace") is None:
        given.error("strace(1) is not installed")
    return options


def main() -> None:
    options = arguments()
    base = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        lines = report(base, options)
        if options.write:
            write_section("Operations", [facts(base), "", *lines])
        print("\n".join(lines))
    finally:
        shutil.rmtree(base, ignore_errors=True)


def report(base: Path, options: Namespace) -> list[str]:
    (few, few_units, few_calls, few_synced), (many, units, calls, syncs) = (
        working(base, items) for items in options.items
    )
    claims = max(1, units - few_units)
    per_claim = (calls - few_calls) / claims
    lines = table(
        ["one worker, no-ops, from", "to", "a claim", "an item", "start and end", "syncs a claim"],
        [
            [
                f"{few:,} items, {few_units} units",
                f"{many:,} items, {units} units",
                f"{per_claim:.2f}",
                f"{(calls - few_calls) / (many - few):.4f}",
                f"{few_calls - few_units * per_claim:.0f}",
                f"{(syncs - few_synced) / claims:.2f}",
            ]
        ],
    )
    rows = []
    for workers in options.workers:
        for busy in (False, True):
            whole, one = waiting(base, workers, options.idle, busy=busy)
            others = "one works, the others wait" if busy else "all wait for items"
            rows.append([str(workers), others, f"{whole:.1f}", f"{one:.2f}"])
    lines += ["", *table(["workers", "", "a second, whole run", "a second, one waiting"], rows)]
    small, large = (asking(base, workers) for workers in (2, 10))
    each = (large - small) / 8
    cells = [f"{each:.1f} a worker", f"{small - 2 * each:.0f} besides", f"{4096 * each:,.0f}"]
    lines += ["", *table(["one `status`", "", "with 4,096 workers"], [cells])]
    head = [
        "workers",
        "`head` every",
        "looks",
        "polls/s",
        "watches/s",
        "scans/s, at most",
        "sum/s, at most",
        "beats/s",
    ]
    counts = (1, 8, 32, 64, 256, 1_024, 4_096)
    words = [
        "Not measured but computed from the pace of `hpc_toolkit/queue/pacing.py`, all workers",
        "waiting. Scans are an upper bound, and so is the sum: each worker scans every 15 s at six",
        "calls, until all together use the part that scans have; in truth a pause is up to half as",
        "long again.",
    ]
    return [*lines, "", *words, "", *table(head, [projected(count) for count in counts])]


if __name__ == "__main__":
    main()
