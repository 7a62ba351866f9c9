"""How long commands take to start, beside Python alone and a click program without any options.

    python benchmarks/startup.py [--rounds N] [--ranks N] [--write]

The commands take turns. ``hpctk status`` is that of a complete run of 60 items, printed to a file.
Wall and processor time are medians; the ratio is that of the processor times, because other
programs disturb it less.

Then, counted by strace: what the ranks of one host ask of the filesystem that holds Python and its
packages, from the start of ``hpctk work`` to its end, for no-ops and for a function whose module
imports torch (each rank does one item). The ranks are either children of one
command or commands of their own, as srun starts them. Bytes are the sizes of different files that
were opened: a host's cache holds them after the first rank.

Takes some minutes. Needs strace.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from arguments import number, parser
from operations import LISTED, NAMED
from resultsfile import facts, table, write_section
from throughput import NOOP

HPCTK = str(Path(sys.executable).with_name("hpctk"))
"""The installed command: ``python -m hpc_toolkit`` starts a few modules more."""
CLICK = """
import click
click.Command("empty", callback=lambda: None)()
"""
FUNCTIONS = {
    "no-ops": "import time\n",
    "a module that imports torch": "import time, torch\n",
}
FUNCTION = "def run(item):\n    time.sleep(1)\n    return {}\n"
"""Long enough that every rank has started before one has done all items."""
NAME = re.compile(r'^(\w+)\([^"]*"([^"]+)".* = (-?\d+)(?: (ENOENT))?')
"""A call with a name: of an open file it is empty, and its attributes are at hand."""


def measured(argv: list[str], where: Path) -> tuple[float, float]:
    """Wall and processor seconds of a command."""
    quiet = subprocess.DEVNULL
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, cwd=where, stdout=quiet, stderr=quiet, check=True)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def asked(traces: list[Path], run: Path) -> tuple[Counter[str], int]:
    """Calls with names outside of a run by kind, and bytes of the files that were opened."""
    calls: Counter[str] = Counter()
    opened: set[str] = set()
    for line in (one for path in traces for one in path.read_text(errors="replace").splitlines()):
        if str(run) in line or '"/proc/' in line or '"/sys/' in line or '"/dev/' in line:
            continue
        if line.startswith(LISTED):
            calls["listings"] += line.endswith(" = 0")
        elif (match := NAME.match(line)) is None:
            continue
        elif match[4]:
            calls["not found"] += 1
        elif match[1].startswith("open"):
            calls["files opened"] += 1
            opened.add(match[2])
        else:
            calls["other calls"] += 1
    return calls, sum(os.stat(one).st_size for one in opened if os.path.isfile(one))


def starts(where: Path, ranks: int) -> list[list[str]]:
    """A row for each function and way to start."""
    rows = []
    ways = {"1": [1], f"{ranks} of one command": [ranks], f"{ranks} commands": [1] * ranks}
    for module, (title, imports) in enumerate(FUNCTIONS.items()):
        (where / f"bench{module}.py").write_text(imports + FUNCTION)
        for way, commands in ways.items():
            run = f"run-{module}-{way.replace(' ', '-')}"
            # The first time compiles what is not compiled.
            calls, size = [traced(where, run + end, module, commands) for end in ("-0", "")][-1]
            kinds = ("files opened", "not found", "other calls", "listings")
            each = [f"{calls[one] / sum(commands):,.0f}" for one in kinds]
            rows.append([title, way, *each, f"{size / 2**20:,.0f} MiB"])
    return rows


def traced(where: Path, run: str, module: int, commands: list[int]) -> tuple[Counter[str], int]:
    """What commands with so many workers each ask."""
    items = ["--workload", f"bench{module}:run", "--count", str(sum(commands))]
    subprocess.run([HPCTK, "init", run, *items], cwd=where, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(where / "traces", ignore_errors=True)
    (where / "traces").mkdir()
    flags = ["-ff", "--seccomp-bpf", "-qqq", "-e", f"trace={','.join((*NAMED, *LISTED))}"]
    processes = [
        subprocess.Popen(
            [
                "strace",
                *flags,
                "-o",
                f"traces/{at}",
                HPCTK,
                "work",
                str(where / run),
                "--workers",
                str(workers),
            ],
            cwd=where,
            stdout=subprocess.DEVNULL,
        )
        for at, workers in enumerate(commands)
    ]
    for process in processes:
        if process.wait():
            message = f"hpctk work ended with {process.returncode}"
            raise RuntimeError(message)
    return asked(list((where / "traces").iterdir()), where / run)


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--rounds", type=number, default=30, help="starts of each command")
    given.add_argument("--ranks", type=number, default=8, help="of one host")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if shutil.which("strace") is None:
        given.error("strace(1) is not installed")
    commands = {
        "`python -c pass`": [sys.executable, "-c", "pass"],
        "`hpctk status RUN`": [HPCTK, "status", "run"],
        "`hpctk render`": [HPCTK, "render", "--nodes", "2"],
        "an empty click program": [sys.executable, "-c", CLICK],
    }
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch)
        init = [HPCTK, "init", "run", "--workload", NOOP, "--count", "60"]
        for argv in (init, [HPCTK, "work", "run", "--workers", "1"], *commands.values()):
            subprocess.run(argv, cwd=where, capture_output=True, check=True)
        rounds = [
            {name: measured(argv, where) for name, argv in commands.items()}
            for _ in range(options.rounds)
        ]
        of_ranks = starts(where, options.ranks)
    found = {
        name: [statistics.median(one[name][kind] for one in rounds) for kind in (0, 1)]
        for name in commands
    }
    alone_s = found["`python -c pass`"][1]
    rows = [
        [name, *(f"{1000 * one:.1f} ms" for one in (wall_s, cpu_s)), f"{cpu_s / alone_s:.1f}"]
        for name, (wall_s, cpu_s) in found.items()
    ]
    lines = [
        *table(["", "wall", "processor", "ratio"], rows),
        "",
        "Outside of the run, for each rank of a host; bytes for the host:",
        "",
        *table(
            ["", "ranks", "files opened", "not found", "other calls", "listings", "bytes"], of_ranks
        ),
    ]
    print("\n".join(lines))
    if options.write:
        write_section("Start-up", [facts(), "", *lines])


if __name__ == "__main__":
    main()
