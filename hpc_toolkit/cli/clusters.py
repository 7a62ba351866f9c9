"""The commands that show, check and write what is known about clusters."""

from __future__ import annotations

import datetime as dt
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli.arguments import JsonOption, argument, complete_cluster, show, switch, value
from hpc_toolkit.cli.help import SLURM, Commands
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.allowlist import harmful
from hpc_toolkit.slurm.render.spec import OPTIONS, shown
from hpc_toolkit.system.quantities import format_mem, format_walltime
from hpc_toolkit.system.terminal import aligned, note, printable

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster


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
    name: Annotated[str, argument("NAME", "Name or TOML file.", complete=complete_cluster)],
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
    for warning in harmful(dict((*cluster.env, *cluster.nccl))):
        note(f"{cluster.file}: {warning}", "warning")
    record = {**_record(cluster), "origins": {key: str(at) for key, at in cluster.origins}}
    rows: list[tuple[str, ...]] = [*_rows(cluster)]
    if origin:
        origins = dict(cluster.origins)
        keys = ("partitions" if row[0].startswith("partition ") else row[0] for row in rows)
        rows = [(origins[key].file, *row) for key, row in zip(keys, rows, strict=True)]
    show(record, aligned(rows), as_json=as_json)


def init(
    name: Annotated[str, argument("NAME", "Name of the cluster.")],
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
