"""Commands for a first list: new writes an example; map creates, works on and reads a run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli import lists
from hpc_toolkit.cli.arguments import Argument, check_out, value
from hpc_toolkit.cli.gathering import OUT, write_rows
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.cli.working import with_progress
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.queue.lists import Types
from hpc_toolkit.rundir import files
from hpc_toolkit.system.options import Option, Panels
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from hpc_toolkit.run import Run


PANELS: Panels = {
    "Options": (
        Option("run", "Run directory. [default: runs/MODULE-NAME]", "DIR"),
        Option("workers", "Local workers. [default: one per GPU, else 1]", "N", least=1),
        OUT,
    ),
    **lists.SOURCES,
    "Limits": tuple(one for one in lists.SETTINGS["Workload and limits"] if one.name != "workload"),
}


def register(app: Commands) -> None:
    app.add(new, panel=LIST)
    app.add(map_, PANELS, panel=LIST, name="map")


def map_(
    workload: Annotated[
        str | None,
        Argument(
            "[MODULE:NAME]",
            "Function or class to call for each item; --command runs a shell command instead.",
        ),
    ] = None,
    **given: Any,
) -> None:
    """Create a run, process its items here and write the results.

    Prints the run's directory; with '-o -', on stderr. The same command again continues where the
    last one stopped. Exits with 1 if items failed, and with 75 if items are left.

    Examples:
        hpctk map mymodule:evaluate --items items.jsonl --workers 4 -o results.csv
        hpctk map bench:iterate --count 500 --key seed --workers 10 -o results.csv
    """
    from hpc_toolkit.results.tables import writer_for

    root, outs, workers = (given.pop(name) for name in ("run", "out", "workers"))
    for out in outs:
        if out != "-":
            writer_for(Path(out))
            check_out(Path(out), (Path(out).suffix,))
    run = _the_run(workload, root, given)
    print(run.root, flush=True, file=sys.stderr if "-" in outs else sys.stdout)
    if not run.status(forecast=False).complete:
        _work_here(run, workers)
    _write_rows(run, outs)


def _write_rows(run: Run, outs: Sequence[str]) -> None:
    """Write the results to files; raise HpcToolkitError if items failed."""
    rows = run.table()
    write_rows(outs, rows, run.values)
    if files := ", ".join(out for out in outs if out != "-"):
        print(f"{counted(len(rows), 'row')} in {files}", file=sys.stderr)
    if rows.failed:
        message = f"{rows.failed} failed, of {counted(len(rows), 'item')} in {run.root}"
        again = f"'hpctk retry {run.root}', and repeat the command"
        hint = f"see 'hpctk status {run.root}'; fix the cause, {again}"
        raise HpcToolkitError(message, hint=hint)


def _the_run(workload: str | None, root: str | None, given: dict[str, Any]) -> Run:
    """Create the run that ``map`` works on, or open it if it was created with the same arguments.

    Raises ConfigError: other items, code or settings; or a shell command whose run has no name.
    """
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.layout import list_stage

    if workload is not None:
        given["workload"] = workload
    sources, settings, options = lists.read_settings(given)
    types = Types()
    items = list(types.note(lists.make_items(sources, settings.get("command"))))
    settings.pop("open", None)
    workload = settings.pop("workload", None)
    if workload is None and "command" not in settings:
        raise ConfigError("no code is named", hint="add MODULE:NAME, or --command '... {key} ...'")
    if root is None and workload is None:
        raise ConfigError("--command: the run has no name", hint="add --run runs/NAME")
    path = Path(root or Path("runs", re.sub(r"[^\w.-]+", "-", workload or "")))
    if not path.exists():
        lists.note_types(types, sources)
        with lists.located(sources):
            return Run.create(path, items, workload=workload, options=options, **settings)
    run = Run.open(path)
    wanted = list_stage(workload=workload, options=options, **settings)
    changed = run.manifest.stages[0].differences(wanted)
    if run.manifest.campaign is not None or run.items() != items:
        changed.append("items")
    elif not run.view.stages[wanted.name].log.sealed:
        message = f"{path} is open for more items"
        raise ConfigError(message, hint=f"'hpctk add {path} --seal' allows no further items")
    if changed:
        message = f"{path} was created with other {' and '.join(changed)}"
        raise ConfigError(message, hint="choose another directory with --run, or remove this one")
    return run


def _work_here(run: Run, workers: int | None) -> None:
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.system.gpus import visible_gpus
    from hpc_toolkit.worker.code import executed

    executed(run.paths, run.manifest)
    count = workers if workers is not None else Shares().workers_on(len(visible_gpus()))
    if code := with_progress(run, lambda: run.work(count)):
        message = f"items are left in {run.root}"
        raise RunError(message, hint="the same command continues", exit_code=code)


def new(
    name: Annotated[str, Argument("NAME", "Directory to create.")],
    example: Annotated[str, value("|".join(EXAMPLES), "Example to write.")] = "list",
) -> None:
    """Create a directory with an example to run and change.

    Its README.md shows the commands, here and on Slurm.

    Examples:
        hpctk new first
        hpctk new search --example campaign
    """
    commands = write_example(Path(name), example)
    print(name, flush=True)
    for command in (f"cd {shlex.quote(name)}", *commands):
        print(f"  {command}", file=sys.stderr)


# Call a function for each item; search for the best model; train on several ranks, and resume
# (needs torch); call functions from a notebook (needs Jupyter).
EXAMPLES = ("list", "campaign", "training", "notebook")
"""The examples by name; the files of each are in ``examples/new`` of the repository."""

_NAME = re.compile(r"\w[\w.-]*")
_IGNORED = b"/runs/\n/slurm/\n/results.*\n__pycache__/\n.ipynb_checkpoints/\n"


def write_example(path: Path, example: str) -> list[str]:
    """Create a directory with an example, completely or not at all.

    Returns the commands to run there first, as its README.md shows them. Raises ConfigError for an
    invalid name, and RunError if the directory exists or cannot be made.
    """
    if not _NAME.fullmatch(path.name) or not str(path).isprintable():
        message = f"{str(path)!r} cannot be the name of a new directory"
        hint = "use letters, digits, '.', '_' and '-', and begin with a letter or a digit"
        raise ConfigError(message, hint=hint)
    exists = RunError(f"{path} exists", hint="use another name; only an empty directory is filled")
    source = resources.files("hpc_toolkit.rundir") / "data" / "examples" / example
    with files.new_directory(path, exists=exists) as staging:
        for file in source.iterdir():
            if file.is_file():  # Python may have compiled the code, into a directory
                files.write_new(staging / file.name, [file.read_bytes()])
        files.write_new(staging / ".gitignore", [_IGNORED])
    readme = (source / "README.md").read_text(encoding="utf-8")
    block = readme.partition("```console\n")[2].partition("```")[0]
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]
