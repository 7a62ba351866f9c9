"""Items a second of the queue beside other queues, interleaved in one run.

    python benchmarks/throughput.py [--items 100000] [--workers 8] [--repeats 3] [--write]

Ours: ``hpctk work`` on Noop items of about 100 bytes of result, through the ordinary function path,
default units, synced per unit and at least twice a second; the start of all workers is included.
The others, those of benchmarks/peers.py that ``--peer-python`` has: the drain alone, without
start-up and without filling the queue. Every round runs all of them, each time in another order;
what they leave is deleted at the end of all, because ext4 searches past what was deleted in the
last minutes whenever a file is made. The package is compiled first, as an installation does.
``--write`` puts medians and ratios into benchmarks/results.md and benchmarks/throughput.svg.

Takes about 9 minutes by default, most of it in drains of others that are cut at the cap. Needs the
other queues: ``make bench`` installs them.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import directory, number, parser, seconds
from ending import end
from failures import Failure, tried
from picture import bars
from resultsfile import RESULTS, facts, table, write_section

if TYPE_CHECKING:
    from argparse import Namespace

HPCTK = [sys.executable, "-m", "hpc_toolkit"]
NOOP = "hpc_toolkit.science.workloads.synthetic:Noop"
OURS = "hpctk"
HERE = Path(__file__).parent
PEER_PYTHON = HERE.parent / ".venv" / "peers" / "bin" / "python"


def timed(argv: list[str], stdin: bytes = b"") -> tuple[float, bytes]:
    """Seconds that a command takes, and what it prints.

    Raises:
        RuntimeError: it failed.
    """
    began = time.perf_counter()
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            out, err = process.communicate(stdin)
        except BaseException:
            end(process)
            raise
    if process.returncode:
        last = (err.decode(errors="replace").splitlines() or [""])[-1]
        message = f"{last} (exit code {process.returncode} of {' '.join(argv[1:4])})"
        raise RuntimeError(message)
    return time.perf_counter() - began, out


def ours(root: Path, items: int, workers: int) -> dict[str, Any]:
    """One run of this project's queue; seconds and rates."""
    lines = "".join(json.dumps({"id": i, "pad": "x" * 75}) + "\n" for i in range(items))
    make = [*HPCTK, "init", str(root), "--items", "-", "--workload", NOOP]
    init_s, _ = timed(make, lines.encode())
    work_s, _ = timed([*HPCTK, "work", str(root), "--workers", str(workers)])
    status_s, out = timed([*HPCTK, "status", str(root), "--json"])
    rows = root.with_suffix(".jsonl")
    gather_s, _ = timed([*HPCTK, "gather", str(root), "-o", str(rows)])
    stage = json.loads(out)["stages"]["items"]
    with rows.open("rb") as file:
        gathered = sum(1 for _ in file)
    assert stage["done"] == gathered == items
    return {
        "items_per_s": items / work_s,
        "done": gathered,
        "twice": stage["duplicates"],
        "capped": False,
        "init_s": init_s,
        "work_s": work_s,
        "status_s": status_s,
        "gather_s": gather_s,
        "inodes": sum(len(names) + len(files) for _, names, files in os.walk(root)),
    }


def peer(name: str, root: Path, options: Namespace) -> dict[str, Any]:
    """One run of another queue."""
    argv = [str(options.peer_python), str(HERE / "peers.py"), name, "--dir", str(root)]
    argv += ["--items", str(options.items), "--workers", str(options.workers)]
    _, out = timed([*argv, "--cap", str(options.cap)])
    found: dict[str, Any] = json.loads(out.splitlines()[-1])  # servers talk on stdout as well
    return found


def installed(python: Path) -> dict[str, str]:
    """The other queues that an interpreter has, with their versions."""
    if not (python.is_file() and os.access(python, os.X_OK)):
        return {}
    found: dict[str, str] = json.loads(
        timed([str(python), str(HERE / "peers.py"), "--installed"])[1]
    )
    return found


def measure(
    options: Namespace, names: list[str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Failure]]:
    """All rounds, by queue; the queues take turns at being first. Another queue that fails is left
    out from then on."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, Failure] = {}
    base = Path(tempfile.mkdtemp(dir=options.dir))
    compileall.compile_dir(HERE.parent / "hpc_toolkit", quiet=1)
    try:
        for number in range(options.repeats):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if name in failed:
                    continue
                root = base / f"{name}-{number}"
                os.sync()  # what another queue wrote is not to be waited for
                if name == OURS:
                    one: dict[str, Any] | Failure = ours(root, options.items, options.workers)
                else:
                    one = tried(name, partial(peer, name, root, options))
                if isinstance(one, Failure):
                    failed[name] = one
                    continue
                found[name].append(one)
                turn = f"round {number + 1} of {options.repeats}"
                print(f"{turn}: {name} {one['items_per_s']:,.0f}/s", file=sys.stderr)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return {name: runs for name, runs in found.items() if name not in failed}, failed


def row(name: str, runs: list[dict[str, Any]], our_rate: float, items: int) -> list[str]:
    """A line of the table."""
    rates = [one["items_per_s"] for one in runs]
    rate = statistics.median(rates)
    capped = any(one["capped"] for one in runs)
    lost = max(items - one["done"] for one in runs)
    return [
        name + (", cut at the cap" if capped else ""),
        f"{rate:,.0f}",
        f"{min(rates):,.0f} to {max(rates):,.0f}",
        "" if name == OURS else f"{our_rate / rate:.1f}x",
        "" if capped else str(lost),
        str(max(one["twice"] for one in runs)),
    ]


def arguments() -> tuple[Namespace, dict[str, str]]:
    """What is to be measured, and the other queues that can be."""
    given = parser(__doc__)
    given.add_argument("--items", type=number, default=100_000, help="in each queue")
    given.add_argument("--workers", type=number, default=8, help="of each queue")
    given.add_argument("--repeats", type=number, default=3, help="rounds")
    given.add_argument("--cap", type=seconds, default=60.0, help="seconds that a drain may take")
    given.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="has other queues")
    given.add_argument("--peer", action="append", help="of those installed; default: all")
    given.add_argument("--dir", type=directory, help="where the queues are made")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    versions = installed(options.peer_python)
    if missing := sorted(set(options.peer or ()) - set(versions)):
        have = ", ".join(versions) or "none"
        given.error(f"--peer: {options.peer_python} has no {', '.join(missing)}; it has {have}")
    if not versions:
        print(f"ours alone: {options.peer_python} has no other queue", file=sys.stderr)
    return options, versions


def main() -> None:
    options, versions = arguments()
    names = [OURS, *(versions if options.peer is None else options.peer)]
    found, failed = measure(options, names)
    median = {
        name: statistics.median(one["items_per_s"] for one in runs) for name, runs in found.items()
    }
    titles = {name: f"{name} {versions.get(name, '')}".strip() for name in names}
    rows = [row(name, runs, median[OURS], options.items) for name, runs in found.items()]
    for line, name in zip(rows, found, strict=True):
        line[0] = line[0].replace(name, titles[name], 1)
    rows += [[titles[name], one.seen, *[""] * 4] for name, one in failed.items()]
    shown = {"init_s": "init {:.2f} s", "status_s": "`status --json` {:.2f} s"}
    shown |= {"gather_s": "gather {:.2f} s", "inodes": "{:.0f} inodes"}
    mine = [
        text.format(statistics.median(one[key] for one in found[OURS]))
        for key, text in shown.items()
    ]
    title = f"{options.items:,} no-op items, {options.workers} workers"
    lines = [
        facts(Path(options.dir or tempfile.gettempdir())),
        "",
        f"{title}; the queues run in turn, {options.repeats} rounds. The time of hpctk includes",
        "the start of its workers, the other times do not. A queue is stopped after",
        f"{options.cap:.0f} s.",
        "",
        *table(["queue", "items/s, median", "range", "hpctk is", "lost", "run twice"], rows),
        "",
        "In the same rounds: " + ", ".join(mine) + ".",
    ]
    if options.write:
        picture = bars(f"{title}: items/s", {titles[n]: median[n] for n in found}, "/s")
        RESULTS.with_name("throughput.svg").write_text(picture, encoding="utf-8")
        lines += ["", "![items a second of each queue](throughput.svg)"]
        write_section("Throughput", lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
