"""One node's part of a launch: start the ranks, watch them and restart them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import PASSING, TRY_AGAIN, HpcToolkitError, TryAgainLaterError
from hpc_toolkit.system.processes import WARNINGS, adopt_orphans
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.training.launch.outcome import (
    Outcome,
    exit_code,
    failure_error,
    root_cause,
    saved,
    signal_name,
)
from hpc_toolkit.training.launch.rank import ENDING
from hpc_toolkit.training.launch.ranks import Ranks, make_next
from hpc_toolkit.training.launch.rendezvous import FAREWELL_S, Rounds, open_rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hpc_toolkit.training.launch.plan import Plan

_POLL_S = 0.1


class SignalCameError(HpcToolkitError):
    """A signal came that ends the launch; its exit code is 128 + the signal's number."""


def run_agent(plan: Plan, command: list[str], environ: Mapping[str, str], *, last: bool) -> Outcome:
    """Start the ranks of this node and wait until they have ended for good.

    With ``last`` this process does nothing afterwards. Signals then stay ignored once the outcome
    is known, so that the exit code reports how the ranks ended. Children of ranks that have ended
    are then ended as well; in a program with other children they could not be told apart.

    Raises ConfigError if no directory can be made for the logs.
    """
    temporary = plan.log_dir is None
    directory = plan.log_dir or Path(tempfile.mkdtemp(prefix="hpctk-launch-"))
    if not temporary and plan.nodes == 1:
        # An earlier launch in the same step has the same name.
        directory = make_next(directory)
    if last:
        adopt_orphans()
    agent = Agent(plan, command, environ, directory, adopts=last)
    with contextlib.ExitStack() as stack:
        ignore_signals = stack.enter_context(signals(agent.warn, last=last))
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
    adopts: bool = False
    """Whether this process becomes the parent of orphans."""
    rounds: Rounds | None = None
    ranks: Ranks | None = None
    """The ranks of this round; None while the nodes meet."""

    def run(self, stack: contextlib.ExitStack) -> Outcome:
        """Run rounds until one is the last."""
        plan = self.plan
        rounds = self.rounds = open_rounds(plan, stack)
        outcome = None
        while outcome is None:
            self.ranks = None
            place = rounds.join()
            self.ranks = ranks = Ranks(
                plan, self.directory, place, restart=rounds.number, adopts=self.adopts
            )
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
        """End ranks that still run."""
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

    Returns:
        How the launch ended on this node; None if all ranks start again.
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


@contextlib.contextmanager
def signals(warn: Callable[[int], None], *, last: bool) -> Iterator[Callable[[], None]]:
    """Call ``warn`` on a warning signal; raise SignalCameError on one that ends the launch.

    Yield a function that ignores all of them from then on, for when only the exit is left. The
    earlier handlers are restored afterwards, unless the process does nothing else (``last``).
    Outside the main thread, which alone gets signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def end(number: int, _frame: object) -> None:
        for ending in ENDING:
            # The ranks are being ended: another signal must not interrupt that.
            signal.signal(ending, signal.SIG_IGN)
        came = SignalCameError(f"ended by {signal_name(number)}, and its ranks with it")
        came.exit_code = 128 + number
        raise came

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    before = {number: signal.getsignal(number) for number in (*ENDING, *WARNINGS)}
    for number in WARNINGS:
        signal.signal(number, lambda number, _frame: warn(number))
    for number in ENDING:
        # nohup has SIGHUP ignored, so that the launch outlives the terminal.
        if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield ignore
    finally:
        for number, handler in before.items() if not last else ():
            signal.signal(number, handler)
