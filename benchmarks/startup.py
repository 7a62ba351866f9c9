"""How long commands take to start, beside Python alone and a typer program without any options.

    python benchmarks/startup.py [--rounds N] [--write]

The commands take turns. ``hpctk status`` is that of a complete run of 60 items, printed to a file.
Wall and processor time are medians; the ratio is that of the processor times, because other
programs disturb it less.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arguments import number, parser
from resultsfile import facts, table, write_section
from throughput import NOOP

HPCTK = str(Path(sys.executable).with_name("hpctk"))
"""The installed command: ``python -m hpc_toolkit`` starts a few modules more."""
TYPER = """
import typer
app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(lambda: None)
app()
"""


def measured(argv: list[str], where: Path) -> tuple[float, float]:
    """Wall and processor seconds of a command."""
    quiet = subprocess.DEVNULL
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, cwd=where, stdout=quiet, stderr=quiet, check=True)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--rounds", type=number, default=30, help="starts of each command")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    commands = {
        "`python -c pass`": [sys.executable, "-c", "pass"],
        "`hpctk status RUN`": [HPCTK, "status", "run"],
        "`hpctk render`": [HPCTK, "render", "--nodes", "2"],
        "an empty typer program": [sys.executable, "-c", TYPER],
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
    found = {
        name: [statistics.median(one[name][kind] for one in rounds) for kind in (0, 1)]
        for name in commands
    }
    alone_s = found["`python -c pass`"][1]
    rows = [
        [name, *(f"{1000 * one:.1f} ms" for one in (wall_s, cpu_s)), f"{cpu_s / alone_s:.1f}"]
        for name, (wall_s, cpu_s) in found.items()
    ]
    lines = table(["", "wall", "processor", "ratio"], rows)
    print("\n".join(lines))
    if options.write:
        write_section("Start-up", [facts(), "", *lines])


if __name__ == "__main__":
    main()
