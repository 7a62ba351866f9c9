"""Commands for a run at work: explain, logs, add, seal, retry, drain."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from hpc_toolkit.cli.arguments import (
    ITEM_HELP,
    GivenRun,
    JsonOption,
    RunArgument,
    open_run,
    show,
    switch,
    value,
)
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.cli.lists import FORMAT, ITEMS, located, make_items
from hpc_toolkit.errors import ConfigError, ItemsError
from hpc_toolkit.rundir.journal import read_span
from hpc_toolkit.rundir.layout import RunPaths, find_run, shown_item
from hpc_toolkit.system.options import only_given
from hpc_toolkit.system.quantities import counted, format_duration
from hpc_toolkit.system.terminal import note, printable

if TYPE_CHECKING:
    from hpc_toolkit.run import Run


def register(app: Commands) -> None:
    for command in (explain, logs, add, seal, retry, drain):
        app.add(command, panel=LIST, hidden=command in (seal, drain))


def explain(
    run: RunArgument = None,
    *,
    item: Annotated[str, value("ITEM", ITEM_HELP)],
    as_json: JsonOption = False,
) -> None:
    """Show the claims, attempts and worker deaths of one item.

    Examples:
        hpctk explain runs/eval --item 17
        hpctk explain runs/eval --item '"layer": 3'
    """
    from hpc_toolkit.results.explain import explain as explain_item
    from hpc_toolkit.results.explain import explain_absent, find_item

    view = open_run(run).view
    try:
        life = explain_item(view, find_item(view, item))
    except ItemsError:
        absent = explain_absent(view, item)
        if absent is None:
            raise
        show(absent, absent_lines(absent), as_json=as_json)
        return
    show(life, life_lines(life), as_json=as_json)


def absent_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{json.dumps(found['item'], ensure_ascii=False)}: {found['state']}"]
    for one in found["after"]:
        why = f": {one['error']}" if "error" in one else ""
        lines.append(f"  after {json.dumps(one['item'], ensure_ascii=False)}: {one['state']}{why}")
    return lines


def life_lines(life: dict[str, Any]) -> list[str]:
    lines = [f"{json.dumps(shown_item(life['item']), ensure_ascii=False)}: {life['state']}"]
    lines.append(f"  stage {life['stage']}, unit {life['unit']}, group {json.dumps(life['group'])}")
    for claim in life["claims"]:
        released = "released" if claim["released"] else "not released"
        lines.append(f"  generation {claim['generation']}: {claim['worker']}, {released}")
        lines += _attempt_lines(life, claim["generation"])
    if life["state"] == "pending" and (wanted := _shown_needs(life, "  the next attempt needs ")):
        lines.append(wanted)
    if life["lifted_to_generation"]:
        lines.append(f"  a retry lifted failures up to generation {life['lifted_to_generation']}")
    return lines


def _shown_needs(found: dict[str, Any], before: str) -> str:
    """What an attempt needs, where that grows with its number; else ""."""
    if not found.get("needs"):
        return ""
    from hpc_toolkit.system.needs import shown

    return before + ", ".join(shown(*one) for one in found["needs"].items())


def _attempt_lines(life: dict[str, Any], generation: int) -> list[str]:
    lines = []
    for attempt in life["attempts"]:
        if attempt["generation"] != generation:
            continue
        came = json.dumps(attempt["value"]) if "value" in attempt else attempt["error"]
        took = format_duration(attempt["seconds"])
        with_needs = _shown_needs(attempt, " with ")
        lines.append(f"    {attempt['type']} by {attempt['worker']} in {took}{with_needs}: {came}")
        lines += [f"      | {line}" for line in (attempt.get("traceback") or "").splitlines()]
    for death in life["deaths"]:
        if death["generation"] == generation:
            why = f", explained by {death['explained']}" if death["explained"] else ""
            suspect = ", this item is suspected" if death["suspect"] else ""
            lines.append(f"    death of {death['worker']}: {death['evidence']}{why}{suspect}")
    return lines


def logs(
    run: RunArgument = None,
    worker: Annotated[str | None, value("TEXT", "Name of a worker, or its beginning.")] = None,
    item: Annotated[str | None, value("ITEM", ITEM_HELP)] = None,
    job: Annotated[str | None, value("ID", "Slurm job whose log to print.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the output of workers, of one item or of a Slurm job.

    RUN may be the directory of a training: this prints the log of its latest job, else the output
    of its ranks. --job prints the log that Slurm wrote: the script's own output, and errors at
    its start.

    Examples:
        hpctk logs runs/eval
        hpctk logs runs/eval --item 17
        hpctk logs runs/eval --job 4711
    """
    for part in _chosen_logs(run, worker, item, job):
        data = part.read()
        if as_json:
            print(json.dumps({"log": part.title, "text": data.decode(errors="replace")}))
            continue
        print(f"--- {printable(part.title)}", file=sys.stderr, flush=True)
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


class _LogPart(NamedTuple):
    path: Path
    title: str
    start: int = 0
    end: int | None = None

    def read(self) -> bytes:
        """The output; what ``--log-limit`` removed of it is a hole in the file."""
        with self.path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size if self.end is None else self.end
            try:
                start = min(end, os.lseek(file.fileno(), self.start, os.SEEK_DATA))
            except OSError as error:
                start = end if error.errno == errno.ENXIO else self.start
            data = read_span(file.fileno(), start, end)
        if start > self.start and end > self.start:
            note("older output was removed by --log-limit")
            data = data.lstrip(b"\0")  # a hole ends within a block of the filesystem
        return data


def _chosen_logs(
    given: str | None, worker: str | None, item: str | None, job: str | None
) -> Iterator[_LogPart]:
    from hpc_toolkit.training.progress import is_training, training_logs

    root = find_run(given)
    if not is_training(root):
        run = open_run(given)
        return _job_logs(run.paths, job) if job is not None else _log_parts(run, worker, item)
    if worker is not None or item is not None:
        message = f"{root} is the directory of a training, which has no workers and no items"
        raise ConfigError(message, hint="leave out --worker and --item")
    if job is not None:
        return _job_logs(RunPaths(root), job)
    return (_LogPart(path, str(path)) for path in training_logs(root))


def _log_parts(run: Run, worker: str | None, item: str | None) -> Iterator[_LogPart]:
    from hpc_toolkit.results.explain import attempts_of, find_item

    if item is not None:
        for name, line in attempts_of(run.view, find_item(run.view, item)):
            start, end = line.get("log") or (0, 0)
            title = f"{name}, generation {line['generation']}, {line['type']}"
            yield _LogPart(run.paths.worker_log(name), title, start, end)
        return
    paths = sorted(run.paths.logs.glob("*.log"))
    chosen = [path for path in paths if worker is None or path.stem.startswith(worker)]
    if not chosen and worker is not None:
        message = f"no worker of {run.root} is called {worker!r}"
        known = ", ".join(path.stem for path in paths[:10])
        hint = f"known workers: {known}" if known else "no worker has started"
        raise ConfigError(message, hint=hint)
    yield from (_LogPart(path, path.stem) for path in chosen)


def _job_logs(run: RunPaths, job: str) -> Iterator[_LogPart]:
    from hpc_toolkit.submit import known_jobs, log_files

    known = [one.job for one in known_jobs(run)]
    if job not in known and job.partition("_")[0] not in known:
        message = f"no job of {run.root} has the id {job!r}"
        hint = f"known jobs: {', '.join(known[-10:])}" if known else "none is known"
        raise ConfigError(message, hint=hint)
    paths = log_files(run, job)
    if not paths:
        message = f"job {job} has not written a log yet"
        raise ConfigError(message, hint="Slurm creates the log when the job starts")
    yield from (_LogPart(path, str(path)) for path in paths)


def add(
    run: GivenRun,
    items: Annotated[str | None, ITEMS] = None,
    format_: Annotated[str | None, FORMAT] = None,
    text: Annotated[list[str] | None, value("KEY", "Keep its values as text.")] = None,
    number: Annotated[list[str] | None, value("KEY", "Read its values as numbers.")] = None,
    seal: Annotated[
        bool, switch("--seal", "Allow no further items; workers exit when done.")
    ] = False,
) -> None:
    """Add items to a run created with --open, or seal it.

    Workers may be running. They wait for more items until the run is sealed.

    Examples:
        hpctk add runs/eval --items more.jsonl
        hpctk add runs/eval --seal
    """
    if items is None and not seal:
        message = "add needs --items FILE.jsonl, --seal or both"
        raise ConfigError(message, hint="--items - reads the items from stdin")
    found = open_run(run)
    if items is not None:
        sources = only_given({"items": items, "format": format_, "text": text, "number": number})
        with located(sources):
            found.add(make_items(sources, found.manifest.stages[0].workload.command))
    if seal:
        found.seal()


def seal(run: RunArgument = None) -> None:
    """Allow no further items, so that workers exit when all are finished.

    Examples:
        hpctk seal runs/eval
    """
    open_run(run).seal()


def retry(
    run: RunArgument = None,
    item: Annotated[str | None, value("ITEM", ITEM_HELP)] = None,
    match: Annotated[str, value("TEXT", "Only items whose JSON or error contains TEXT.")] = "",
) -> None:
    """Reset failed items, so that workers run them again.

    Examples:
        hpctk retry runs/eval
        hpctk retry runs/eval --match OutOfMemoryError
    """
    found = open_run(run)
    count = found.retry(match=match, item=item)
    are = "is" if count == 1 else "are"
    print(f"{counted(count, 'item')} {are} pending again", file=sys.stderr)
    if count and not found.status(forecast=False).workers.alive:
        print("no worker is alive: start some with 'hpctk work' or 'hpctk submit'", file=sys.stderr)


def drain(run: RunArgument = None) -> None:
    """Ask running workers to exit after their current item.

    Workers that start later are not affected.

    Examples:
        hpctk drain runs/eval
    """
    count = open_run(run).drain()
    were = "was" if count == 1 else "were"
    print(f"{counted(count, 'worker')} {were} asked to exit", file=sys.stderr)
