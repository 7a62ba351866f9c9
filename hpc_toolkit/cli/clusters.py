"""Commands about clusters: what is known of them, and a private Slurm on this machine."""

from __future__ import annotations

import datetime as dt
import os
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli.arguments import Argument, JsonOption, complete_cluster, show, switch, value
from hpc_toolkit.cli.help import SLURM, Commands
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.render.spec import OPTIONS, shown
from hpc_toolkit.system.quantities import counted, format_duration, format_mem, format_walltime
from hpc_toolkit.system.terminal import aligned, note, printable

if TYPE_CHECKING:
    from hpc_toolkit.lab import Lab
    from hpc_toolkit.lab.state import LabStatus
    from hpc_toolkit.slurm.clusters.facts import Cluster

NameOption = Annotated[str, value("NAME", "Name of the lab.")]
DirOption = Annotated[
    Path | None, value("DIR", "Directory of the lab, instead of --name.", "--dir", hidden=True)
]
_SLURM_HELP = "Root directory with another Slurm. [default: the installed one]"
Node = Annotated[str, Argument("NODE", "Name of the node, e.g. n3.")]


def register(app: Commands) -> None:
    group = Commands(
        "cluster",
        panel=SLURM,
        help="""Show and create descriptions of Slurm clusters.

        Examples:
            hpctk cluster list
            hpctk cluster init mysite --from-slurm
        """,
    )
    group.add(list_clusters, name="list")
    group.add(show_cluster, name="show")
    group.add(init, name="init")
    app.add_command(group)
    lab = Commands(
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
        lab.add(command)
    command_line = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    lab.add(execute, name="exec", context_settings=command_line)
    lab.add(crash)
    lab.add(restore)
    app.add_command(lab)


def list_clusters(as_json: JsonOption = False) -> None:
    """List known clusters and the files that describe them.

    Examples:
        hpctk cluster list
    """
    from hpc_toolkit.slurm.clusters.facts import cluster_names, load_cluster
    from hpc_toolkit.slurm.clusters.files import cluster_files

    files = cluster_files()
    found: list[dict[str, Any]] = []
    for name in cluster_names():
        try:
            known = {"description": load_cluster(name).description}
        except HpcToolkitError as error:
            known = {"error": error.message}
        own = [{"layer": one.layer, "file": one.file} for one in files if one.name == name]
        found.append({"name": name, **known, "files": own})
    rows: list[tuple[str, ...]] = []
    for one in found:
        layers = ", ".join(file["layer"] for file in one["files"])
        text = one["description"] if "description" in one else f"error: {one['error']}"
        rows.append((printable(one["name"]), layers, text))
    show(found, aligned(rows), as_json=as_json)


def show_cluster(
    name: Annotated[str, Argument("NAME", "Name or TOML file.", complete=complete_cluster)],
    origin: Annotated[bool, switch("--origin", "Print the file of each fact.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is known about a cluster, and where it comes from.

    An error names the first wrong value with its file and key.

    Examples:
        hpctk cluster show killarney
        hpctk cluster show mysite --origin
    """
    from hpc_toolkit.slurm.clusters.facts import load_cluster

    cluster = load_cluster(name)
    record = {**_record(cluster), "origins": {key: str(at) for key, at in cluster.origins}}
    rows: list[tuple[str, ...]] = [*_rows(cluster)]
    if origin:
        origins = dict(cluster.origins)
        keys = ("partitions" if row[0].startswith("partition ") else row[0] for row in rows)
        rows = [(origins[key].file, *row) for key, row in zip(keys, rows, strict=True)]
    show(record, aligned(rows), as_json=as_json)


def init(
    name: Annotated[str, Argument("NAME", "Name of the cluster.")],
    from_slurm: Annotated[bool, switch("--from-slurm", "Query Slurm; submits nothing.")] = False,
    out: Annotated[str | None, value("FILE", "File to write; - is stdout.", "-o", "--out")] = None,
    force: Annotated[bool, switch("--force", "Overwrite the file.")] = False,
) -> None:
    """Write a cluster file from the answers of Slurm.

    Comments in the file mark what Slurm does not know.

    Examples:
        hpctk cluster init mysite --from-slurm
    """
    from hpc_toolkit.slurm.clusters.draft import ask_slurm, draft
    from hpc_toolkit.slurm.clusters.files import write_draft

    if not from_slurm:
        msg = "only --from-slurm is known as a source"
        hint = "without Slurm here, start from a file that 'hpctk cluster list' names"
        raise ConfigError(msg, hint=hint)
    text = draft(name, ask_slurm(), dt.date.today())
    if out == "-":
        sys.stdout.write(text)
        return
    print(write_draft(name, text, out=out, force=force))


def _record(cluster: Cluster) -> dict[str, Any]:
    record = asdict(cluster)
    del record["origins"]
    for key in ("identify", "env", "nccl", "defaults", "facts"):
        record[key] = dict(record[key])
    for table in (record, *record["partitions"]):
        pairs = dict(table["defaults"]).items()
        table["defaults"] = {key: shown(key, one) if key in OPTIONS else one for key, one in pairs}
    record |= {key: {one.pop("name"): one for one in record[key]} for key in ("kinds", "qos")}
    for table in (*record["kinds"].values(), *record["qos"].values(), *record["partitions"]):
        keys = ("kinds", "gpus", "gres", "gpu_types")
        table |= {key: dict(table[key]) for key in keys if isinstance(table.get(key), tuple)}
    return record


def _rows(cluster: Cluster) -> list[tuple[str, str]]:
    """What the files say, by their keys."""
    record, rows = _record(cluster), []
    record["kinds"] = {kind.name: kind for kind in cluster.kinds}
    record["qos"] = {name: _limits(qos) for name, qos in record["qos"].items()}
    for key, _ in cluster.origins:
        table, _, inner = key.partition(".")
        if key == "partitions":
            rows += [(f"partition {p['name']}", _limits(p)) for p in record["partitions"]]
        elif inner:
            rows.append((key, str(record[table][inner])))
        else:
            rows.append((key, _shown(record, key)))
    return rows


def _shown(record: dict[str, Any], key: str) -> str:
    if f"{key}_mib" in record:
        return format_mem(record[f"{key}_mib"])
    if f"{key}_s" in record:
        return format_walltime(record[f"{key}_s"])
    value = record[key]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        form = "{0}={1}" if key == "defaults" else "{1} {0}"
        return ", ".join(form.format(*pair) for pair in value.items())
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _limits(partition: dict[str, Any]) -> str:
    said = [
        key for key, value in partition.items() if key != "name" and value not in (None, False, {})
    ]
    keys = [key.removesuffix("_mib").removesuffix("_s") for key in said]
    return ", ".join(f"{key} {_shown(partition, key)}" for key in keys)


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
    command: Annotated[list[str], Argument("COMMAND...", "Command to run.")],
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
