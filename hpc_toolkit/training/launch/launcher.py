"""``hpctk launch``: run the same training script on a laptop and on the nodes of a job.

An agent on each node starts its ranks, watches them and restarts them. A task that srun started
becomes a rank itself, and no agent runs beside it. A child of rank 0 serves the store in which the
ranks meet. Rank 0 takes the port before it publishes it, so that two jobs on a node cannot choose
the same port.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from hpc_toolkit.errors import PASSING, TRY_AGAIN, ConfigError, HpcToolkitError, TryAgainLaterError
from hpc_toolkit.slurm.batch.node import usable_gpus
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.processes import WARNINGS, adopt_orphans
from hpc_toolkit.system.ranks import host_name, other_job
from hpc_toolkit.training.launch import meeting
from hpc_toolkit.training.launch import plan as plans
from hpc_toolkit.training.launch.meeting import Address
from hpc_toolkit.training.launch.plan import Plan, Request, Step
from hpc_toolkit.training.launch.rank import ENDING, ignore_warnings
from hpc_toolkit.training.launch.ranks import Ranks, make_next, rank_variables
from hpc_toolkit.training.launch.rendezvous import FAREWELL_S, Place, Rounds, open_rounds
from hpc_toolkit.training.progress import (
    Outcome,
    exit_code,
    failure_error,
    root_cause,
    saved,
    signal_name,
)


def launch(request: Request) -> Outcome:
    """Start the ranks of this node and wait until they have ended; this process does nothing else.

    If srun started every rank, it becomes one and does not return. Otherwise signals do not end it
    once the outcome is known. Raises HpcToolkitError if the launch cannot start; nothing was
    started.
    """
    plan = planned(request)
    if importlib.util.find_spec("torch") is None:
        message = "launch needs torch, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="torch"))
    environ = {**os.environ, **surroundings(plan, os.environ)}
    if plan.form == "task":
        become(command(request), {**environ, **join_ranks(plan)})
    if told := plans.left_out(request, plan):
        sys.stderr.write(f"warning: {told}\n")
    return run_agent(plan, command(request), environ)


def planned(request: Request) -> Plan:
    """Return the plan of :func:`launch` for this process, without starting anything."""
    request = plans.check_request(request)
    step = Step.from_environ()
    gpus = usable_gpus(os.environ)
    # Slurm may grant GPUs that do not exist, as in a lab.
    driver = any(os.path.exists(one) for one in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    backend = request.backend or ("nccl" if gpus and driver else "gloo")
    if step is not None and not step.per_node:
        return plans.task_plan(request, step, backend=backend)
    if (asked := request.options.get("nproc_per_node")) is not None:
        ranks = count_ranks(str(asked))
    elif step is not None:
        granted = os.environ.get("SLURM_GPUS_ON_NODE", "")
        ranks = max(1, gpus or (int(granted) if granted.isdecimal() else 0))
    else:
        ranks = 1
    return plans.make_plan(request, step=step, ranks=ranks, backend=backend)


def command(request: Request) -> list[str]:
    if request.options.get("no_python"):
        return [request.script, *request.arguments]
    module = ["-m"] if request.options.get("module") else []
    return [sys.executable, "-u", *module, request.script, *request.arguments]


def surroundings(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every rank of this node gets in addition to torchrun's."""
    found = {"HPCTK_BACKEND": plan.backend}
    if plan.run_dir is not None:
        found["HPCTK_RUN_DIR"] = str(plan.run_dir)
    if end := environ.get("SLURM_JOB_END_TIME"):
        found["HPCTK_DEADLINE"] = end
    elif "HPCTK_DEADLINE" not in environ and other_job(environ) is not None:
        from hpc_toolkit.system.ranks import job_end

        if (job_ends := job_end(environ)) is not None:
            found["HPCTK_DEADLINE"] = f"{job_ends:.0f}"
    if "OMP_NUM_THREADS" not in environ:
        # Each srun task has its own CPUs; the ranks of an agent share the agent's CPUs.
        sharing = plan.ranks if plan.form == "agent" else 1
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharing))
    return found


def count_ranks(text: str) -> int:
    """Return the number of ranks that ``--nproc-per-node`` means on this node.

    Raises ConfigError if it means none.
    """
    count = int(text) if text.isdecimal() else 0
    if text in ("gpu", "auto"):
        import torch

        count = torch.cuda.device_count()
    if text == "cpu" or (text == "auto" and not count):
        count = len(os.sched_getaffinity(0))
    if not count:
        message = f"--nproc-per-node {text} starts no rank"
        raise ConfigError(message, hint="write a number above 0, cpu, gpu or auto")
    return count


def join_ranks(plan: Plan) -> dict[str, str]:
    """Return torchrun's variables for this rank.

    Rank 0 starts a child that serves the store in which the ranks meet, and publishes its address
    in the run directory.

    Raises RunError if rank 0 did not publish its address in time, or the launch's name is taken.
    """
    step = Step.from_environ()
    assert step is not None
    if step.task == 0:
        served, _ = meeting.serve_apart("", plan.start_timeout_s, plan.rendezvous)
        address = Address(meeting.own_host(), served.port)
        meeting.publish(plan.rendezvous, address)
    else:
        address = meeting.find(plan.rendezvous, timeout_s=plan.start_timeout_s)
    place = Place(address, step.task - step.local, sum(step.tasks))
    return rank_variables(plan, place, step.local)


def become(command: list[str], environ: dict[str, str]) -> NoReturn:
    """Replace this process with the program.

    Raises ConfigError if the program cannot be started.
    """
    ignore_warnings()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606 - as in rank
    except OSError as error:
        message = f"{command[0]} cannot be started: {error.strerror}"
        raise ConfigError(message, hint="check that it exists on every node") from error


_POLL_S = 0.1


class SignalCameError(HpcToolkitError):
    """A signal came that ends the launch; its exit code is 128 + the signal's number."""


def run_agent(plan: Plan, command: list[str], environ: Mapping[str, str]) -> Outcome:
    """Start the ranks of this node and wait until they have ended for good.

    Signals stay ignored once the outcome is known, so that the exit code reports how the ranks
    ended. Children of ranks that have ended are ended as well.

    Raises ConfigError if no directory can be made for the logs.
    """
    temporary = plan.log_dir is None
    directory = plan.log_dir or Path(tempfile.mkdtemp(prefix="hpctk-launch-"))
    if not temporary and plan.nodes == 1:
        # An earlier launch in the same step has the same name.
        directory = make_next(directory)
    adopt_orphans()
    agent = Agent(plan, command, environ, directory)
    with contextlib.ExitStack() as stack:
        ignore_signals = signals(agent.warn)
        stack.callback(agent.end)
        try:
            outcome = agent.run(stack)
        except SignalCameError as came:
            outcome = agent.ended_by(came)
        except (HpcToolkitError, OSError) as error:
            agent.end()
            outcome = _stopped(error)
        ignore_signals()
        agent.leave(outcome)
    outcome = agent.counted(outcome)
    if temporary and outcome.log is None:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome


@dataclass
class Agent:
    """Starts the ranks of this node in each round."""

    plan: Plan
    command: list[str]
    environ: Mapping[str, str]
    directory: Path
    rounds: Rounds | None = None
    ranks: Ranks | None = None
    """The ranks of this round; None while the nodes meet."""

    def run(self, stack: contextlib.ExitStack) -> Outcome:
        plan = self.plan
        rounds = self.rounds = open_rounds(plan, stack)
        outcome = None
        while outcome is None:
            self.ranks = None
            place = rounds.join()
            self.ranks = ranks = Ranks(plan, self.directory, place, restart=rounds.number)
            ranks.start(self.command, self.environ)
            patience_s = plan.shutdown_timeout_s
            outcome = watch(ranks, rounds, max_restarts=plan.max_restarts, patience_s=patience_s)
        return outcome

    def warn(self, number: int) -> None:
        """Forward a warning signal to the ranks.

        Raises TryAgainLaterError if no rank is running, because the nodes are meeting.
        """
        if self.ranks is None:
            message = f"{signal_name(number)} came before the ranks had started"
            raise TryAgainLaterError(
                message, hint="start it again; nothing was done yet in this round"
            )
        self.ranks.warn(number)

    def counted(self, outcome: Outcome) -> Outcome:
        """Add the number of ranks and restarts to an outcome."""
        if self.rounds is None or self.ranks is None:
            return outcome
        return replace(outcome, ranks=self.ranks.world_size, restarts=self.rounds.number)

    def end(self) -> None:
        if self.ranks is not None:
            self.ranks.end()

    def ended_by(self, came: SignalCameError) -> Outcome:
        """End the ranks with the signal that came; return how the launch ended."""
        if self.ranks is not None:
            self.ranks.end(came.exit_code - 128, self.plan.shutdown_timeout_s)
            if saved(self.ranks.codes().values()):
                return Outcome(TRY_AGAIN)
        if self.rounds is not None and (ending := self.rounds.ended(at_once=True)) is not None:
            # srun ended this task because another node failed: exit with that node's code.
            return Outcome(ending.code, HpcToolkitError(str(ending)))
        return Outcome(came.exit_code, came)

    def leave(self, outcome: Outcome) -> None:
        """Tell the other nodes how this one ended, and wait for those that may still save."""
        if self.rounds is None:
            return
        if outcome.code:
            self.rounds.end(outcome.code, outcome.error.message if outcome.error else "saved")
        patience_s = self.plan.shutdown_timeout_s if outcome.code == TRY_AGAIN else FAREWELL_S
        self.rounds.leave(patience_s + _POLL_S, together=outcome.code == TRY_AGAIN)


def watch(
    ranks: Ranks,
    rounds: Rounds,
    *,
    max_restarts: int,
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome | None:
    """Watch the ranks of one round until they have ended on this node.

    When the first ranks have saved their state, here or on another node, the others get
    ``patience_s`` to do so. When a rank has failed, the others would wait for it forever.
    Returns None if all ranks start again.
    """
    leave_by = 0.0
    while True:
        codes = ranks.codes()
        running = None in codes.values()
        failed = [local for local, code in codes.items() if code]
        ending = rounds.ended()
        leaving = all(codes[local] == TRY_AGAIN for local in failed) and (
            bool(failed) or (ending is not None and ending.code == TRY_AGAIN)
        )
        if running and leaving:
            leave_by = leave_by or clock() + patience_s
        if running and leaving and clock() < leave_by:
            pass
        elif failed:
            return _after_failure(ranks, failed, restarts=rounds.number, most=max_restarts)
        elif ending is not None:
            ranks.end()
            return Outcome(ending.code, HpcToolkitError(str(ending)))
        elif not running and rounds.finish():
            return Outcome(0)
        elif rounds.wanted():
            ranks.end()
            return None
        sleep(_POLL_S)


def _after_failure(ranks: Ranks, failed: list[int], *, restarts: int, most: int) -> Outcome | None:
    """End the other ranks; return the outcome, or None to start all again."""
    ranks.end()
    if saved(ranks.codes().values()):
        return Outcome(TRY_AGAIN)
    if restarts < most:
        return None
    cause = root_cause(ranks.failures(failed))
    error = failure_error(cause, host=host_name(), restarts=restarts)
    return Outcome(exit_code(cause.code), error, cause.log)


def _stopped(error: HpcToolkitError | OSError) -> Outcome:
    """Turn an error of this node, such as a full disk, into an outcome for the other nodes."""
    if isinstance(error, HpcToolkitError):
        return Outcome(error.exit_code, error)
    if error.errno not in PASSING:
        raise error
    where = f"{error.filename}: " if error.filename else ""
    message = f"{where}{error.strerror}"
    return Outcome(TRY_AGAIN, HpcToolkitError(message, hint="fix that, and start it again"))


def signals(warn: Callable[[int], None]) -> Callable[[], None]:
    """Call ``warn`` on a warning signal; raise SignalCameError on one that ends the launch.

    Return a function that ignores all of them from then on, for when only the exit is left.
    """

    def end(number: int, _frame: object) -> None:
        for ending in ENDING:
            # The ranks are being ended: another signal must not interrupt that.
            signal.signal(ending, signal.SIG_IGN)
        came = SignalCameError(f"ended by {signal_name(number)}, and its ranks with it")
        came.exit_code = 128 + number
        raise came

    def ignore() -> None:
        for number in (*ENDING, *WARNINGS):
            signal.signal(number, signal.SIG_IGN)

    for number in WARNINGS:
        signal.signal(number, lambda number, _frame: warn(number))
    for number in ENDING:
        # nohup has SIGHUP ignored, so that the launch outlives the terminal.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    return ignore
