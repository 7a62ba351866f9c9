"""Commands of trainings: launch starts the ranks of a script, scaling measures them."""

from __future__ import annotations

import gc
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from hpc_toolkit.cli.arguments import Argument, value
from hpc_toolkit.cli.help import TRAIN, Commands
from hpc_toolkit.cli.working import monitored
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.system.options import (
    Option,
    Panels,
    flag,
    launcher_option,
    only_given,
)
from hpc_toolkit.system.quantities import format_duration, parse_counts, parse_duration
from hpc_toolkit.system.ranks import RankInfo, in_step
from hpc_toolkit.system.terminal import note, printable_lines, show_error
from hpc_toolkit.training.launch import plan
from hpc_toolkit.training.launch.plan import Step

_FLAGS = ("run_path", "virtual_local_rank")
_START_TIMEOUT = f"{plan.START_TIMEOUT_S / 60:g}min"
PANELS: Panels = {
    "Options": (
        Option("run_dir", "Shared directory; required for several nodes.", "DIR"),
        Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
        Option("start_timeout", "Time to wait for all nodes.", "DURATION", default=_START_TIMEOUT),
        Option("monitor", "Log the load of this node in --run-dir.", "", variable="HPCTK_MONITOR"),
        flag("dry_run", "Show the commands for this node; start nothing."),
    ),
    "Ranks": (
        Option(
            "nproc_per_node", "N, gpu, cpu or auto. [default: 1; one per GPU in Slurm]", "N|KIND"
        ),
        Option("nnodes", "Number of nodes. [default: 1]", "NODES"),
        Option("node_rank", "Rank of this node, from 0.", "N"),
        Option("role", "Role of the ranks. [default: default]", "NAME", hidden=True),
        flag("module", "Treat SCRIPT as a module, like 'python -m'.", short="-m"),
        flag("no_python", "Treat SCRIPT as a program, not as Python."),
        Option("numa_binding", "node: bind each rank to the CPUs near its GPU.", "MODE"),
    ),
    "Rendezvous": (
        Option("master_addr", "Address of node 0. [default: read from --run-dir]", "HOST"),
        Option("master_port", "Port of node 0. [default: 29500 with an address]", "N"),
        Option("local_addr", "Address of this node.", "HOST", hidden=True),
        flag("standalone", "Run on this node only; the default.", hidden=True),
        Option("rdzv_endpoint", "Address and port of node 0, in one.", "HOST[:PORT]"),
        Option("rdzv_backend", "c10d or static.", "BACKEND", hidden=True),
        Option("rdzv_id", "Unique name of this launch; the same on all nodes.", "ID"),
    ),
    "Failures and signals": (
        Option("max_restarts", "Restart all ranks up to N times. [default: 0]", "N"),
        Option("shutdown_timeout", "Time for ranks to exit. [default: 30s]", "DURATION"),
    ),
    "Output": (
        Option("log_dir", "Directory of the ranks' logs. [default: logs/ in --run-dir]", "DIR"),
        Option("redirects", "Write to files: 1 stdout, 2 stderr, 3 both.", "STREAMS", short="-r"),
        Option("tee", "Write to files and the terminal. [default: 3]", "STREAMS", short="-t"),
        Option("local_ranks_filter", "Show only the output of these local ranks: 0,3.", "LIST"),
        *(Option(name, "Refused.", hidden=True) for name in plan.INSTEAD if name not in _FLAGS),
        *(flag(name, "Refused.", hidden=True) for name in _FLAGS),
    ),
}
"""Options of ``launch``: below the first panel those that torchrun has as well, in its longest
spelling."""
_TABLE = (
    flag("json", "Print JSON."),
    Option("price_per_gpu_hour", "Price of a GPU.", "NUMBER", least=0),
    Option("min_efficiency", "Exit with 1 if a world size is less efficient.", "NUMBER", least=0),
)
"""Options of the results table, of ``run`` and ``analyze``."""
_MEASURE: Panels = {
    "Table": _TABLE,
    "Options": (
        Option("repeats", "Measurements of each world size.", "N", default=3, least=1),
        Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
        flag("dry_run", "Show what would be measured."),
    ),
}


def register(app: Commands) -> None:
    settings = {
        # What follows the script is its own.
        "allow_interspersed_args": False,
        # torchrun takes --nproc_per_node as well.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
    app.add(launch, PANELS, panel=TRAIN, context_settings=settings)
    group = Commands(
        "scaling",
        panel=TRAIN,
        help="""Measure how well training scales, and what it costs.

        Examples:
            hpctk scaling run -o scaling --world-sizes 1,2,4 -- train.py
            hpctk scaling analyze scaling
        """,
    )
    group.add(run, _MEASURE)
    group.add(analyze, {"Options": _TABLE})
    app.add_command(group)


def launch(
    script: Annotated[str, Argument("SCRIPT", "Program of each rank.")],
    arguments: Annotated[
        list[str] | None, Argument("[ARGUMENTS]...", "Arguments of SCRIPT.")
    ] = None,
    **given: Any,
) -> None:
    """Start the ranks of a training script, like torchrun.

    Run it by srun to start the ranks on all nodes of a job; there it needs no rendezvous options.
    Exits with 75 if the ranks saved their state and exited with 75, otherwise with the code of the
    rank that failed first (128 + n for signal n).

    Examples:
        hpctk launch --nproc-per-node 4 train.py --lr 0.1
        srun hpctk launch --run-dir runs/train train.py
    """
    words = tuple(arguments or ())
    if (word := launcher_option(words)) is not None:
        message = f"{word} comes after the script, which would get it"
        name = shlex.quote(script)
        hint = f"hpctk launch {word} ... {name}; for the script: hpctk launch ... {name} -- {word}"
        raise ConfigError(message, hint=hint)
    run_dir, backend = given.pop("run_dir"), given.pop("backend")
    monitor = bool(given.pop("monitor"))
    if monitor and run_dir is None:
        raise ConfigError("--monitor needs --run-dir", hint="it writes below DIR/logs/")
    start_timeout, dry_run = given.pop("start_timeout"), given.pop("dry_run")
    of_torchrun = only_given(given)
    if "shutdown_timeout" in of_torchrun:
        of_torchrun["shutdown_timeout"] = parse_duration(
            of_torchrun["shutdown_timeout"], where="--shutdown-timeout", zero=True
        )
    request = plan.Request(
        script=script,
        # Without a "--" directly behind the script, which torchrun drops as well.
        arguments=tuple(words[1:] if words[:1] == ("--",) else words),
        options={name: value for name, value in of_torchrun.items() if value is not False},
        backend=backend,
        start_timeout_s=parse_duration(start_timeout, where="--start-timeout"),
        run_dir=Path(run_dir).absolute() if run_dir is not None else None,
    )
    gc.enable()
    if dry_run:
        _tell(request)
        return
    from hpc_toolkit.training.launch import launcher
    from hpc_toolkit.training.progress import summary

    paths = RunPaths(request.run_dir or Path())
    with monitored(paths, RankInfo.from_environ(), wanted=monitor):
        outcome = launcher.launch(request)
    if outcome.error is not None:
        if sys.stdout is not None:  # closed by the caller: >&-
            sys.stdout.flush()
        show_error(outcome.error)
    # In a job, the batch process logs how the step ended; of several nodes, the first reports.
    step = Step.from_environ()
    node = step.node if step is not None else request.options.get("node_rank")
    if not in_step(os.environ) and not node:
        note(summary(outcome, Path(run_dir) if run_dir is not None else None))
    # Nothing is left that taking down in good order would keep.
    gc.disable()
    sys.exit(outcome.code)


def _tell(request: plan.Request) -> None:
    """Print what would start here."""
    from hpc_toolkit.training.launch import launcher

    planned = launcher.planned(request)
    variables = launcher.surroundings(planned, os.environ)
    command = launcher.command(request)
    what = f"starts {planned.ranks} rank{'s' if planned.ranks != 1 else ''}"
    if planned.form == "task":
        what = f"becomes one of {planned.ranks} ranks that srun started"
    where = {
        "alone": "no other node",
        "directory": f"through {planned.run_dir}/rendezvous/{planned.launch}",
        "address": f"at {planned.host}:{planned.port}",
    }
    print(f"node      {planned.node_rank} of {planned.nodes}: {what}")
    print(f"meeting   {where[planned.meeting]}")
    print(f"backend   {planned.backend}")
    print(f"logs      {planned.log_dir or 'not kept'}")
    for name, text in sorted(variables.items()):
        print(f"variable  {name}={text}")
    print(f"command   {shlex.join(command)}")


def run(
    *,
    program: Annotated[list[str], Argument("-- SCRIPT [ARGS]...", "Your training.")],
    out: Annotated[Path, value("DIR", "Directory for records and logs.", "--out", "-o")],
    world_sizes: Annotated[str, value("N,N", "Numbers of ranks.")] = "1,2,4",
    **given: Any,
) -> None:
    """Measure your training at several world sizes on this machine, and compare them.

    The same command again measures what is missing in DIR.

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
        Argument(
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
    from hpc_toolkit.training import scaling

    wanted = {name: value for name, value in table.items() if name != "json"}
    found = scaling.analyze(sources, **wanted)
    text = scaling.as_json(found) if table["json"] else scaling.as_markdown(found)
    sys.stdout.write(text if table["json"] else printable_lines(text))
    sys.stdout.flush()
    if table["min_efficiency"] is not None and any(one.below for one in found):
        sys.exit(1)
