"""The command that writes job scripts.

Annotations are objects here, not text as elsewhere: typer would compile each of them again
whenever the command starts.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli.scriptoptions import add_script_command, requested

if TYPE_CHECKING:
    from hpc_toolkit.clusters import Cluster
    from hpc_toolkit.scriptspec import ScriptSpec

_PANEL = "Slurm"
_NOTE = "note: "


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    add_script_command(app, render, panel=_PANEL)


def render(
    template: str | None,
    *,
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write FILE; - prints the script."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an edited script.")] = False,
    **given: Any,
) -> None:
    """Write a job script and print its path, for sbatch "$(hpctk render --nodes 8 ...)".

    The options bear sbatch's names; --output is the log of the job, -o the file that this command
    writes (slurm/JOB-NAME.sbatch).
    """
    spec, site, script = requested(template, given)
    _show_notes(site)
    if out == "-":
        sys.stdout.write(script)
        return
    _write(spec, script, out=out, force=force)


def _write(spec: "ScriptSpec", script: str, *, out: str | None, force: bool) -> None:
    from hpc_toolkit.directives import log_pattern
    from hpc_toolkit.scriptfile import log_directory, write_script

    path = Path(out) if out else Path("slurm", f"{spec.job_name}.sbatch")
    write_script(path, script, force=force)
    logs = log_directory(log_pattern(spec))
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
