"""Prepare a submission, and forecast what it leaves of a run; nothing is sent to Slurm here."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.planning.nodes import Ask, costs, unmet_by
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.controller import sbatch_argv
from hpc_toolkit.slurm.records import script_options
from hpc_toolkit.slurm.render.directives import check_number, log_pattern
from hpc_toolkit.slurm.render.spec import TRAININGS, ScriptSpec
from hpc_toolkit.slurm.render.values import file_name, parse_array
from hpc_toolkit.submit import script_copy
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.quantities import counted, format_duration, format_walltime

if TYPE_CHECKING:
    from hpc_toolkit.planning.forecast import Forecaster, Guess
    from hpc_toolkit.planning.plan import Choice
    from hpc_toolkit.planning.work import Work
    from hpc_toolkit.run import Run

_MANY = 10_000
"""With more items left, fewer draws: otherwise 'hpctk submit' would take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    name: str
    text: str
    """The script."""
    path: Path
    """Its absolute path; it is written there if neither a run nor a training keeps a copy."""
    array: str | None = None
    """Its value of ``--array``."""
    log: str
    """The log in sbatch's notation, relative to ``cwd``."""
    cwd: Path
    """The jobs' directory, absolute."""
    run: Run | None = None
    """The run that the jobs work on; None for a program of its own."""
    training: Path | None = None
    """The directory of a training, absolute, which keeps its script and jobs as a run does."""
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Options of sbatch; they override the script's directives."""
    excluded: tuple[str, ...] = ()
    copies: int = 1
    notes: tuple[str, ...] = ()
    request: tuple[ScriptSpec, Cluster] | None = None
    """The request of the script, and the cluster; None for a script that is sent as it is."""

    @property
    def records(self) -> RunPaths | None:
        """Where scripts and jobs are recorded: in the run, or in the training's directory."""
        if self.run is not None:
            return self.run.paths
        return RunPaths(self.training) if self.training is not None else None

    @property
    def place(self) -> Path:
        if self.records is None:
            return self.path
        return script_copy(self.records, self.name, self.text).absolute()

    def argv(self) -> list[str]:
        """The command that submits a job."""
        # Otherwise SBATCH_JOB_NAME, or the name of the run's copy, would name the job. A job
        # whose name differs from the recorded one does not count as the run's own.
        options = [f"--job-name={self.name}", *self.options]
        return sbatch_argv(self.place, self.arguments, options=options)


def of_request(
    spec: ScriptSpec, cluster: Cluster, template: str, *, run: Run | None, cwd: Path
) -> Submission:
    """A submission of a request: a job or an array.

    Raises RenderError: the cluster cannot provide it.
    """
    from hpc_toolkit.slurm.render.kinds import training_directory
    from hpc_toolkit.slurm.render.script import render_script

    if spec.array is not None:
        check_number(len(parse_array(spec.array, "--array").indices), spec, cluster)
    works_in = Path(spec.chdir) if spec.chdir else cwd
    trains = template in TRAININGS and not spec.plain
    directory = works_in / training_directory(spec.run_dir, spec.job_name)
    return Submission(
        name=spec.job_name,
        text=render_script(spec, cluster, template),
        path=cwd / "slurm" / f"{file_name(spec.job_name)}.sbatch",
        array=spec.array,
        log=log_pattern(spec),
        cwd=works_in,
        run=run,
        training=directory if trains else None,
        notes=tuple(_missing(spec, template, works_in)),
        request=(spec, cluster),
    )


def _missing(spec: ScriptSpec, template: str, folder: Path) -> list[str]:
    """A note if the training script does not exist; it may be created before the job starts."""
    if template not in TRAININGS or spec.container or spec.command[0] == "-m":
        return []
    path = folder / spec.command[0]
    return [] if os.path.exists(path) else [f"{path} does not exist, and the job would start it"]


def of_script(
    path: Path, text: str, *, run: Run | None, cwd: Path, training: str | None = None
) -> Submission:
    """A submission of a script as it is; its argument is ``run``, absolute if it sets ``chdir``.

    ``training`` is the directory of the training that it starts, relative to the job's directory.
    """
    found = script_options(text)
    root = ""
    if run is not None:
        root = str(run.root.absolute() if "chdir" in found else run.root)
    name = found.get("job-name") or path.name  # as sbatch names it
    plain = "slurm-%A_%a.out" if "array" in found else "slurm-%j.out"
    works_in = cwd / found.get("chdir", "")
    return Submission(
        name=name,
        text=text,
        path=path.absolute(),
        array=found.get("array"),
        log=found.get("output", plain),
        cwd=works_in,
        run=run,
        training=works_in / training if training is not None else None,
        # To sbatch, a word ":" begins the next component of a heterogeneous job.
        arguments=(f"./{root}" if root == ":" else root,) if root else (),
    )


def left_lines(run: Run, ask: Ask) -> tuple[list[str], list[str]]:
    """Return what is left of the run as a forecast on the nodes of ``ask``, and warnings.

    Without a duration there is no forecast: before the first result, unless a campaign states the
    durations of its tasks.
    """
    work = _work(run)
    said, warnings = [], []
    if work is not None and work.left:
        from hpc_toolkit.planning.plan import choose, span

        guess = _stated(run)
        forecaster = _forecaster(work, guess)
        more = f" ({work.coming} of them to be added later)" * bool(work.coming)
        left = f"{counted(work.left, 'item')} {'is' if work.left == 1 else 'are'} left{more}"
        if forecaster is not None:
            choice = choose(forecaster, ask.node, ask.nodes, limit_s=ask.needs.time_s)
            took, workers = choice.forecast.time_s, counted(choice.forecast.workers, "worker")
            text = f"{left}: {format_duration(took.median)} ({span(took)}) on {workers}"
            text += f", {costs(ask, choice.node_hours.median)}"
            if running := run.status(forecast=False).workers.alive:
                text += f"; the {counted(running, 'worker')} running now will shorten that"
            said.append(text)
            if not 1 <= choice.in_a_row <= ask.in_a_row:
                warnings.append(_too_short(forecaster, ask, choice))
        elif run.manifest.campaign is not None:
            said.append(f"{left}; no forecast before the first result or [tasks] seconds")
        said += [f"  {text}" for text in work.assumed]
        if forecaster is not None and forecaster.guessed:
            said.append("  Durations are those of [tasks] seconds.")
        names = [] if forecaster is None else forecaster.stages
        if unknown := [one.name for one in work.stages if names and one.name not in names]:
            said.append(f"  Left out, because no duration is known: stage {', '.join(unknown)}.")
        warnings += _waiting(work, ask)
    warnings += [*_idle(run, ask), *unmet_by(ask.node, ask.needs.time_s, run.view)]
    return said, warnings


def _waiting(work: Work, ask: Ask) -> list[str]:
    """Return a warning if a search requests fewer evaluations at once than there are workers."""
    most = work.most_workers
    if most is None:
        return []
    waiting = f"the search requests at most {counted(most, 'item')} at once,"
    return [f"{text}, or raise 'pending' in [search]" for text in _beyond(most, waiting, ask)]


def _beyond(most: int, what: str, ask: Ask) -> list[str]:
    """Return a warning if fewer nodes are enough for ``most`` workers."""
    useful = max(1, math.ceil(most / ask.node.workers))
    if useful >= ask.nodes:
        return []
    enough = f"{counted(useful, 'node')} {'is' if useful == 1 else 'are'} enough"
    return [f"nodes will be idle: {what} for {counted(ask.workers, 'worker')}; {enough}"]


def _too_short(forecaster: Forecaster, ask: Ask, choice: Choice) -> str:
    from hpc_toolkit.planning.plan import choose

    limit = format_walltime(ask.needs.time_s)
    if not choice.in_a_row:
        longest = format_duration(forecaster.longest_s)
        return f"{limit} is probably too short for the longest item, which may take {longest}"
    enough_s = choose(forecaster, ask.node, ask.nodes).ask_s
    if ask.most_s is not None and enough_s > ask.most_s:
        return f"{limit} is too short for all items; {choice.in_a_row} jobs in a row are enough"
    return f"{limit} is too short for all items; --time {format_walltime(enough_s)} is enough"


def _idle(run: Run, ask: Ask) -> list[str]:
    """Return a warning if at least one node would find no unit; the list is not open for more."""
    from hpc_toolkit.results.workers import living_workers  # a program of its own has no run

    view = run.view
    if not all(stage.log.sealed for stage in view.stages.values()):
        return []
    alive = living_workers(view, SystemClock())
    units = sum(
        stage.holders([name]).isdisjoint(alive)
        for stage in view.stages.values()
        for name in stage.state.open
    )
    return _beyond(units, counted(units, "unit"), ask)


def _work(run: Run) -> Work | None:
    """Return what is left of a run; None for a list without a result: no duration is known."""
    campaign = run.manifest.campaign
    if campaign is None and not any(one.done for one in run.status(forecast=False).stages.values()):
        return None
    # Only here, because numpy costs more than the rest of 'hpctk submit'.
    from hpc_toolkit.planning.reading import read_work

    return read_work(run.view, SystemClock(), given=str(run.root), campaign=campaign)


def _stated(run: Run) -> Guess | None:
    """Return the durations that a campaign states for its tasks; None if it states none."""
    if run.manifest.campaign is None:
        return None
    from hpc_toolkit.campaign.settings import read_settings
    from hpc_toolkit.planning.forecast import Guess

    tasks = read_settings(run.view.paths, run.manifest.campaign).tasks
    if not tasks.seconds:
        return None
    return Guess(seconds_per_item=sum(tasks.seconds.values()) / len(tasks.seconds))


def forecast_left(run: Run) -> Forecaster | None:
    """Return the forecaster of what is left of a run; None if no duration is known."""
    return _forecaster(_work(run), _stated(run))


def _forecaster(work: Work | None, guess: Guess | None = None) -> Forecaster | None:
    """Return the forecaster of the stages with known durations; None without such a stage."""
    if work is None:
        return None
    from hpc_toolkit.campaign.settings import TASKS

    known = tuple(
        stage for stage in work.stages if stage.seen or (guess is not None and stage.name == TASKS)
    )
    if not known:
        return None
    from hpc_toolkit.planning.forecast import DRAWS, Forecaster

    draws = DRAWS if work.left <= _MANY else DRAWS // 4
    return Forecaster(replace(work, stages=known), guess, draws=draws)
