"""Commands that send jobs to Slurm, keep some in its queue, and cancel them."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from hpc_toolkit.cli import scriptoptions
from hpc_toolkit.cli.arguments import GivenRun, RunArgument, open_run, switch, value
from hpc_toolkit.cli.help import SLURM, Commands
from hpc_toolkit.cli.scriptoptions import (
    DEFAULT_TEMPLATE,
    ScriptCommand,
    check_template,
    refuse_run,
    requested,
    script_arguments,
)
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RenderError
from hpc_toolkit.slurm.records import script_options
from hpc_toolkit.slurm.render.spec import ScriptSpec, option
from hpc_toolkit.system.options import Option, Panels, flag, only_given
from hpc_toolkit.system.quantities import parse_duration
from hpc_toolkit.system.terminal import note, printable

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.render.file import Header
    from hpc_toolkit.submit.submission import Submission

PANELS: Panels = {
    "Options": (
        Option("jobs", "Submit N jobs; see --dependency.", "N", default=1, least=1, most=1000),
        Option(
            "keep", "Have up to N jobs while there is work; they submit each other.", "N", least=1
        ),
        flag("dry_run", "Show the script and the command; submit nothing."),
        flag(
            "exclude_failed/no-exclude-failed", "Exclude nodes on which this run failed today."
        )._replace(default=True),
        flag("force", "Submit even if the run is complete or paused."),
    ),
    **scriptoptions.PANELS,
}

_KEEP: Panels = {
    "Options": (
        Option("jobs", "Have up to N jobs in the queue.", "N", default=1, least=1),
        flag("once", "Look once and exit, for cron."),
        Option("every", "Time between two looks. [default: 1min]", "DURATION"),
        flag("again", "Begin again after it ended, e.g. by 'hpctk cancel'."),
    ),
    **scriptoptions.PANELS,
}


def register(app: Commands) -> None:
    app.add(submit, PANELS, panel=SLURM, arguments=script_arguments(), cls=ScriptCommand)
    how: dict[str, Any] = {"arguments": {"directory": RunArgument}, "cls": ScriptCommand}
    app.add(keep, _KEEP, panel=SLURM, hidden=True, **how)
    app.add(cancel, panel=SLURM)


def submit(template: str | None, **given: Any) -> None:
    """Render and submit a job script, and print the job id.

    Instead of TEMPLATE, a script can be named: a path with a "/", or ending in .sbatch. It is
    submitted unchanged, with --run as its argument.

    Examples:
        hpctk submit --run runs/eval --nodes 8 --gpus-per-node 4 --time 2:00:00
        hpctk submit train-multi-node --nodes 2 --gpus-per-node 4 -- train.py
    """
    from hpc_toolkit.submit.send import note_overrides, without_failed_nodes

    _refuse(template, given)
    keep, jobs, dry_run = (given.pop(name) for name in ("keep", "jobs", "dry_run"))
    force = bool(given.pop("force"))
    exclude_failed = given.pop("exclude_failed")
    refuse_run(template)
    note_overrides()
    make = _of_script if _is_script(template) else from_options
    found = make(template, given, force=force)
    if exclude_failed:
        found = without_failed_nodes(found)
    if jobs > 1 and found.array:
        raise ConfigError("--jobs and --array exclude each other", hint="leave one of them out")
    submission = replace(found, copies=jobs)
    if jobs > 1 and submission.request is not None:
        from hpc_toolkit.slurm.render.directives import check_number

        check_number(jobs, *submission.request, "--jobs")
    for text in submission.notes:
        note(text)
    _show_request(submission)
    if dry_run:
        _show(submission)
        return
    _send(submission, keep)


def _refuse(template: str | None, given: dict[str, Any]) -> None:
    """Refuse options that ``--keep`` chooses, and ``--keep`` for other jobs."""
    if not given["keep"]:
        return
    for name in ("jobs", "array", "dependency"):
        if given.get(name) and (name != "jobs" or given["jobs"] > 1):
            hint = "--keep N says how many jobs there are"
            raise ConfigError(f"--keep and {option(name)} exclude each other", hint=hint)
    if (template or DEFAULT_TEMPLATE) != DEFAULT_TEMPLATE:
        message = f"--keep: {template} has no list of items"
        raise ConfigError(message, hint=f"it works with the template {DEFAULT_TEMPLATE}")


def _is_script(template: str | None) -> bool:
    """A path, or a file in this directory that is not named like a template."""
    from hpc_toolkit.slurm.render.script import template_names

    if template is None or "/" in template or template.endswith(".sbatch"):
        return template is not None
    return Path(template).is_file() and template not in template_names()


def _show_request(submission: Submission) -> None:
    """Print on stderr the request, and a forecast of the items that are left."""
    from hpc_toolkit.planning.nodes import ask_of, asked_line
    from hpc_toolkit.submit.submission import left_lines

    if submission.request is None:
        return
    ask = ask_of(*submission.request, jobs=submission.copies)
    lines, warnings = [asked_line(ask)], list[str]()
    run = submission.run
    if run is not None:
        try:
            said, warnings = left_lines(run, ask)
            lines += said
        except HpcToolkitError as error:  # the job itself may do without a forecast
            warnings = [f"no forecast: {error.message}"]
    for line in lines:
        print(printable(line), file=sys.stderr)
    for warning in warnings:
        note(warning, "warning")


def _send(submission: Submission, keep: int | None) -> None:
    """Print each id when its job was taken; where that breaks off, say what is in the queue."""
    from hpc_toolkit.slurm.client import SlurmUnsureError
    from hpc_toolkit.submit.keeping import first_jobs
    from hpc_toolkit.submit.send import send

    sent = first_jobs(submission, keep) if keep else (job.job for job in send(submission))
    taken: list[str] = []
    try:
        for job in sent:
            print(job, flush=True)
            taken.append(job)
    except (HpcToolkitError, KeyboardInterrupt) as error:
        unsure = isinstance(error, KeyboardInterrupt | SlurmUnsureError)
        total = submission.copies
        if taken or unsure:
            words = [f"{len(taken)} of {total} were taken" + f": {', '.join(taken)}" * bool(taken)]
            words += ["'squeue --me' shows whether one more was accepted"] * unsure
            back = f"hpctk cancel {submission.records.root}" if submission.records else "scancel"
            words += [f"'{back}' cancels them"] * bool(taken)
            note("; ".join(words))
        raise


def from_options(template: str | None, given: dict[str, Any], *, force: bool) -> Submission:
    from hpc_toolkit.slurm.render.spec import PROGRAMS
    from hpc_toolkit.submit.send import check_directory, check_run
    from hpc_toolkit.submit.submission import of_request

    kind = template or DEFAULT_TEMPLATE
    run = None
    if kind not in PROGRAMS:
        run = open_run(given.get("run"))
        check_template(template, run)
        if given.get("chdir"):
            # The job would look for it there.
            given["run"] = str(run.root.absolute())
        elif not given.get("run"):
            given["run"] = str(run.root)
    spec, site, _ = requested(template, given)
    check_directory(site, Path.cwd())
    if run is not None:
        check_run(run, force=force)
    return of_request(spec, site, kind, run=run, cwd=Path.cwd())


def _of_script(template: str | None, given: dict[str, Any], *, force: bool) -> Submission:
    from hpc_toolkit.slurm.render.file import read_script
    from hpc_toolkit.slurm.render.spec import QUEUES
    from hpc_toolkit.submit.send import check_directory, check_run
    from hpc_toolkit.submit.submission import of_script

    path = Path(template or "")
    for name in only_given({**given, "run": None, "dependency": None}):
        message = f"{option(name)}: {path} is submitted unchanged"
        hint = "render the script again, or edit it; only --run and --dependency are allowed"
        raise ConfigError(message, hint=hint)
    text = read_script(path)
    header = _header(path, text, needed=not given.get("run"))
    check_directory(_site(header), Path.cwd())
    options = script_options(text)
    named, inside = given.get("run"), header.request.get("run") if header is not None else None
    if not named and inside:
        # The job looks for it where it works.
        named = str(Path(options.get("chdir", ""), inside))
    # A script of ours without a run takes one as its argument.
    wanted = header is not None and header.template in QUEUES
    run = open_run(named) if named or wanted else None
    if run is not None:
        if header is not None:
            check_template(header.template, run)
        check_run(run, force=force)
    training = _training(header) if run is None else None
    submission = of_script(path, text, run=run, cwd=Path.cwd(), training=training)
    if inside and not given.get("run"):
        submission = replace(submission, arguments=())
    if given.get("dependency"):
        spec = ScriptSpec(python=sys.executable, dependency=given["dependency"])
        submission = replace(submission, options=(f"--dependency={spec.dependency}",))
    return submission


def _header(path: Path, text: str, *, needed: bool) -> Header | None:
    """What a script says of its making; None for one that was written by hand."""
    from hpc_toolkit.slurm.render.file import origin, read_header

    if origin(text) == "foreign":
        return None
    try:
        return read_header(text, str(path))
    except RenderError as error:
        if not needed:
            return None
        hint = "render the script again, or name the run with --run"
        raise RenderError(error.message, hint=hint) from error


def _training(header: Header | None) -> str | None:
    """The directory of the training that a script starts; None if it starts none of ours."""
    from hpc_toolkit.slurm.render.kinds import training_directory
    from hpc_toolkit.slurm.render.spec import TRAININGS

    if header is None or header.template not in TRAININGS or header.request.get("plain"):
        return None
    name = header.request.get("job_name") or header.template
    return training_directory(header.request.get("run_dir"), name)


def _site(header: Header | None) -> Cluster:
    """The cluster for which a script was rendered, else the one that is recognized here."""
    from hpc_toolkit.slurm.clusters.choice import FALLBACK, resolve_cluster

    if header is not None and header.cluster != FALLBACK:
        with suppress(ConfigError):  # its file may be gone; what it said is in the script
            return resolve_cluster(header.cluster).cluster
    return resolve_cluster(None).cluster


def _show(submission: Submission) -> None:
    """The commands on stderr, the script on stdout, and what Slurm says to it."""
    import tempfile

    from hpc_toolkit.slurm.client import SlurmError
    from hpc_toolkit.slurm.controller import sbatch_argv, start_estimate

    for _ in range(submission.copies):
        print(f"would run: {shlex.join(submission.argv())}", file=sys.stderr)
    print(f"in: {Path.cwd()}", file=sys.stderr)
    print(f"log: {submission.cwd / submission.log}", file=sys.stderr)
    sys.stdout.write(submission.text)
    if shutil.which("sbatch") is None:
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "script.sbatch")
        path.write_text(submission.text, encoding="utf-8")
        argv = sbatch_argv(path, submission.arguments, options=submission.options)
        try:
            said = start_estimate(argv)
        except SlurmError as error:
            said = error.message
    print(f"Slurm: {said}", file=sys.stderr)


def keep(directory: str | None, **given: Any) -> None:
    """Keep jobs in the queue while a run has work for them, and print their ids.

    It stays in the foreground, and ends when the run is complete or paused, when three submissions
    or jobs in a row failed, or by 'hpctk cancel'.

    Examples:
        hpctk keep runs/eval --jobs 4 --gpus-per-node 4 --time 1:00:00
        hpctk keep runs/eval --jobs 4 --time 1:00:00 --once
    """
    from hpc_toolkit.slurm.client import SlurmSilentError
    from hpc_toolkit.submit.keeping import COMPLETE, Keeper

    most, once, again = given.pop("jobs"), given.pop("once"), bool(given.pop("again"))
    every_s = parse_duration(given.pop("every") or "1min", where="--every")
    if given.get("array"):
        raise ConfigError("--array: arrays cannot be kept", hint="--jobs N is the number of jobs")
    given |= {"run": directory or given.get("run"), "command": None}
    submission = from_options(None, given, force=True)
    assert submission.run is not None
    for text in submission.notes:
        note(text)
    keeper = Keeper(submission, submission.run, most)
    keeper.request(again=again or not once)
    while True:
        try:
            for job in keeper.look():
                print(job, flush=True)
        except SlurmSilentError as error:
            note(f"no jobs are sent now: {error.message}", "warning")
        if keeper.ended == COMPLETE or once:
            break
        if keeper.ended:
            raise HpcToolkitError(f"no more jobs are sent: {keeper.ended}")
        time.sleep(every_s)
    if keeper.ended:
        print(f"no more jobs are sent: {keeper.ended}", file=sys.stderr)


def cancel(
    run: GivenRun,
    *,
    job: Annotated[list[str] | None, value("ID", "Cancel only this job. May be repeated.")] = None,
    yes: Annotated[bool, switch("--yes", "Do not ask for confirmation.", "-y")] = False,
) -> None:
    """Cancel the jobs of a run, and print their ids.

    RUN may be the directory of a training. Exits with 1 if the queue has no jobs of the run.

    Examples:
        hpctk cancel runs/eval
        hpctk cancel runs/eval --job 4711 --yes
    """
    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.submit.keeping import end_keeping
    from hpc_toolkit.submit.send import cancel_jobs, cancelable_jobs
    from hpc_toolkit.training.progress import is_training

    paths = RunPaths(Path(run)) if is_training(Path(run)) else open_run(run).paths
    queued = cancelable_jobs(paths, only=job)
    for one in queued:
        if one.foreign:
            note(f"job {one.record.id} was not cancelled: {one.foreign}")
    found = [one for one in queued if not one.foreign]
    if not found:
        if queued or job or not end_keeping(paths):
            message = f"no {'other ' * bool(queued)}job of {run} is in the queue"
            raise HpcToolkitError(message, hint="'hpctk status RUN' lists the run's jobs")
        return
    for record in (one.record for one in found):
        where = f" on {record.nodes}" if record.nodes else ""
        print(f"job {record.id} {record.name}: {record.state}{where}", file=sys.stderr)
    if not yes:
        if not sys.stdin.isatty():
            message = "confirmation needs a terminal"
            raise ConfigError(message, hint="add --yes to cancel without confirmation")
        click.confirm("Cancel them?", abort=True, err=True)
    if not job and end_keeping(paths):  # others may have been sent meanwhile
        found = [one for one in cancelable_jobs(paths) if not one.foreign]
    cancel_jobs(found)
    for one in found:
        print(one.record.id)
