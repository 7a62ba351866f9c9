"""``hpctk scaling``: measure a training, and show what scaling costs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from hpc_toolkit.cli.arguments import argument, value
from hpc_toolkit.cli.help import TRAIN, Commands
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option, Panels, flag
from hpc_toolkit.system.quantities import format_duration, parse_counts
from hpc_toolkit.system.terminal import note, printable_lines

_TABLE = (
    flag("json", "Print JSON."),
    Option("samples", "Show time and cost of N samples. [default: 1000]", "N", least=1),
    Option("price_per_gpu_hour", "Price of a GPU.", "NUMBER", least=0),
    Option("min_efficiency", "Exit with 1 if a world size is less efficient.", "NUMBER", least=0),
)
"""Options of the results table, of ``run`` and ``analyze``."""
PANELS: Panels = {
    "Table": _TABLE,
    "Options": (
        Option("repeats", "Measurements of each world size.", "N", default=3, least=1),
        Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
        flag("resume", "Measure only what is missing in DIR."),
        flag("dry_run", "Show what would be measured."),
    ),
}


def register(app: Commands) -> None:
    group = Commands(
        "scaling",
        panel=TRAIN,
        help="""Measure how well training scales, and what it costs.

        Examples:
            hpctk scaling run -o scaling --world-sizes 1,2,4 -- train.py
            hpctk scaling analyze scaling
        """,
    )
    group.add(run, PANELS)
    group.add(analyze, {"Options": _TABLE})
    app.add_command(group)


def run(
    *,
    program: Annotated[list[str], argument("-- SCRIPT [ARGS]...", "Your training.")],
    out: Annotated[Path, value("DIR", "Directory for records and logs.", "--out", "-o")],
    world_sizes: Annotated[str, value("N,N", "Numbers of ranks.")] = "1,2,4",
    **given: Any,
) -> None:
    """Measure your training at several world sizes on this machine, and compare them.

    The training records its speed in three lines (hpc_toolkit.training.scaling.recorder). Prints
    the table of 'hpctk scaling analyze DIR', which also reads the logs of jobs.

    Examples:
        hpctk scaling run -o scaling --world-sizes 1,2 -- train.py --epochs 1
    """
    from hpc_toolkit.training.scaling.recorder import measure, prepare, read_records

    sizes = tuple(sorted(parse_counts(world_sizes, "--world-sizes", most=999_999)))
    table = {one.name: given[one.name] for one in _TABLE}
    directory = out.absolute()
    records = read_records(directory)
    missing = _unmeasured(directory, program, sizes, given["repeats"], records)
    if records and not given["resume"]:
        message = f"{directory} already contains measurements"
        hint = "--resume measures what is missing; or name another DIR"
        raise ConfigError(message, hint=hint)
    if given["dry_run"]:
        for size, repeat in missing:
            print(f"world size {size}, repeat {repeat}: {shlex.join(program)}")
        return
    # Otherwise one rank would compute with all CPUs of this machine and two with half of them
    # each, which does not measure scaling.
    threads = max(1, len(os.sched_getaffinity(0)) // max(sizes))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    prepare(directory)
    for size, repeat in missing:
        began = time.monotonic()
        measure(directory, program, size, repeat, backend=given["backend"])
        spent = format_duration(time.monotonic() - began)
        print(f"world size {size}, repeat {repeat}: {spent}", file=sys.stderr)
    where = shlex.quote(os.path.relpath(directory))
    note(f"'hpctk scaling analyze {where}' prints this table again")
    _show([directory], table)


def _unmeasured(
    out: Path,
    program: list[str],
    world_sizes: tuple[int, ...],
    repeats: int,
    records: list[dict[str, Any]],
) -> list[tuple[int, int]]:
    """Return the world sizes and repeats that have no record yet."""
    words = shlex.join(program[2:] if program[0] == "-m" else program[1:])
    if any(one["settings"].get("arguments") != words for one in records):
        message = f"{out} has measurements of another command"
        raise ConfigError(message, hint="give the same arguments, or name another DIR")
    known = {(one["world_size"], one["repeat"]) for one in records}
    # One repeat of all sizes after the other spreads the disturbance by other programs.
    pairs = ((size, repeat) for repeat in range(repeats) for size in world_sizes)
    return [pair for pair in pairs if pair not in known]


def analyze(
    *,
    source: Annotated[
        list[Path],
        argument(
            "SOURCE...",
            "Directory of 'scaling run' or of logs, or a .jsonl or .log file; - is stdin.",
        ),
    ],
    **given: Any,
) -> None:
    """Compare world sizes by speed, efficiency and cost, and recommend one.

    Examples:
        hpctk scaling analyze scaling
        hpctk scaling analyze slurm/logs --price-per-gpu-hour 2 > scaling.md
    """
    _show(source, given)


def _show(sources: Sequence[Path], table: dict[str, Any]) -> None:
    """Print the table of the sources; exit with 1 if an efficiency is below the wanted one."""
    from hpc_toolkit.training.scaling import analysis

    wanted = {name: value for name, value in table.items() if name != "json"}
    found = analysis.analyze(sources, **wanted)
    text = analysis.as_json(found) if table["json"] else analysis.as_markdown(found)
    sys.stdout.write(text if table["json"] else printable_lines(text))
    sys.stdout.flush()
    if table["min_efficiency"] is not None and any(one.below for one in found):
        sys.exit(1)
