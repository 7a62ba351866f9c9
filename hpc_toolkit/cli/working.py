"""The command ``hpctk work``; this module imports no command line framework."""

from __future__ import annotations

import gc
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option, Panels, flag, many
from hpc_toolkit.system.quantities import counted, format_duration, parse_duration, parse_size
from hpc_toolkit.system.ranks import RankInfo, host_name, other_hosts, other_job
from hpc_toolkit.system.record import replace
from hpc_toolkit.system.terminal import note, printable

if TYPE_CHECKING:
    from hpc_toolkit.cli.help import Commands
    from hpc_toolkit.engines.raydriver import RaySettings
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.worker.worker import WorkerOptions


_IDLE_EXIT_IN_SLURM_S = 600.0
_LEAVE_BEFORE_END_S = 30.0

FAIL_ON_FAILED = "Exit with 1 if items have failed for good."

PANELS: Panels = {
    "Options": (
        Option("workers", "Local workers. [default: one per GPU, else 1; in a step 1]", "N"),
        Option(
            "deadline", "Exit before this time, or @EPOCH. [default: the job's end]", "DURATION"
        ),
        Option(
            "idle_exit", "Exit after this time without work. [default: 10min in a job]", "DURATION"
        ),
        Option("lease", "Silence after which a remote worker is dead.", "DURATION", hidden=True),
        Option("grace", "Time to finish an item when asked to exit.", "DURATION", hidden=True),
        many("has", "What each worker has for needs: licence=2, or a feature", "NAME[=N]")._replace(
            variable="HPCTK_HAS"
        ),
        flag("strict_code", "Fail if the code has changed since init."),
        flag("fail_on_failed", FAIL_ON_FAILED),
        Option("engine", "Start processes or actors of Ray.", "processes|ray", default="processes"),
    ),
    "Resources of each local worker": (
        Option("cpus_per_worker", "Bind each worker to N CPUs, on one NUMA node if possible.", "N"),
        Option(
            "gpus_per_worker", "GPUs; 0.5 shares one, 0 hides all. [default: one each]", "NUMBER"
        ),
        Option("memory_per_worker", "Memory limit; Python raises MemoryError beyond it.", "SIZE"),
    ),
    "Monitoring": (Option("monitor", "Log the load of this host.", "", variable="HPCTK_MONITOR"),),
    "Ray": (Option("ray_address", "Cluster. [default: auto: $RAY_ADDRESS]", "auto|HOST:PORT"),),
}
"""Options of ``hpctk work``, by the panel of the help that shows them."""


def register(app: Commands) -> None:
    from hpc_toolkit.cli.arguments import RunArgument
    from hpc_toolkit.cli.help import LIST

    app.add(work, PANELS, panel=LIST, arguments={"run": RunArgument})


def work(run: str | None, **given: Any) -> None:
    """Process the items of a run with local workers.

    Inside an srun step this process becomes one worker, or starts several that divide the CPUs,
    GPUs and memory of its task; with --engine ray the workers are actors.
    Exits with 0 when all items are finished, failed items included, and with 75 when items are left
    because time is up or the worker was asked to exit. ^C lets the running items finish.

    Examples:
        hpctk work runs/eval --workers 4
        hpctk work runs/eval --deadline 2h --monitor
    """
    sys.exit(prepare_work(run, **given)())


def prepare_work(run: str | None, **given: Any) -> Callable[[], int]:
    """Open the run and import all that a worker needs; the work itself gives the exit code."""
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.layout import find_run
    from hpc_toolkit.worker.code import executed

    found = Run.open(find_run(run))
    executed(found.paths, found.manifest, strict=bool(given["strict_code"]))
    options = _worker_options(given)
    rank, on_ray = RankInfo.from_environ(), given["engine"] == "ray"
    if on_ray:
        rank = replace(rank, in_step=False)  # the driver of actors is not a rank
    shares = read_shares(
        given["cpus_per_worker"], given["gpus_per_worker"], given["memory_per_worker"], rank
    )
    settings = ray_settings(given["ray_address"], shares, on_ray=on_ray)
    for name in ("rundir.trust", "worker.pool"):  # as Run.work would, after the others
        importlib.import_module(f"hpc_toolkit.{name}")
    # Imported objects are not garbage, and need not be looked at.
    gc.freeze()
    gc.enable()
    work_now = partial(_work, found, rank, options, shares, settings, given)
    fail_on_failed = bool(given["fail_on_failed"])
    if fail_on_failed and rank.in_step:  # a rank does not see the end of the others
        message = "--fail-on-failed: not available in a Slurm step"
        raise ConfigError(message, hint="use 'hpctk status RUN --check' outside the step")
    return lambda: exit_code(found, work_now(), fail_on_failed=fail_on_failed)


def exit_code(run: Run, code: int, *, fail_on_failed: bool) -> int:
    """The exit code of work that ended with ``code``: 1 for failed items, if that is wanted."""
    if code == 0 and fail_on_failed:
        from hpc_toolkit.report.panel import failed_items

        return int(failed_items(run.status(forecast=False)) > 0)
    return code


def _work(
    run: Run,
    rank: RankInfo,
    options: WorkerOptions,
    shares: Shares,
    on_ray: RaySettings | None,
    given: dict[str, Any],
) -> int:
    workers = given["workers"]
    with monitored(run.paths, rank, wanted=bool(given["monitor"])):
        if on_ray is not None:
            from hpc_toolkit.engines.raydriver import work_on_ray

            return with_progress(run, partial(work_on_ray, run, workers, options, on_ray))
        if rank.in_step:
            if workers is not None and workers > 1:
                shares = divide_task(shares, rank, workers)
            return run.work(None if workers == 1 else workers, options, shares=shares)
        spans = any("nodes" in (stage.needs or {}) for stage in run.manifest.stages)
        if not spans and (warning := unused(workers, os.environ)):
            note(warning, "warning")
        from hpc_toolkit.system.gpus import visible_gpus

        count = workers if workers is not None else shares.workers_on(len(visible_gpus()))
        if shares:
            from hpc_toolkit.system.binding import place_workers, read_machine

            for worker, place in enumerate(place_workers(read_machine(), shares, count)):
                print(f"worker {worker}: {place}", file=sys.stderr)
        return with_progress(run, partial(run.work, count, options, shares=shares))


def unused(workers: int | None, environ: Mapping[str, str]) -> str:
    """Return a warning about hosts or tasks of the job without workers; outside a step."""
    hosts, starter = other_hosts(environ)
    if hosts > 1:
        here = f"this job has {hosts} hosts; these workers start on this one only"
        return f"{here}; '{starter} hpctk work' uses all"
    tasks, nodes = environ.get("SLURM_NTASKS", "1"), environ.get("SLURM_JOB_NUM_NODES", "1")
    if (tasks, nodes) == ("1", "1") or (workers and nodes == "1"):
        return ""
    where = "these workers start on this host only; 'srun hpctk work' uses all tasks"
    return f"this job has {tasks} tasks, nodes: {nodes}; {where}"


def divide_task(shares: Shares, rank: RankInfo, workers: int) -> Shares:
    """The shares of the workers of this task of a step, which gets its own GPUs and CPUs before."""
    from hpc_toolkit.system.binding import bind_rank, place_workers, read_machine
    from hpc_toolkit.system.gpus import rank_environment

    os.environ.update(rank_environment(os.environ))
    bind_rank()
    shares, machine = replace(shares, divided=True), read_machine()
    # What job scripts set, for one worker in a task.
    if os.environ.get("OMP_NUM_THREADS") == os.environ.get("SLURM_CPUS_PER_TASK"):
        os.environ.pop("OMP_NUM_THREADS", None)
    first, other, *_ = place_workers(machine, shares, workers)
    if rank.rank == 0 and not first.cpus:
        have = counted(machine.cpus, "CPU")
        note(f"the {workers} workers of each task share its {have}", "warning")
    elif rank.rank == 0:
        said = f"{workers} workers in each task; of this one the first has {first}"
        print(f"{said}; the second {other}", file=sys.stderr)
    return shares


def with_progress(run: Run, work_on: Callable[[], int]) -> int:
    """Work, and meanwhile keep a line on a terminal up to date.

    The last line says what happened and what to do next.
    """
    if sys.stderr.isatty():
        with progress_line(run.root):
            code = work_on()
    else:
        code = work_on()
    campaign = run.manifest.campaign is not None
    try:
        said = _closing(run.view, str(run.root), campaign=campaign)
    except OSError as error:  # what the workers reported still decides the exit code
        said = f"{run.root}: cannot be read now: {error.strerror}: hpctk status {run.root}"
    print(printable(said), file=sys.stderr)
    return code


def _closing(view: RunView, given: str, *, campaign: bool = False) -> str:
    """Return what happened in one line, and the commands to go on with.

    ``given`` is the run's path as messages name it. The coordinator of a campaign gathers itself.
    """
    import shlex  # ranks of a step do without it

    from hpc_toolkit.queue.left import pause_reason
    from hpc_toolkit.queue.state import ItemState

    view.poll()
    run, total, failed, left = shlex.quote(given), 0, 0, 0
    for stage in view.stages.values():
        for unit in stage.state.units.values():
            total += unit.unit.count
            if unit.clean is None:
                states = [state for _, state in stage.states(unit)]
                failed += states.count(ItemState.FAILED)
                left += states.count(ItemState.PENDING)
    items = f"{total:,} item{'s' * (total != 1)}"
    if view.complete and failed:
        return f"{given}: {failed:,} of {items} failed: hpctk status {run}; hpctk retry {run}"
    if view.complete:
        done = view.throughput
        took = f" in {format_duration(done.until - done.since)}" if done.until else ""
        return f"{given}: {items} done{took}{'' if campaign else f': hpctk gather {run}'}"
    reasons = [reason for stage in view.stages.values() if (reason := pause_reason(stage))]
    if reasons:
        return f"{given}: paused: {reasons[0]}; fix the cause, then hpctk retry {run}"
    follow = any(stage.spec.after and not stage.log.sealed for stage in view.stages.values())
    if not (left or follow):
        return f"{given}: all {items} of an open list are finished: hpctk status {run}"
    others = ", and others that follow" * follow
    return f"{given}: {left:,} of {items} left{others}: hpctk status {run}"


def _worker_options(given: dict[str, Any]) -> WorkerOptions:
    """A worker's settings from the options of the command."""
    from hpc_toolkit.worker.worker import WorkerOptions

    strict = bool(given["strict_code"])
    found: dict[str, Any] = {"deadline": _deadline(given["deadline"]), "strict_code": strict}
    if RankInfo.from_environ().job_id is not None:
        found["idle_exit_s"] = _IDLE_EXIT_IN_SLURM_S
    for name in ("idle_exit", "lease", "grace"):
        if given[name] is not None:
            where = f"--{name.replace('_', '-')}"
            found[f"{name}_s"] = parse_duration(given[name], where=where, zero=name == "grace")
    if given["has"]:
        from hpc_toolkit.system.needs import parse_has

        found["has"] = parse_has(given["has"], "--has")
    return WorkerOptions(**found)


def _deadline(given: str | None) -> float | None:
    """Epoch seconds by which to be gone."""
    if given is not None and not given.startswith("@"):
        return time.time() + parse_duration(given, where="--deadline")
    # Slurm 23 sets the first anew in each job; the rendered scripts set the second for older ones,
    # and a job that was submitted inside another may have inherited the other's.
    end = os.environ.get("SLURM_JOB_END_TIME") or os.environ.get("HPCTK_DEADLINE")
    text, margin = (given[1:], 0.0) if given is not None else (end, _LEAVE_BEFORE_END_S)
    if text is None:
        if other_job(os.environ) is None:
            return None
        from hpc_toolkit.system.ranks import job_end

        found = job_end()
        return found - margin if found is not None else None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if math.isfinite(found):
        return found - margin
    message = f"deadline {text!r} is not a time"
    hint = "write a duration (2h) or seconds since the epoch (@1790000000)"
    raise ConfigError(message, hint=hint)


def read_shares(cpus: int | None, gpus: float | None, memory: str | None, rank: RankInfo) -> Shares:
    """What the options say; a rank of Slurm takes its memory's limit at once."""
    from hpc_toolkit.system.binding import Place, Shares

    size = parse_size(memory, where="--memory-per-worker") if memory is not None else None
    shares = Shares(cpus=cpus, gpus=gpus, memory_bytes=size)
    if rank.in_step:
        for option, value in (("cpus", cpus), ("gpus", gpus)):
            if value is not None:
                message = f"--{option}-per-worker: srun has given this rank its {option}"
                hint = f"render the script with --{option}-per-task, and leave it out here"
                raise ConfigError(message, hint=hint)
        os.environ.update(Place(memory_bytes=size).environment())
    return shares


@contextmanager
def monitored(paths: RunPaths, rank: RankInfo, *, wanted: bool) -> Iterator[None]:
    """Sample this host beside the block; under Slurm one rank of each node does."""
    if not wanted or rank.local_rank > 0:
        yield
        return
    from hpc_toolkit.training.monitor import watching

    log = paths.monitor_log(host_name(), os.getpid())
    log.parent.mkdir(parents=True, exist_ok=True)  # the directory of a training may be new
    with watching(log):
        yield


def ray_settings(address: str | None, shares: Shares, *, on_ray: bool) -> RaySettings | None:
    """The settings of Ray; None where the workers are processes."""
    if not on_ray:
        if address is not None:
            message = "--ray-address needs --engine ray"
            raise ConfigError(message, hint="add --engine ray, or leave it out")
        return None
    from hpc_toolkit.engines.raydriver import AUTO, RaySettings

    return RaySettings(
        address=address if address is not None else AUTO,
        cpus_per_worker=shares.cpus,
        gpus_per_worker=shares.gpus,
        memory_per_worker=shares.memory_bytes,
    )


_REFRESH_S = 0.5


@contextmanager
def progress_line(root: Path) -> Iterator[None]:
    """Show the progress of a run on stderr, a terminal, while the block runs.

    A process of its own does so: a forecast needs numpy, and numpy's threads must not be in the
    process that forks workers.
    """
    import subprocess

    from hpc_toolkit.system.processes import die_with_parent

    with subprocess.Popen(
        # -P: no module of the user in the current directory replaces one of Python.
        [sys.executable, "-P", "-m", "hpc_toolkit.cli.working", str(root)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        # ^C is for the workers; the line stays until they have stopped.
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
    ) as child:
        try:
            yield
        finally:
            child.terminate()
            child.wait()
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


if __name__ == "__main__":
    from hpc_toolkit.report.panel import one_line
    from hpc_toolkit.run import Run
    from hpc_toolkit.system.terminal import split_at

    run = Run.open(sys.argv[1])
    while True:
        room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
        sys.stderr.write(f"\r{split_at(printable(one_line(run.status())), room)[0]}\x1b[K")
        sys.stderr.flush()
        time.sleep(_REFRESH_S)
