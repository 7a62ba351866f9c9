"""``hpctk render kubernetes-...``: manifests, which take other options than job scripts."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from hpc_toolkit.cli.arguments import argument
from hpc_toolkit.cli.help import HelpCommand, parameters
from hpc_toolkit.cli.scriptoptions import ScriptCommand, read_variable
from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.options import Option, flag, many, only_given
from hpc_toolkit.system.quantities import parse_counts

if TYPE_CHECKING:
    from hpc_toolkit.engines.kubernetes import Kind
    from hpc_toolkit.system.options import Panels

_MOST_PODS = 100_000
PANELS: Panels = {
    "Resources": (
        Option("image", "Image of the pods, with hpctk installed. Required.", "IMAGE"),
        Option("nodes", "Number of pods. [default: 1]", "N"),
        Option("node_counts", "Numbers of pods to compare. [default: 1,2,4]", "N,N"),
        Option("gpus_per_node", "GPUs of each pod. [default: 0]", "N"),
        Option("gpu_resource", "Resource name of a GPU. [default: nvidia.com/gpu]", "NAME"),
        Option("cpus", "CPUs of each pod, as request and limit.", "N"),
        Option("mem", "Memory of each pod, as request and limit; 480G is 480Gi.", "SIZE"),
        Option("shm", "Size of /dev/shm, a part of --mem. [default: 2G; queue: 64 MiB]", "SIZE"),
    ),
    "Storage": (
        many("pvc", "PersistentVolumeClaim (ReadWriteMany) and its mount point", "NAME[:/DIR]"),
        Option("run", "Run directory, or output directory of a training, on a volume.", "DIR"),
        Option("user", "User of the containers. [default: 1000:1000]", "UID[:GID]"),
    ),
    "Program": (
        many("env", "Set this variable", "NAME=VALUE"),
        many("env_from_secret", "Set this variable from a key of a Secret", "NAME=SECRET:KEY"),
        Option("workers", "Workers of each pod. [default: one per GPU]", "N"),
        Option("max_restarts", "Failed pods to replace. [default: 10]", "N"),
        Option("time", "Time limit of the Job, e.g. 12h or 12:00:00.", "DURATION"),
    ),
    "Placement": (
        Option("job_name", "Name of the Job and the file. [default: TEMPLATE]"),
        Option("namespace", "Namespace. [default: kubectl's current one]"),
        many("image_pull_secret", "Secret to pull the image with", "NAME"),
        many("node_selector", "Label that nodes must have", "KEY=VALUE"),
        many("toleration", "Taint that nodes may have", "KEY[=VALUE][:EFFECT]"),
        Option("queue_name", "LocalQueue of Kueue that admits the Job.", "NAME"),
    ),
    "Output": (
        Option("out", "Write FILE; - prints the manifest.", "FILE", short="-o"),
        flag("force", "Overwrite an edited manifest."),
    ),
}
"""Every option of a manifest, by the panel of the help that shows it."""

TEMPLATES = {
    "kubernetes-queue": """Write an Indexed Job whose pods work on a run; print the file's path.

    All pods share a volume with the run: create it there with 'hpctk init'. An evicted pod leaves
    its items to the others and is replaced.

    Examples:
        hpctk render kubernetes-queue --image IMAGE --nodes 4 --pvc data --run /data/eval
    """,
    "kubernetes-ddp": """Write a Job and a Service for a training; print the file's path.

    Each pod is a node of 'hpctk launch'. A lost pod is replaced. A pod whose script fails ends all
    pods.

    Examples:
        hpctk render kubernetes-ddp --image IMAGE --nodes 2 --gpus-per-node 4 -- train.py
    """,
    "kubernetes-scaling": """Write a Job that measures a training on several numbers of pods.

    The log of its first pod ends with the table of 'hpctk scaling run'. The words after -- are
    options of that command.

    Examples:
        hpctk render kubernetes-scaling --image IMAGE --node-counts 1,2,4 --gpus-per-node 4
    """,
}


class RenderCommand(ScriptCommand):
    """``hpctk render``: manifests where the first word is one of their templates, else scripts."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Hand the words on to the command of the manifest that the first of them names."""
        word, *rest = args or [""]
        if not word.startswith("kubernetes"):
            return super().make_context(info_name, args, parent, **extra)
        if word not in TEMPLATES:
            raise ConfigError(f"unknown template: {word!r}", hint=near_miss(word, list(TEMPLATES)))
        command = manifest_command(cast("Kind", word))
        return command.make_context(f"{info_name} {word}", rest, parent, **extra)


def manifest_command(kind: Kind) -> HelpCommand:
    from hpc_toolkit.engines.kubernetes import KINDS, ONLY_OF

    panels = {
        panel: tuple(one for one in group if kind in ONLY_OF.get(one.name, KINDS))
        for panel, group in PANELS.items()
    }
    words = argument("[-- SCRIPT ARGS...]", "Training script, or options of 'scaling run'.")
    arguments = {"command": Annotated[list[str] | None, words]}
    return HelpCommand(
        kind,
        callback=partial(_write, kind),
        params=parameters(panels, arguments if kind in ONLY_OF["command"] else {}),
        help=TEMPLATES[kind],
    )


def _write(kind: Kind, *, out: str | None, force: bool | None, **given: Any) -> None:
    from hpc_toolkit.engines.kubernetes import ManifestSpec, render_manifest

    values = only_given(given)
    if "env" in values:
        values["env"] = tuple(map(read_variable, values["env"]))
    if "node_counts" in values:
        counts = parse_counts(values["node_counts"], "--node-counts", most=_MOST_PODS)
        values["node_counts"] = counts
    if "image" not in values:
        msg = "--image: a manifest needs the image of its pods"
        raise ConfigError(msg, hint="such as --image registry.org/group/name:1.2")
    spec = ManifestSpec(kind=kind, **values)
    text = render_manifest(spec)
    if out == "-":
        sys.stdout.write(text)
        return
    from hpc_toolkit.slurm.render.file import write_script

    path = Path(out or f"slurm/{spec.name}.yaml")
    write_script(path, text, force=bool(force))
    print(path)
