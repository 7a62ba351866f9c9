"""The command that writes job scripts, and manifests, which take other options."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from hpc_toolkit.cli import scriptoptions
from hpc_toolkit.cli.arguments import Argument, open_run
from hpc_toolkit.cli.help import SLURM, Commands, HelpCommand, parameters
from hpc_toolkit.cli.scriptoptions import (
    DEFAULT_TEMPLATE,
    ScriptCommand,
    check_template,
    read_variable,
    requested,
    script_arguments,
)
from hpc_toolkit.errors import ConfigError, RunError, near_miss
from hpc_toolkit.slurm.render.spec import QUEUES, ScriptSpec
from hpc_toolkit.slurm.render.values import file_name
from hpc_toolkit.system.options import Option, Panels, flag, many, only_given
from hpc_toolkit.system.terminal import note, printable

if TYPE_CHECKING:
    from hpc_toolkit.engines.kubernetes import Kind


PANELS: Panels = {
    "Options": (
        Option("out", "File to write; - is stdout.", "FILE", short="-o"),
        flag("force", "Overwrite an edited script."),
    ),
    **scriptoptions.PANELS,
    "Existing scripts": (
        Option("from", "Render this file again; other options override its options.", "FILE"),
    ),
}


def register(app: Commands) -> None:
    app.add(
        render, PANELS, panel=SLURM, arguments=script_arguments([*TEMPLATES]), cls=RenderCommand
    )


def render(template: str | None, **given: Any) -> None:
    """Write a job script and print its path.

    Options are named after sbatch's. --output is the log of the job; -o is the script that this
    command writes [default: slurm/JOB-NAME.sbatch]. Use --sbatch for other options of sbatch.
    The templates kubernetes-queue and kubernetes-ddp write manifests; for their options, run e.g.
    'hpctk render kubernetes-queue --help'.

    Examples:
        sbatch "$(hpctk render --nodes 8 --gpus-per-node 4 --time 4:00:00)" runs/eval
        hpctk render train-multi-node --nodes 2 --gpus-per-node 4 -- train.py --lr 0.1
    """
    out, force, source = (given.pop(name) for name in ("out", "force", "from"))
    from hpc_toolkit.planning.nodes import ask_of, asked_line
    from hpc_toolkit.slurm.render.directives import forbidden

    base = None
    if source:
        from hpc_toolkit.slurm.render.file import read_header, read_script

        header = read_header(read_script(Path(source)), source)
        base = {**header.request, "template": header.template, "cluster": header.cluster}
    unnamed = _name_run(template, given, base or {})
    spec, site, script = requested(template, given, base=base)
    if site.source and not site.verified:
        note(f"{site.file}: facts not verified; from {site.source} ({site.checked})")
    if reason := forbidden(site, Path.cwd()):
        note(reason)
    print(printable(asked_line(ask_of(spec, site))), file=sys.stderr)
    path = Path(out or source or f"slurm/{file_name(spec.job_name)}.sbatch")
    _put(path, script, force=force)
    _make_log_directories(spec)
    if unnamed:
        file = "SCRIPT" if out == "-" else shlex.quote(str(path))
        note(f"{unnamed}; submit it with: sbatch {file} RUN", "warning")


def _put(path: Path, text: str, *, force: bool | None) -> None:
    """Write a file and print its path; for "-", print the text."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    from hpc_toolkit.slurm.render.file import write_script

    write_script(path, text, force=bool(force))
    print(path)


def _name_run(template: str | None, given: dict[str, Any], base: dict[str, Any]) -> str:
    """Add to ``given`` the only run below ./runs, as ``submit`` does; if there is none, say so."""
    from hpc_toolkit.rundir.layout import all_runs

    kind = template or base.get("template", DEFAULT_TEMPLATE)
    if kind not in QUEUES or given["run"] or base.get("run"):
        return ""
    try:
        run = open_run(None)
        check_template(template or base.get("template"), run)
    except RunError as error:
        return f"the script names no run: {error.message}"
    except ConfigError as error:
        count = len(all_runs())
        why = error.message if count == 1 else f"./runs contains {'several' if count else 'none'}"
        return f"the script names no run: {why}"
    # A job with --chdir would look for it there.
    moved = given.get("chdir") or base.get("chdir")
    given["run"] = str(run.root.absolute() if moved else run.root)
    note(f"the script works on {given['run']}")
    return ""


def _make_log_directories(spec: ScriptSpec) -> None:
    """Make them, since Slurm before 23.02 does not: a job without one ends without a word."""
    from hpc_toolkit.slurm.render.directives import log_pattern
    from hpc_toolkit.slurm.render.file import log_directory

    for pattern in filter(None, (log_pattern(spec), spec.error)):
        logs = Path(spec.chdir or "") / log_directory(pattern)
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            # Not an error: the path may exist on the cluster only.
            note(f"{logs}: {error.strerror}; without its log a job fails immediately")


MANIFEST_PANELS: Panels = {
    "Resources": (
        Option("image", "Image of the pods, with hpctk installed. Required.", "IMAGE"),
        Option("nodes", "Number of pods. [default: 1]", "N"),
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
        for panel, group in MANIFEST_PANELS.items()
    }
    words = Argument("[-- SCRIPT ARGS...]", "Training script.")
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
    if "image" not in values:
        msg = "--image: a manifest needs the image of its pods"
        raise ConfigError(msg, hint="such as --image registry.org/group/name:1.2")
    spec = ManifestSpec(kind=kind, **values)
    _put(Path(out or f"slurm/{spec.name}.yaml"), render_manifest(spec), force=force)
