"""Many iterations of one measurement on local workers, some of which fail: what does each cost?

    python benchmarks/iterated.py [--items 500] [--workers 10] [--seconds 0.1] [--write]

The work of docs/how-to/iterated-benchmarks.md: batches of 10, 3 attempts, the monitor.
In one run 1 item of 20 fails at its first attempt, one hangs there until its
time of 5 s is over, and one kills its worker by SIGKILL. That run is verified.
Beside it, in turns: the same without faults and monitor, and the same by a
process pool of Python, which writes nothing down. When executions began is told by the items
themselves. Exit code 0 if every result is there, was verified, and is equal in all runs.

Takes about a minute on an idle machine, most of it asleep. Needs the package with its extra
``monitor``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import number, parser, seconds
from resultsfile import facts, table, write_section
from tracefile import Execution, Trace

from examples.iterated import Item, Iterations
from hpc_toolkit.run import Run
from hpc_toolkit.system.processes import parent_of

TITLE = "An iterated benchmark"
TIMEOUT_S = 5.0
BATCH = 10
FLAKY = 20
HERE = Path(__file__).parent

Numbers = dict[int, tuple[float, float]]


class Troubled(Iterations):
    """Iterations that note when they run, and of which some fail at their first attempt.

    Args:
        notes: directory for the trace and for what was tried before.
    """

    def __init__(self, *, notes: str, **options: Any) -> None:
        super().__init__(**options)
        self._notes = Path(notes)

    def measure(self, item: Item, batch: int) -> Item:
        self._note("start", item)
        value = super().measure(item, batch)
        if "how" in item and self._is_first(item):
            if item["how"] == "kill":
                os.kill(parent_of(os.getppid())[0], signal.SIGKILL)
            if item["how"] != "fail":
                time.sleep(3600)
            self._note("end", item)
            message = "the license server did not answer"
            raise ConnectionError(message)
        self._note("end", item)
        return value

    def _is_first(self, item: Item) -> bool:
        try:
            (self._notes / f"tried-{item['seed']}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _note(self, what: str, item: Item) -> None:
        worker, _ = parent_of(os.getppid())
        line = f"{what} {item['seed']} {os.getpid()} {worker} {time.time():.6f}\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        fd = os.open(self._notes / "trace", flags, 0o666)
        os.write(fd, line.encode())
        os.close(fd)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is to be done."""

    items: int
    workers: int
    seconds: float
    """Of one iteration."""


def plain_items(size: Size) -> list[Item]:
    return [{"seed": seed} for seed in range(size.items)]


def troubled_items(size: Size) -> list[Item]:
    """One of 20 fails, one hangs and one kills; in no order, and always the same ones."""
    items = plain_items(size)
    hang, kill, *fail = random.Random(0).sample(range(size.items), size.items // FLAKY + 2)
    for seed, how in ((hang, "hang"), (kill, "kill"), *((seed, "fail") for seed in fail)):
        items[seed]["how"] = how
    return items


def hpctk(*argv: object) -> str:
    """What a command prints; its errors are shown, and end this program."""
    command = [sys.executable, "-m", "hpc_toolkit", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
    if done.returncode:
        sys.exit(f"hpctk {' '.join(map(str, argv))} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def create(run: Path, items: list[Item], size: Size) -> None:
    notes = run.parent / f"{run.name}-notes"
    notes.mkdir()
    lines = run.parent / f"{run.name}.jsonl"
    lines.write_text("".join(json.dumps(item) + "\n" for item in items))
    options = (f"notes={notes}", f"batch={BATCH}", f"seconds={size.seconds}")
    hpctk(
        *("init", run, "--workload", "iterated:Troubled", "--items", lines, "--max-attempts", 3),
        *("--timeout", f"{TIMEOUT_S:g}s"),
        *(word for option in options for word in ("--option", option)),
    )


def worked(run: Path, size: Size, *options: object) -> float:
    """Seconds that 'hpctk work' took, its own start included."""
    began = time.monotonic()
    hpctk("work", run, "--workers", size.workers, *options)
    return time.monotonic() - began


def pooled(size: Size, root: Path) -> float:
    """Seconds that a process pool takes, which keeps its results in memory."""
    (root / "pool-notes").mkdir()
    measure = Troubled(notes=str(root / "pool-notes"), seconds=size.seconds).measure
    items = plain_items(size)
    began = time.monotonic()
    with ProcessPoolExecutor(size.workers) as pool:
        found = list(pool.map(measure, items, [BATCH] * len(items)))
    took = time.monotonic() - began
    assert len(found) == size.items
    return took


def numbers_of(run: Path) -> Numbers:
    """Of each seed; the size of a batch depends on what else was left."""
    rows = Run.open(str(run)).results()
    return {
        row["item"]["seed"]: (row["value"]["mean"], row["value"]["spread"])
        for row in rows
        if row["state"] == "done"
    }


def executions(run: Path) -> dict[int, list[Execution]]:
    """Of each seed, in their order."""
    trace = Trace(run.parent / f"{run.name}-notes" / "trace")
    trace.poll()
    found: dict[int, list[Execution]] = {}
    for one in trace.executions:
        found.setdefault(one.item, []).append(one)
    return found


def fault_rows(run: Path, items: list[Item]) -> list[list[str]]:
    """What each kind of fault cost, as the items told it."""
    ran = executions(run)
    rows = []
    told = {
        "fail": "first attempts that fail",
        "hang": f"an item that hangs, with --timeout {TIMEOUT_S:g}s",
        "kill": "a worker killed by SIGKILL",
    }
    for how, what in told.items():
        mine = [ran[item["seed"]] for item in items if item.get("how") == how]
        until = [again.started - (first.ended or first.started) for first, again, *_ in mine]
        lost = sum((first.ended or again.started) - first.started for first, again, *_ in mine)
        middle, most = statistics.median(until), max(until)
        waits = f"{middle:.2f} s" if len(mine) == 1 else f"{middle:.2f} s (at most {most:.2f} s)"
        rows.append([what, str(len(mine)), waits, f"{lost:.2f} s"])
    calm = [of for of in (ran[item["seed"]] for item in items if "how" not in item) if len(of) > 1]
    again_s = sum((one.ended or one.started) - one.started for of in calm for one in of[1:])
    rows.append(["others that ran again", str(len(calm)), "", f"{again_s:.2f} s"])
    return rows


def measure(size: Size, root: Path) -> tuple[list[str], bool]:
    """The lines of the section, and whether all was as it must be."""
    items = troubled_items(size)
    create(root / "calm", plain_items(size), size)
    create(root / "full", items, size)
    pool_s = pooled(size, root)
    calm_s = worked(root / "calm", size)
    kept = ("--monitor",)
    full_s = worked(root / "full", size, *kept)
    faults = fault_rows(root / "full", items)
    truth = numbers_of(root / "full")
    deaths = json.loads(hpctk("status", root / "full", "--json"))["deaths"]
    (log,) = (root / "full" / "logs").glob("monitor-*.jsonl")
    sampled = log.read_text().count('"type":"sample"')
    whole = len(truth) == size.items and truth == numbers_of(root / "calm") and deaths == 1
    ideal_s = size.items * size.seconds / size.workers
    lines = [
        f"{size.items} items of {size.seconds:g} s on {size.workers} workers take at least",
        f"{ideal_s:.1f} s.",
        "",
        *table(
            ["run", "seconds", "relative to the pool"],
            [
                ["process pool of Python, nothing written", f"{pool_s:.1f}", "1.00"],
                ["hpctk, no fault", f"{calm_s:.1f}", f"{calm_s / pool_s:.2f}"],
                ["hpctk, faults, monitor", f"{full_s:.1f}", f"{full_s / pool_s:.2f}"],
            ],
        ),
        "",
        *table(["fault", "items", "until it ran again", "time lost"], faults),
        "",
        "Until it ran again: from the end of the attempt, or from its start if it did not end.",
        f"{len(truth)} items have a result. The monitor took {sampled} samples.",
    ]
    return lines, whole


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--items", type=number, default=500, help="iterations, at least 100")
    args.add_argument("--workers", type=number, default=10, help="local workers")
    args.add_argument("--seconds", type=seconds, default=0.1, help="how long an iteration takes")
    args.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    given = args.parse_args()
    if given.items < 100 or given.seconds >= TIMEOUT_S / 2:
        args.error("at least 100 items, each well within the time limit")
    size = Size(items=given.items, workers=given.workers, seconds=given.seconds)
    with tempfile.TemporaryDirectory(prefix="iterated-") as directory:
        head = facts(Path(directory))
        lines, good = measure(size, Path(directory))
    print("\n".join(lines))
    if given.write:
        write_section(TITLE, ["", head, "", *lines])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
