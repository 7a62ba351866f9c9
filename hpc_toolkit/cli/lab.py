"""The commands that start, use and end a private Slurm on this machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from hpc_toolkit.lab.lab import Lab
    from hpc_toolkit.lab.status import LabStatus

_PANEL = "Slurm"

NameOption = Annotated[str, typer.Option("--name", help="Which lab, where there are several.")]
DirOption = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Its directory, instead of one found by the name."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Node = Annotated[str, typer.Argument(help="Which node, such as n3.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(help="Run a private real Slurm on this machine.", no_args_is_help=True)
    rest = {"allow_extra_args": True, "ignore_unknown_options": True}
    for command in (up, down, env, status, crash, restore):
        group.command()(command)
    group.command("list")(list_labs)
    group.command(context_settings=rest)(sinfo)
    command_line = {**rest, "allow_interspersed_args": False}
    group.command(context_settings=command_line)(run)
    group.command("exec", context_settings=command_line)(execute)
    app.add_typer(group, name="lab", rich_help_panel=_PANEL)


def _lab(name: str, directory: Path | None) -> Lab:
    from hpc_toolkit.lab.directory import lab_paths
    from hpc_toolkit.lab.lab import Lab

    return Lab(lab_paths(name, directory))


def _which(name: str, directory: Path | None) -> str:
    """The options that name this lab again."""
    if directory is not None:
        return f" --dir {shlex.quote(str(directory))}"
    return "" if name == "lab" else f" --name {name}"


def up(
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 8,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs that each pretends to have.")] = 4,
    gpu_type: Annotated[str, typer.Option(help="What Slurm calls them.")] = "l40s",
    accounting: Annotated[
        bool, typer.Option("--accounting", help="Run slurmdbd and MariaDB too, so sacct answers.")
    ] = False,
    name: NameOption = "lab",
    directory: DirOption = None,
) -> None:
    """Start a lab and wait until its nodes are idle; a crashed one is cleaned up first."""
    from hpc_toolkit.lab.settings import LabSettings

    settings = LabSettings(nodes, gpus_per_node, gpu_type, accounting)
    lab = _lab(name, directory)
    began = time.monotonic()
    started = lab.up(settings)
    took = format_duration(time.monotonic() - began)
    when = f"up after {took}" if started else "already up"
    print(f"{settings.words}, {when}: {lab.paths.root}")
    for node in lab.status().crashed:
        print(
            f"note: {node} is crashed; 'hpctk lab restore {node}{_which(name, directory)}'"
            " brings it back",
            file=sys.stderr,
        )
    if os.geteuid() != 0:
        print("note: not started by root, so it takes the jobs of this user alone", file=sys.stderr)
    which = _which(name, directory)
    print(f'  eval "$(hpctk lab env{which})"')
    print("  sinfo")
    resources = f"--nodes {nodes}" + (f" --gpus-per-node {gpus_per_node}" if gpus_per_node else "")
    cluster = "lab" if settings.built_in else shlex.quote(str(lab.paths.cluster_file))
    print(f'  sbatch "$(hpctk render --cluster {cluster} {resources} --run RUN)"')
    print(f"  hpctk lab down{which}")


def down(name: NameOption = "lab", directory: DirOption = None) -> None:
    """End every process of a lab, its jobs too, and remove its files."""
    lab = _lab(name, directory)
    killed = lab.down()
    print(f"down, {killed} processes ended" if killed else f"no lab runs in {lab.paths.root}")


def env(name: NameOption = "lab", directory: DirOption = None) -> None:
    """Print what a shell needs to speak with a lab, for eval "$(hpctk lab env)"."""
    lab = _lab(name, directory)
    lab.check_up()
    print(f"export SLURM_CONF={shlex.quote(str(lab.paths.slurm_conf))}")
    from hpc_toolkit.lab.ports import LOOPBACK, own_address

    if (address := own_address()) != LOOPBACK:
        note = f"note: this machine's name means {address}, where nodes do not find an srun"
        print(f"{note}; run it by 'hpctk lab exec{_which(name, directory)}'", file=sys.stderr)


def execute(
    command: Annotated[list[str], typer.Argument(help="A command and its arguments.")],
    name: NameOption = "lab",
    directory: DirOption = None,
) -> None:
    """Run a command inside a lab, such as an interactive srun or a shell."""
    lab = _lab(name, directory)
    argv = lab.inside(command)
    sys.stdout.flush()
    os.execvpe(argv[0], argv, lab.environment())  # noqa: S606 - no shell is meant


def sinfo(context: typer.Context, name: NameOption = "lab", directory: DirOption = None) -> None:
    """Run sinfo in a lab; it gets all further options."""
    lab = _lab(name, directory)
    lab.check_up()
    sys.stdout.flush()
    os.execvpe("sinfo", ["sinfo", *context.args], lab.environment())  # noqa: S606 - no shell


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A job script.")],
    name: NameOption = "lab",
    directory: DirOption = None,
) -> None:
    """Submit a script with its arguments, print its log, and exit with the job's code."""
    from hpc_toolkit.lab.jobs import run_script

    lab = _lab(name, directory)
    lab.check_up()

    def show(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    end = run_script(lab, script, context.args, show, tell)
    if end is None:
        return
    tell(f"job {end.job}: {end.state} after {format_duration(end.seconds)}")
    if end.remark:
        tell(f"hint: {end.remark}")
    sys.exit(end.code)


def status(
    name: NameOption = "lab", directory: DirOption = None, as_json: JsonOption = False
) -> None:
    """Show how a lab stands; exit with 1 unless it is up."""
    now = _lab(name, directory).status()
    print(json.dumps(now.to_json()) if as_json else _line(now))
    sys.exit(0 if now.state == "up" else 1)


def list_labs(as_json: JsonOption = False) -> None:
    """List the labs that were started by name."""
    from hpc_toolkit.lab.directory import known_labs
    from hpc_toolkit.lab.lab import Lab

    found = {paths.root.name: Lab(paths).status() for paths in known_labs()}
    if as_json:
        print(json.dumps([{"name": name, **one.to_json()} for name, one in found.items()]))
        return
    width = max(map(len, found), default=0)
    for name, one in found.items():
        print(f"{name:<{width}}  {_line(one)}")


def _line(now: LabStatus) -> str:
    shape = f", {now.settings.words}, port {now.port}" if now.settings else ""
    lost = f", crashed: {', '.join(now.crashed)}" if now.crashed else ""
    gone = f", gone: {', '.join(now.gone)}" if now.gone and now.state != "down" else ""
    return f"{now.state}{shape}{lost}{gone}  {now.paths.root}"


def crash(
    node: Node,
    daemon_only: Annotated[
        bool, typer.Option("--daemon-only", help="Kill only its slurmd; its jobs run on.")
    ] = False,
    name: NameOption = "lab",
    directory: DirOption = None,
) -> None:
    """Lose a node as if its power failed: kill all its processes and tell Slurm it is down."""
    killed = _lab(name, directory).crash(node, daemon_only=daemon_only)
    print(f"{node}: {killed} processes killed")


def restore(node: Node, name: NameOption = "lab", directory: DirOption = None) -> None:
    """Start a crashed node again and wait until it takes jobs."""
    _lab(name, directory).restore(node)
    print(f"{node}: back")
