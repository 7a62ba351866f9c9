"""What the queue asks of a filesystem, counted by strace at small size, and projected.

    python benchmarks/operations.py [--idle 120] [--write]

Counted are the system calls below the run directory that name a file or list a directory: each may
be a question to the server of a shared filesystem. Reading and writing what is open is not; synced
writes are shown apart. Workers take the filesystem for a shared one, each with a host of its own.
"""

from __future__ import annotations

import argparse
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

from resultsfile import facts, table, write_section

from hpc_toolkit.clock import SystemClock
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, heartbeat_interval_s
from hpc_toolkit.queue.pacing import POLLS_PER_S, SCANS_PER_S, Pacing

HPCTK = [sys.executable, "-m", "hpc_toolkit"]
SYNTHETIC = "hpc_toolkit.workloads.synthetic:"
NAMED = (
    *("open", "openat", "readlink", "readlinkat", "symlink", "symlinkat", "stat", "lstat"),
    *("newfstatat", "statx", "access", "faccessat", "faccessat2", "mkdir", "mkdirat", "unlink"),
    *("unlinkat", "rename", "renameat", "renameat2", "link", "linkat", "utimensat", "chmod"),
)
LISTED = ("getdents64",)
SYNCED = ("fdatasync", "fsync")
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


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask the workers to leave; strace ends with the last of its processes."""
    for process in processes:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for pid in map(int, children.split()):
            os.kill(pid, signal.SIGTERM)
    for process in processes:
        process.wait(timeout=120)


def working(base: Path, items: int) -> tuple[int, int, int, int]:
    """One worker through a list: items, units, questions and syncs."""
    root = base / f"work-{items}"
    make(root, items)
    worker(root, 0).wait(timeout=600)
    calls = trace_of(root, 0).calls()
    units = len(os.listdir(root / "stages" / "items" / "claims"))
    return items, units, metadata(calls), synced(calls)


def waiting(base: Path, workers: int, seconds: float, *, busy: bool) -> tuple[float, float]:
    """(questions a second of all idle workers and one that works, or none; of one of them)."""
    root = base / f"idle-{workers}-{busy}"
    make(root, 1, "--open", workload="Sleep" if busy else "Noop")
    claims = root / "stages" / "items" / "claims"
    processes = [worker(root, 0)]
    while not os.listdir(claims):
        time.sleep(0.05)
    processes += [worker(root, number) for number in range(1, workers)]
    time.sleep(8.0)  # they started, looked at everything once, and wait
    since = time.time()
    time.sleep(seconds)
    until = time.time()
    if busy:
        # Its executor sleeps; the worker is told that time is up.
        subprocess.run([*HPCTK, "drain", str(root)], check=False, stderr=subprocess.DEVNULL)
    end(processes)
    counts = [metadata(trace_of(root, n).calls(since, until)) for n in range(workers)]
    return sum(counts) / seconds, counts[-1] / seconds


def asking(base: Path, workers: int) -> int:
    """Questions of one status call on a finished run of so many workers."""
    root = base / f"status-{workers}"
    make(root, 40 * workers)
    subprocess.run([*HPCTK, "work", str(root), "--workers", str(workers)], check=True)
    trace = trace_of(root, 0)
    argv = [*trace.argv(), *HPCTK, "status", str(root), "--json"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return metadata(trace.calls())


def projected(workers: int) -> list[str]:
    """What the pace of so many waiting workers comes to, by its own figures."""
    pacing = Pacing(
        SystemClock(), local=False, workers=workers, lease_s=DEFAULT_LEASE_S, seed="projection"
    )
    polls = min(workers / 1.0, POLLS_PER_S)
    looks = min(workers, pacing.at_most or workers)
    watched = workers * (2 + looks) / pacing.watch_s
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--items", type=int, nargs=2, default=[1_000, 9_000])
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of waiting to count")
    parser.add_argument("--dir", help="where the runs are made")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        lines = report(base, options)
        if options.write:
            write_section("Operations", [facts(base), "", *lines])
        print("\n".join(lines))
    finally:
        shutil.rmtree(base, ignore_errors=True)


def report(base: Path, options: argparse.Namespace) -> list[str]:
    (few, few_units, few_calls, few_synced), (many, units, calls, syncs) = (
        working(base, items) for items in options.items
    )
    claims = units - few_units
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
        "scans/s",
        "sum/s",
        "beats/s",
    ]
    counts = (1, 8, 32, 64, 256, 1_024, 4_096)
    return [*lines, "", *table(head, [projected(count) for count in counts])]


if __name__ == "__main__":
    main()
