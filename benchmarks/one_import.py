"""What the workers of a node need until all have an item whose module imports torch and others.

    python benchmarks/one_import.py [--workers 1 8] [--imports torch] [--write]

For each number of workers, all children of one command: the seconds until the first and the last
worker has begun an item, the memory of all their processes at that time (the sum of PSS in
smaps_rollup, proc(5)), the seconds from SIGKILL of an executor until the next one has begun its
item, and, from a run of its own under strace(1), the system calls that name a file or list a
directory outside of the run, /proc, /sys and /dev.

Takes about half a minute for each number. Needs strace.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from arguments import number, parser
from ending import ended, family
from operations import LISTED, NAMED
from resultsfile import facts, table, write_section
from startup import asked

HPCTK = [sys.executable, "-m", "hpc_toolkit"]
FUNCTION = """
import os, time
{imports}
def run(item):
    with open(f"{where}/{{os.getpid()}}", "w") as file:
        print(time.time(), file=file)
    while not os.path.exists("{where}/end"):
        time.sleep(0.01)
"""
IMPORTS = ("torch", "sklearn.ensemble", "transformers.AutoModelForCausalLM")


def begun(where: Path) -> dict[int, float]:
    """When the process of each executor has begun its item."""
    found = {}
    for path in where.glob("[0-9]*"):
        with suppress(ValueError):  # it is being written
            found[int(path.name)] = float(path.read_text())
    return found


def wait_for_items(where: Path, count: int, of: subprocess.Popen[bytes]) -> dict[int, float]:
    while len(found := begun(where)) < count:
        if of.poll() is not None:
            message = f"hpctk work ended with {of.returncode}"
            raise RuntimeError(message)
        time.sleep(0.005)
    return found


def memory_mib(pids: list[int]) -> float:
    """Memory of processes; what some of them share counts once."""
    kib = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        kib += int(text.partition("\nPss:")[2].split(maxsplit=1)[0])
    return kib / 1024


def start(where: Path, workers: int, imports: list[str]) -> Path:
    """A new run of an item for each worker, and where they note their beginning."""
    notes = where / "notes"
    for path in (notes, where / "run"):
        shutil.rmtree(path, ignore_errors=True)
    notes.mkdir()
    lines = [
        f"from {one.rpartition('.')[0]} import {one.rpartition('.')[2]}"
        if one.rpartition(".")[2][:1].isupper()
        else f"import {one}"
        for one in imports
    ]
    (where / "bench.py").write_text(FUNCTION.format(imports="\n".join(lines), where=notes))
    options = ["--workload", "bench:run", "--count", str(workers), "--items-per-claim", "1"]
    quiet = subprocess.DEVNULL
    subprocess.run([*HPCTK, "init", "run", *options], cwd=where, check=True, stdout=quiet)
    return notes


def measured(where: Path, workers: int, imports: list[str]) -> list[str]:
    """A row of the table."""
    notes = start(where, workers, imports)
    since = time.time()
    argv = [*HPCTK, "work", "run", "--workers", str(workers)]
    with ended(process := subprocess.Popen(argv, cwd=where)):
        first = wait_for_items(notes, workers, process)
        pss = memory_mib(family(process.pid))
        killed = next(iter(first))
        killed_at = time.time()
        os.kill(killed, signal.SIGKILL)
        again = wait_for_items(notes, workers + 1, process)
        restart_s = max(again.values()) - killed_at
        (notes / "end").touch()
        process.wait()
    times = [one - since for one in first.values()]
    return [f"{min(times):.1f} s", f"{max(times):.1f} s", f"{pss:,.0f} MiB", f"{restart_s:.2f} s"]


def operations(where: Path, workers: int, imports: list[str]) -> int:
    """System calls with a file's name until all have an item, and until their end."""
    notes = start(where, workers, imports)
    shutil.rmtree(where / "traces", ignore_errors=True)
    (where / "traces").mkdir()
    calls = ",".join((*NAMED, *LISTED))
    argv = ["strace", "-ff", "--seccomp-bpf", "-qqq", "-e", f"trace={calls}", "-o", "traces/t"]
    argv += [*HPCTK, "work", "run", "--workers", str(workers)]
    with ended(process := subprocess.Popen(argv, cwd=where)):
        wait_for_items(notes, workers, process)
        (notes / "end").touch()
        process.wait()
    counts, _ = asked([*(where / "traces").iterdir()], where / "run")
    return sum(counts.values())


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--workers", type=number, nargs="+", default=[1, 4, 8, 16])
    given.add_argument("--imports", nargs="+", default=[*IMPORTS], help="what the module imports")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if shutil.which("strace") is None:
        given.error("strace(1) is not installed")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        operations(where, 1, options.imports)  # compiles what is not compiled
        for workers in options.workers:
            row = measured(where, workers, options.imports)
            rows.append([str(workers), f"{operations(where, workers, options.imports):,}", *row])
            print(rows[-1], flush=True)
    head = ["workers", "file operations", "first item", "last first item", "memory", "restart"]
    lines = table(head, rows)
    print("\n".join(lines))
    if options.write:
        write_section("One import per node", [facts(), "", *lines])


if __name__ == "__main__":
    main()
