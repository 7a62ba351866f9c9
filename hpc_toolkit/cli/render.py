"""The command that writes job scripts.

Annotations are objects here, not text as elsewhere: typer would compile each of them again
whenever any command starts, which takes 3 ms for the options below.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from hpc_toolkit.clusters import Cluster
    from hpc_toolkit.scriptspec import ScriptSpec

_PANEL = "Slurm"
_NOTE = "note: "


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(rich_help_panel=_PANEL)(render)


def _complete_cluster(incomplete: str) -> list[str]:
    from hpc_toolkit.clusters import cluster_names

    return [name for name in cluster_names() if name.startswith(incomplete)]


def _text(help_text: str) -> Any:
    return typer.Option(help=help_text, metavar="TEXT", show_default=False)


def _count(help_text: str) -> Any:
    return typer.Option(help=help_text, metavar="N", show_default=False)


def render(
    template: Annotated[str, typer.Argument(help="Which kind of script.")] = "work-queue",
    *,
    nodes: Annotated[int | None, _count("Number of nodes; by default 1.")] = None,
    gpus_per_node: Annotated[int | None, _count("GPUs on each node; by default none.")] = None,
    cluster: Annotated[
        str,
        typer.Option(
            help="Whose limits and notation: a name of 'hpctk cluster list' or a TOML file.",
            autocompletion=_complete_cluster,
        ),
    ] = "generic",
    time: Annotated[str | None, _text("Time limit, as sbatch reads it ('90' is minutes).")] = None,
    run: Annotated[str | None, _text("The run; the script's argument overrides it.")] = None,
    job_name: Annotated[str | None, _text("Name of job and script; by default TEMPLATE.")] = None,
    ntasks_per_node: Annotated[
        int | None, _count("Ranks on each node; by default one per GPU.")
    ] = None,
    cpus_per_task: Annotated[int | None, _count("CPUs of a rank; by default its share.")] = None,
    mem: Annotated[str | None, _text("Memory of each node ('480G'); 0 is all of it.")] = None,
    mem_per_cpu: Annotated[str | None, _text("Memory per CPU.")] = None,
    mem_per_gpu: Annotated[str | None, _text("Memory per GPU.")] = None,
    exclusive: Annotated[
        bool | None, typer.Option("--exclusive", help="Share the nodes with no other job.")
    ] = None,
    account: Annotated[str | None, _text("Who pays.")] = None,
    partition: Annotated[str | None, _text("Comma-separated partitions.")] = None,
    qos: Annotated[str | None, _text("Quality of service.")] = None,
    reservation: Annotated[str | None, _text("Comma-separated reservations.")] = None,
    constraint: Annotated[str | None, _text("Node features.")] = None,
    nodelist: Annotated[str | None, _text("Nodes that must be used.")] = None,
    exclude: Annotated[str | None, _text("Nodes that must not be used.")] = None,
    signal: Annotated[str | None, _text("B:USR1@SECONDS: when the ranks start to finish.")] = None,
    requeue: Annotated[
        bool | None,
        typer.Option("--requeue/--no-requeue", help="Start again while items are left."),
    ] = None,
    max_restarts: Annotated[int | None, _count("How often it may do so; by default 10.")] = None,
    output: Annotated[str | None, _text("The log; by default slurm/logs/%x-%j.out.")] = None,
    comment: Annotated[str | None, _text("A remark that Slurm keeps.")] = None,
    mail_type: Annotated[str | None, _text("Events that send mail.")] = None,
    mail_user: Annotated[str | None, _text("Who gets it.")] = None,
    python: Annotated[str | None, _text("Interpreter on the nodes; by default this one.")] = None,
    module: Annotated[list[str] | None, _text("Load this module; may be repeated.")] = None,
    setup: Annotated[list[str] | None, _text("Run this command first; may be repeated.")] = None,
    env: Annotated[list[str] | None, _text("Export NAME=VALUE; may be repeated.")] = None,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write FILE; - prints the script."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an edited script.")] = False,
) -> None:
    """Write a job script and print its path, for sbatch "$(hpctk render --nodes 8 ...)".

    The options bear sbatch's names; --output is the log of the job, -o the file that this command
    writes (slurm/JOB-NAME.sbatch).
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for own in ("template", "cluster", "out", "force"):
        given.pop(own, None)
    spec = _spec(template, given)
    _write(spec, template, cluster, out=out, force=force)


def _spec(template: str, given: dict[str, Any]) -> "ScriptSpec":
    from hpc_toolkit.scriptspec import ScriptSpec

    given["modules"] = tuple(given.pop("module", ()))
    given["setup"] = tuple(given.get("setup", ()))
    given["env"] = tuple(_variable(text) for text in given.get("env", ()))
    # Not resolved: the link in a virtual environment is what makes Python use the environment.
    given.setdefault("python", os.path.abspath(sys.executable))
    given.setdefault("job_name", template)
    return ScriptSpec(**given)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        msg = f"--env: {text!r} has no '='"
        raise ConfigError(msg, hint="write NAME=VALUE")
    return name, value


def _write(spec: "ScriptSpec", template: str, name: str, *, out: str | None, force: bool) -> None:
    from hpc_toolkit.clusters import load_cluster
    from hpc_toolkit.render import render_script
    from hpc_toolkit.scriptfile import log_directory, write_script

    site = load_cluster(name)
    script = render_script(spec, site, template)
    _show_notes(site)
    if out == "-":
        sys.stdout.write(script)
        return
    path = Path(out) if out else Path("slurm", f"{spec.job_name}.sbatch")
    write_script(path, script, force=force)
    logs = log_directory(spec.output)
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # Not an error: the path may exist on the cluster only.
        print(f"{_NOTE}{logs}: {error.strerror}; without it the job ends at once", file=sys.stderr)
    print(path)


def _show_notes(site: "Cluster") -> None:
    if site.source and not site.verified:
        note = f"{_NOTE}{site.file}: facts not verified, from {site.source} ({site.checked})"
        print(note, file=sys.stderr)
    here = Path.cwd()
    for directory in site.forbidden_submit_dirs:
        if here.is_relative_to(Path(directory).expanduser()):
            print(f"{_NOTE}{site.name} takes no jobs from below {directory}", file=sys.stderr)
