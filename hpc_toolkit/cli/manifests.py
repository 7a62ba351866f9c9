"""``hpctk render kubernetes-...``: manifests, which take other options than job scripts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typer.core import TyperArgument

from hpc_toolkit.cli.help import HelpCommand, parameters
from hpc_toolkit.cli.scriptoptions import ScriptCommand, read_variable
from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.options import Option, by_name, flag, many, only_given

if TYPE_CHECKING:
    from hpc_toolkit.engines.kubernetes.request import Kind
    from hpc_toolkit.system.options import Panels

PANELS: Panels = {
    "Resources": (
        Option("image", "Image of the pods, with hpctk installed. Required.", "IMAGE"),
        Option("nodes", "Number of pods. [default: 1]", "N"),
        Option("node_counts", "Numbers of pods to measure. [default: 1,2,4]", "N,N"),
        Option(
            "gpus_per_node", "GPUs of each pod; --node-selector sets their type. [default: 0]", "N"
        ),
        Option("gpu_resource", "Resource name of a GPU. [default: nvidia.com/gpu]", "NAME"),
        Option("cpus", "CPUs of each pod, as request and limit.", "N"),
        Option("mem", "Memory of each pod, as request and limit; 480G is 480Gi.", "SIZE"),
        Option("shm", "Size of /dev/shm, a part of --mem. [default: 2G]", "SIZE"),
    ),
    "Storage": (
        many("pvc", "PersistentVolumeClaim (ReadWriteMany) and its mount point", "NAME[:/DIR]"),
        Option("run", "Run directory, or output directory of a training, on a volume.", "DIR"),
        Option("user", "User of the containers. [default: 1000:1000]", "UID[:GID]"),
    ),
    "Program": (
        Option("chdir", "Working directory. [default: the image's]", "DIR"),
        many("env", "Set this variable", "NAME=VALUE"),
        many("env_from_secret", "Set this variable from a key of a Secret", "NAME=SECRET:KEY"),
        Option("workers", "Workers of each pod. [default: one per GPU]", "N"),
        Option("grace", "Time to finish when a pod is evicted. [default: 60s]", "DURATION"),
    ),
    "Failures": (
        Option("max_restarts", "Restarts of all pods of a JobSet. [default: 3]", "N"),
        Option("time", "Time limit of the Job, e.g. 12h or 12:00:00.", "DURATION"),
    ),
    "Placement": (
        Option("job_name", "Name of the Job and the file. [default: TEMPLATE]"),
        Option("namespace", "Namespace. [default: kubectl's current one]"),
        many("image_pull_secret", "Secret to pull the image with", "NAME"),
        many("node_selector", "Label that nodes must have", "KEY=VALUE"),
        many("toleration", "Taint that nodes may have", "KEY[=VALUE][:EFFECT]"),
        Option("queue_name", "LocalQueue of Kueue that admits the Job.", "NAME"),
        flag("jobset", "Make a JobSet instead of a Job and a Service."),
    ),
    "Output": (
        Option("out", "Write FILE; - prints the manifest.", "FILE", short="-o"),
        flag("force", "Overwrite an edited manifest."),
        Option("from", "Render this manifest again; other options override its own.", "FILE"),
    ),
}
"""Every option of a manifest, by the panel of the help that shows it."""

_OF_QUEUES = {
    "max_restarts": "Replacements of failed pods. [default: 10]",
    "shm": "Size of /dev/shm, a part of --mem. [default: 64 MiB]",
}
"""Help of options that mean something else for workers than for ranks."""

_HELP = {
    "kubernetes-queue": """Write an Indexed Job whose pods work on a run; print the file's path.

    All pods share a volume with the run: create it there with 'hpctk init'. An evicted pod leaves
    its items to the others and is replaced.

    Examples:
        hpctk render kubernetes-queue --image IMAGE --nodes 4 --pvc data --run /data/eval
    """,
    "kubernetes-ddp": """Write a Job and a Service for a training; print the file's path.

    Each pod is a node of 'hpctk launch'. A lost pod is replaced. A pod whose script fails ends all
    pods; with --jobset they start again.

    Examples:
        hpctk render kubernetes-ddp --image IMAGE --nodes 2 --gpus-per-node 4 -- train.py
    """,
    "kubernetes-scaling": """Write a Job and a Service for each number of pods to measure.

    The words after -- are options of the measured program. Create one Job at a time, and give its
    logs to 'hpctk scaling analyze'.

    Examples:
        hpctk render kubernetes-scaling --image IMAGE --node-counts 1,2,4 --gpus-per-node 4
    """,
}


class RenderCommand(ScriptCommand):
    """``hpctk render``: scripts, or manifests where the template is one of theirs."""

    def templates(self) -> list[str]:
        """Those of manifests as well."""
        return [*super().templates(), *_HELP]

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Hand the words on to the command of a manifest that they name."""
        position = _position(args)
        if position is not None:
            kind = cast("Kind", args[position])
            rest = [*args[:position], *args[position + 1 :]]
        elif (source := _manifest(args)) is not None:
            kind, rest = _embedded(source)["kind"], args
        else:
            _check_word(args[0] if args else "")
            return super().make_context(info_name, args, parent, **extra)
        return manifest_command(kind).make_context(f"{info_name} {kind}", rest, parent, **extra)


def manifest_command(kind: Kind) -> HelpCommand:
    """The command that writes a manifest of this kind."""
    from hpc_toolkit.engines.kubernetes.request import KINDS, ONLY_OF

    said = _OF_QUEUES if kind == "kubernetes-queue" else {}
    panels = {
        panel: tuple(
            option._replace(help=said.get(option.name, option.help))
            for option in group
            if kind in ONLY_OF.get(option.name, KINDS)
        )
        for panel, group in PANELS.items()
    }
    words = TyperArgument(
        param_decls=["command"],
        nargs=-1,
        metavar="[-- SCRIPT ARGS...]",
        help="Script of a training, or options of the measured program.",
    )

    def write(**given: Any) -> None:
        _write(kind, **given)

    arguments = [words] if kind in ONLY_OF["command"] else []
    return HelpCommand(
        kind, callback=write, params=[*arguments, *parameters(panels)], help=_HELP[kind]
    )


def _check_word(word: str) -> None:
    """Refuse a template that is meant to be a manifest's, before its options are read as Slurm's.

    Raises:
        ConfigError: it is none.
    """
    if word.startswith("kubernetes"):
        msg = f"no template is called {word!r}"
        raise ConfigError(msg, hint=near_miss(word, list(_HELP)))


def _position(args: list[str]) -> int | None:
    """Where the name of a manifest's template stands, if it does."""
    options = [one for one in by_name(PANELS).values() if one.metavar]
    takes = {word for one in options for word in (one.spelling, one.short) if word}
    for number, word in enumerate(args):
        if word == "--":
            return None
        before = args[number - 1] if number else ""
        if word in _HELP and before not in takes:
            return number
    return None


def _manifest(args: list[str]) -> str | None:
    """The file that ``--from`` names, if it is a manifest."""
    from hpc_toolkit.engines.kubernetes.manifest import is_manifest

    for word, following in zip(args, [*args[1:], ""], strict=False):
        if word == "--":
            return None
        name, _, value = word.partition("=")
        if name == "--from" and is_manifest(Path(value or following)):
            return value or following
    return None


def _embedded(source: str) -> dict[str, Any]:
    from hpc_toolkit.engines.kubernetes.manifest import embedded

    return embedded(Path(source))


def _write(kind: Kind, *, out: str | None, force: bool | None, **given: Any) -> None:
    from hpc_toolkit.engines.kubernetes.manifest import render_manifest
    from hpc_toolkit.engines.kubernetes.request import ManifestSpec

    source: str | None = given.pop("from")
    values = _fields(only_given(given))
    if source is not None:
        values = {**_embedded(source), **values}
        if values.pop("kind") != kind:
            msg = f"--from: {source} is not a {kind}"
            raise ConfigError(msg, hint="leave out the template, or --from")
    if "image" not in values:
        msg = "--image: a manifest needs the image of its pods"
        raise ConfigError(msg, hint="such as --image registry.org/group/name:1.2")
    spec = ManifestSpec(kind=kind, **values)
    text = render_manifest(spec)
    if out == "-":
        sys.stdout.write(text)
        return
    from hpc_toolkit.slurm.render.file import write_script

    path = Path(out or source or Path("slurm", f"{spec.name}.yaml"))
    write_script(path, text, force=bool(force))
    print(path)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of ManifestSpec that the options set."""
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    if "env" in found:
        found["env"] = tuple(read_variable(text) for text in found["env"])
    if "node_counts" in found:
        found["node_counts"] = _numbers(found["node_counts"])
    return found


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        msg = f"--node-counts: {text!r} is not a list of numbers of pods"
        raise ConfigError(msg, hint="write 1,2,4")
    return tuple(int(part) for part in parts)
