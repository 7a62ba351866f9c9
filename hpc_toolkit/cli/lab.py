"""The commands that start, use and end a private Slurm on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hpc_toolkit.cli.arguments import JsonOption, argument, show, switch, value
from hpc_toolkit.cli.help import SLURM, Commands
from hpc_toolkit.system.quantities import counted, format_duration
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.lab import Lab
    from hpc_toolkit.lab.state import LabStatus

NameOption = Annotated[str, value("NAME", "Name of the lab.")]
DirOption = Annotated[
    Path | None, value("DIR", "Directory of the lab, instead of --name.", "--dir", hidden=True)
]
_SLURM_HELP = "Root directory with another Slurm. [default: the installed one]"
Node = Annotated[str, argument("NODE", "Name of the node, e.g. n3.")]


def register(app: Commands) -> None:
    group = Commands(
        "lab",
        panel=SLURM,
        help="""Run a private Slurm on this machine.

        Examples:
            hpctk lab up --nodes 4
            eval "$(hpctk lab env)"
            hpctk lab down
        """,
    )
    for command in (up, env, status, down):
        group.add(command)
    command_line = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    group.add(execute, name="exec", context_settings=command_line)
    group.add(crash)
    group.add(restore)
    app.add_command(group)


def _lab(name: str, directory: Path | None) -> Lab:
    from hpc_toolkit.lab import Lab
    from hpc_toolkit.lab.settings import lab_paths

    return Lab(lab_paths(name, directory))


def _which(name: str, directory: Path | None) -> str:
    """The options that name this lab again."""
    if directory is not None:
        return f" --dir {shlex.quote(str(directory))}"
    return "" if name == "lab" else f" --name {name}"


def up(
    nodes: Annotated[int, value("N", "Number of nodes.")] = 8,
    gpus_per_node: Annotated[int, value("N", "Pretended GPUs per node.")] = 4,
    gpu_type: Annotated[str, value("TYPE", "Type of the GPUs.")] = "l40s",
    accounting: Annotated[bool, switch("--accounting", "Also run slurmdbd, for sacct.")] = False,
    slurm: Annotated[str | None, value("DIR", _SLURM_HELP)] = None,
    name: NameOption = "lab",
    directory: DirOption = None,
) -> None:
    """Start a lab and wait until its nodes are idle.

    Cleans up after a crashed lab first.

    Examples:
        hpctk lab up
        hpctk lab up --nodes 2 --gpus-per-node 8 --accounting
        hpctk lab up --slurm ./trixie
    """
    from hpc_toolkit.lab.commands import find_root
    from hpc_toolkit.lab.settings import LabSettings

    settings, lab = LabSettings(nodes, gpus_per_node, gpu_type, accounting), _lab(name, directory)
    if slurm is not None:
        settings = replace(settings, root=str(find_root(slurm)))
    began = time.monotonic()
    started = lab.up(settings)
    took = format_duration(time.monotonic() - began)
    when = f"up after {took}" if started else "already up"
    print(f"{settings.words}, {when}: {lab.paths.root}")
    which = _which(name, directory)
    for node in lab.status().crashed:
        note(f"{node} is crashed; 'hpctk lab restore {node}{which}' brings it back")
    if os.geteuid() != 0:
        note("not started by root, so it only accepts jobs of this user")
    print(f'  eval "$(hpctk lab env{which})"')
    print("  sinfo")
    resources = f"--nodes {nodes}" + (f" --gpus-per-node {gpus_per_node}" if gpus_per_node else "")
    cluster = "lab" if settings.built_in else shlex.quote(str(lab.paths.cluster_file))
    print(f'  sbatch "$(hpctk render --cluster {cluster} {resources} --run RUN)"')
    print(f"  hpctk lab down{which}")


def down(name: NameOption = "lab", directory: DirOption = None) -> None:
    """Stop a lab and its jobs, and remove its files.

    Examples:
        hpctk lab down
    """
    lab = _lab(name, directory)
    killed = lab.down()
    print(
        f"down, {counted(killed, 'process')} ended"
        if killed
        else f"no lab runs in {lab.paths.root}"
    )


def env(name: NameOption = "lab", directory: DirOption = None) -> None:
    """Print the shell commands that point Slurm's commands at a lab.

    Examples:
        eval "$(hpctk lab env)"
    """
    from hpc_toolkit.lab.commands import user_path

    lab = _lab(name, directory)
    root = lab.check_up().settings.root
    print(f"export SLURM_CONF={shlex.quote(str(lab.paths.slurm_conf))}")
    path = os.pathsep.join([*([str(lab.paths.clients)] if root else []), *user_path()])
    if path != os.environ.get("PATH", os.defpath):
        print(f"export PATH={shlex.quote(path)}")
    if root:
        return
    from hpc_toolkit.lab.daemons import own_address
    from hpc_toolkit.lab.settings import LOOPBACK

    if (address := own_address()) != LOOPBACK:
        problem = f"this machine's name resolves to {address}, where nodes cannot reach srun"
        note(f"{problem}; run it by 'hpctk lab exec{_which(name, directory)}'")


def execute(
    command: Annotated[list[str], argument("COMMAND...", "Command to run.")],
    name: NameOption = "lab",
    directory: DirOption = None,
) -> None:
    """Run a command in a lab, such as srun or a shell.

    Examples:
        hpctk lab exec srun -N2 hostname
        hpctk lab exec sbatch --wait slurm/work-queue.sbatch
    """
    from hpc_toolkit.lab.commands import environment

    lab = _lab(name, directory)
    argv = lab.inside(command)
    sys.stdout.flush()
    os.execvpe(argv[0], argv, environment(lab.paths))  # noqa: S606 - no shell is meant


def status(
    name: NameOption = "lab", directory: DirOption = None, as_json: JsonOption = False
) -> None:
    """Show the state of a lab. Exits with 1 if it is not up.

    Examples:
        hpctk lab status
    """
    now = _lab(name, directory).status()
    show(now.to_json(), [_line(now)], as_json=as_json)
    sys.exit(0 if now.state == "up" else 1)


def _line(now: LabStatus) -> str:
    slurm = f", Slurm {now.slurm}" if now.slurm else ""
    shape = f", {now.settings.words}{slurm}, port {now.port}" if now.settings else ""
    lost = f", crashed: {', '.join(now.crashed)}" if now.crashed else ""
    gone = f", gone: {', '.join(now.gone)}" if now.gone and now.state != "down" else ""
    return f"{now.state}{shape}{lost}{gone}  {now.paths.root}"


def crash(
    node: Node,
    daemon_only: Annotated[bool, switch("--daemon-only", "Kill slurmd alone.")] = False,
    name: NameOption = "lab",
    directory: DirOption = None,
) -> None:
    """Make a node fail: kill its processes and mark it down.

    Examples:
        hpctk lab crash n3
    """
    killed = _lab(name, directory).crash(node, daemon_only=daemon_only)
    print(f"{node}: {counted(killed, 'process')} killed")


def restore(node: Node, name: NameOption = "lab", directory: DirOption = None) -> None:
    """Restart a crashed node and wait until it accepts jobs.

    Examples:
        hpctk lab restore n3
    """
    _lab(name, directory).restore(node)
    print(f"{node}: back")
