"""Does an item cost more in a longer list, or among more workers? And a list after many kills.

    python benchmarks/sizes.py [--sizes 1000 10000 100000 1000000] [--workers 8]
                               [--pools 1 2 4 8 16 32 64] [--adders 1 2 4 8] [--write]

Lists of no-ops, each made, worked on, counted, gathered and reported; the processor time of all
processes of each command, their start included. Beside them, a loop that reads and writes the same
list line by line with ``json``. 100,000 no-ops (or the longest list, if that
is shorter), worked on by more and more workers. The longest list once more: its workers and
executors are killed one by one by SIGKILL, every quarter of a second, and in the end all at once.
``status`` is timed at that moment and must count what ``gather --partial`` gives; other workers
then finish the list, and each item must be there once.

The section "Adders" is of open lists. Several processes at once add 10,000 items ten times each
with ``hpctk add`` while 4 workers work; in the end the list is sealed, and each item must have one
row.

Takes some minutes by default. With no number after ``--sizes`` or ``--adders``, that part is left
out.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import directory, number, parser
from ending import children, ended
from resultsfile import facts, table, write_section
from throughput import HPCTK, NOOP

if TYPE_CHECKING:
    import argparse

_EVERY_S = 0.25
_KILLS = 12
_BATCHES, _WORKERS = 10, 4


# A process counts the memory of the one that started it, which would hold whole lists here.
_USAGE = """
import os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - began
with open(sys.argv[1], "w") as file:
    print(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, file=file)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def measured(argv: list[str], stdin: bytes = b"") -> tuple[float, float, float, bytes]:
    """Seconds, processor seconds, MiB of a command at its largest, and what it prints."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as printed,
        tempfile.NamedTemporaryFile() as usage,
    ):
        given.write(stdin)
        given.seek(0)
        observed = [sys.executable, "-c", _USAGE, usage.name, *argv]
        subprocess.run(observed, stdin=given, stdout=printed, check=True)
        seconds, cpu_s, mib = map(float, usage.read().split())
        printed.seek(0)
        return seconds, cpu_s, mib, printed.read()


def counts(root: Path) -> tuple[float, dict[str, int]]:
    """Processor seconds of ``status --json``, and what it counts."""
    _, cpu_s, _, out = measured([*HPCTK, "status", str(root), "--json"])
    found: dict[str, int] = json.loads(out)["stages"]["items"]
    return cpu_s, found


def storm(root: Path, workers: int) -> int:
    """Work on a list and be killed again and again, in the end by all at once; how many kills."""
    pool = subprocess.Popen([*HPCTK, "work", str(root), "--workers", str(workers)])
    with ended(pool):
        return rage(pool, root / "journals")


def rage(pool: subprocess.Popen[bytes], journals: Path) -> int:
    """Kill until nobody is left; how many kills."""
    chance, kills = random.Random(1), 0
    while pool.poll() is None and not any(path.stat().st_size for path in journals.iterdir()):
        time.sleep(0.01)
    while kills < _KILLS and pool.poll() is None:
        living = [pid for one in children(pool.pid) for pid in (one, *children(one))]
        if living:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(living), signal.SIGKILL)
                kills += 1
        time.sleep(_EVERY_S)
    last = children(pool.pid)
    pool.kill()
    for pid in last:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    pool.wait()
    return kills + len(last)


LOOP = """
import json, sys
for line in sys.stdin:
    sys.stdout.write(json.dumps(json.loads(line)) + "\\n")
"""


def listed(items: int, first: int = 0) -> bytes:
    numbers = range(first, first + items)
    return "".join(json.dumps({"id": i, "pad": "x" * 75}) + "\n" for i in numbers).encode()


def make(root: Path, items: int) -> tuple[float, float]:
    """Processor seconds and MiB of ``init``."""
    argv = [*HPCTK, "init", str(root), "--items", "-", "--workload", NOOP]
    return measured(argv, listed(items))[1:3]


def work(root: Path, workers: int) -> tuple[float, float]:
    """Seconds and processor seconds until the list is done."""
    return measured([*HPCTK, "work", str(root), "--workers", str(workers)])[:2]


def gathered(root: Path, *options: str) -> tuple[Counter[str], float, float]:
    """Rows by their state, processor seconds, and MiB of ``gather``."""
    rows = root.with_suffix(".jsonl")
    _, cpu_s, mib, _ = measured([*HPCTK, "gather", str(root), *options, "-o", str(rows)])
    states, seen = Counter[str](), set()
    with rows.open("rb") as file:
        for line in file:
            row = json.loads(line)
            states[row["state"]] += 1
            seen.add(row["item"]["id"])
    rows.unlink()
    assert len(seen) == states.total()
    return states, cpu_s, mib


def undisturbed(base: Path, items: int, workers: int) -> list[str]:
    """A list from its making to its rows; a line of the table."""
    root = base / f"run-{items}"
    loop_s = measured([sys.executable, "-c", LOOP], listed(items))[1]
    init_s, init_mib = make(root, items)
    _, work_s = work(root, workers)
    status_s, told = counts(root)
    rows, gather_s, mib = gathered(root)
    assert rows["done"] == told["done"] == items
    page = root.with_suffix(".html")
    report_s = measured([*HPCTK, "report", str(root), "-o", str(page)])[1]
    inodes = sum(len(names) + len(files) for _, names, files in os.walk(root))
    shutil.rmtree(root)
    figures = (loop_s, init_s, work_s, status_s, gather_s, report_s)
    cells = [f"{items:,}", *(f"{seconds:.2f} s" for seconds in figures)]
    return [*cells, f"{init_mib:.0f} MiB", f"{mib:.0f} MiB", f"{inodes:,}"]


def crowded(base: Path, items: int, workers: int) -> list[str]:
    """Run a list with N workers and return a row of the table."""
    root = base / f"pool-{workers}"
    make(root, items)
    work_s, cpu_s = work(root, workers)
    assert counts(root)[1]["done"] == items
    cells = [str(workers), f"{work_s:.2f} s", f"{cpu_s:.2f} s", f"{1e6 * cpu_s / items:.0f} us"]
    return [*cells, f"{items / work_s:,.0f}"]


def stormy(base: Path, items: int, workers: int) -> str:
    """What became of a list whose workers were killed, in words."""
    root = base / "storm"
    make(root, items)
    kills = storm(root, workers)
    status_s, told = counts(root)
    rows, _, _ = gathered(root, "--partial")
    assert (rows["done"], rows["failed"]) == (told["done"], told["failed"]), (rows, told)
    work_s, _ = work(root, workers)
    assert gathered(root)[0] == {"done": items}
    return (
        f"{items:,} items and {kills} kills: `status --json` takes {status_s:.2f} s of processor "
        f"time directly after the last kill and counts {told['done']:,} items done, as the rows "
        f"do; the rest of the run takes {work_s:.1f} s, and every item has one row."
    )


def adding(base: Path, adders: int, batch: int) -> list[str]:
    """Add items by several processes at once while workers work; a row of the table."""
    each = _BATCHES * batch
    root, total = base / f"adders-{adders}", adders * each
    measured([*HPCTK, "init", str(root), "--items", "-", "--open", "--workload", NOOP])

    def add(adder: int) -> float:
        firsts = range(adder * each, (adder + 1) * each, batch)
        argv = [*HPCTK, "add", str(root), "--items", "-"]
        return sum(measured(argv, listed(batch, first))[1] for first in firsts)

    pool = subprocess.Popen([*HPCTK, "work", str(root), "--workers", str(_WORKERS)])
    with ended(pool), ThreadPoolExecutor(adders) as threads:
        began = time.perf_counter()
        cpu_s = sum(threads.map(add, range(adders)))
        added_s = time.perf_counter() - began
        measured([*HPCTK, "add", str(root), "--seal"])
        pool.wait()
        work_s = time.perf_counter() - began
    assert gathered(root)[0] == {"done": total}
    shutil.rmtree(root)
    cells = [str(adders), f"{total:,}", f"{added_s:.1f} s", f"{cpu_s:.1f} s"]
    return [*cells, f"{1e6 * cpu_s / total:.0f} us", f"{total / added_s:,.0f}", f"{work_s:.1f} s"]


def several_adders(base: Path, numbers: list[int], batch: int) -> list[str]:
    """The lines of the section about open lists."""
    head = ["adders", "items", "all added after", "processor time", "an item", "items/s"]
    rows = [adding(base, adders, batch) for adders in numbers]
    lists = max(numbers) * _BATCHES
    million = batch * lists * (lists - 1) / 2e6
    words = (
        "Each `add` reads the items that are in the list, to refuse duplicates. So the cost of an "
        f"item grows with the list: {max(numbers)} adders read {million:.0f} million items."
    )
    return [facts(base), "", *table([*head, "all done after"], rows), "", words]


def main() -> None:
    given = parser(__doc__)
    lists, pools = [1_000, 10_000, 100_000, 1_000_000], [1, 2, 4, 8, 16, 32, 64]
    given.add_argument("--sizes", type=number, nargs="*", default=lists, help="items of each list")
    given.add_argument("--workers", type=number, default=8, help="on each list")
    given.add_argument("--pools", type=number, nargs="*", default=pools, help="workers on one list")
    adders = [1, 2, 4, 8]
    given.add_argument("--adders", type=number, nargs="*", default=adders, help="to one list")
    given.add_argument("--batch", type=number, default=10_000, help="items added at once")
    given.add_argument("--dir", type=directory, help="where the runs are made")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    base = Path(tempfile.mkdtemp(dir=options.dir))
    sections: dict[str, list[str]] = {}
    try:
        if options.sizes:
            sections["Sizes"] = sizes(base, options)
        if options.adders:
            sections["Adders"] = several_adders(base, options.adders, options.batch)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    for title, lines in sections.items():
        if options.write:
            write_section(title, lines)
        print("\n".join(lines))


def sizes(base: Path, options: argparse.Namespace) -> list[str]:
    """The lines of the section about lists of several sizes."""
    rows = [undisturbed(base, items, options.workers) for items in options.sizes]
    words = stormy(base, max(options.sizes), options.workers)
    head = ["items", "loop of json", "init", "work", "status", "gather", "report"]
    head += ["memory of init", "of gather", "inodes"]
    lines = [facts(base), "", *table(head, rows), "", words]
    items = min(100_000, max(options.sizes))
    crowds = [crowded(base, items, workers) for workers in options.pools]
    head = ["workers", "work", "processor time", "an item", "items/s"]
    return [*lines, "", f"{items:,} items:", "", *table(head, crowds)]


if __name__ == "__main__":
    main()
