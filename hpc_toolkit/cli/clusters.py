"""The commands that show what is known about clusters."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.quantities import format_mem, format_walltime

if TYPE_CHECKING:
    from hpc_toolkit.clusters import Cluster

_PANEL = "Slurm"

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = typer.Typer(help="Show what is known about clusters.", no_args_is_help=True)
    group.command("list")(list_clusters)
    group.command("show")(show)
    app.add_typer(group, name="cluster", rich_help_panel=_PANEL)


def list_clusters(as_json: JsonOption = False) -> None:
    """List the built-in clusters."""
    from hpc_toolkit.clusters import cluster_names, load_cluster

    found = [load_cluster(name) for name in cluster_names()]
    if as_json:
        print(json.dumps([{"name": one.name, "description": one.description} for one in found]))
        return
    width = max(len(one.name) for one in found)
    for one in found:
        print(f"{one.name:<{width}}  {one.description}")


def show(
    name: Annotated[str, typer.Argument(help="A name of 'hpctk cluster list' or a TOML file.")],
    as_json: JsonOption = False,
) -> None:
    """Show one cluster's facts, their source and when they were checked."""
    from hpc_toolkit.clusters import load_cluster

    cluster = load_cluster(name)
    if as_json:
        print(json.dumps(_record(cluster)))
        return
    width = max(len(key) for key, _ in _rows(cluster))
    for key, text in _rows(cluster):
        print(f"{key:<{width}}  {text}".rstrip())


def _record(cluster: Cluster) -> dict[str, Any]:
    record = asdict(cluster)
    for key in ("env", "defaults", "facts"):
        record[key] = dict(record[key])
    return record


def _rows(cluster: Cluster) -> list[tuple[str, str]]:
    """What the file says, in its own words; what it leaves open is left out."""
    rows = []
    for key, value in _record(cluster).items():
        if key == "partitions":
            rows += [(f"partition {p['name']}", _limits(p)) for p in value]
        elif isinstance(value, dict):
            rows += [(f"{key}.{name}", str(text)) for name, text in value.items()]
        elif key.endswith("_mib") and value is not None:
            rows.append((key.removesuffix("_mib"), format_mem(value)))
        elif key.endswith("_s") and value is not None:
            rows.append((key.removesuffix("_s"), format_walltime(value)))
        elif isinstance(value, bool):
            rows.append((key, "yes" if value else "no"))
        elif value not in (None, "", ()):
            rows.append((key, ", ".join(value) if isinstance(value, tuple) else str(value)))
    return rows


def _limits(partition: dict[str, Any]) -> str:
    nodes = f", {partition['nodes']} nodes" if partition["nodes"] else ""
    return f"up to {format_walltime(partition['max_walltime_s'])}{nodes}"
