"""Torch's elastic agent, extended for saved states, lost nodes and signals."""

from __future__ import annotations

import functools
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.training.launch.outcome import SAVED, RankFailure, saved
from hpc_toolkit.training.launch.ranklogs import drop_if_torn
from hpc_toolkit.training.launch.rendezvous import ended_message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup

    from hpc_toolkit.training.launch.rendezvous import Ending, Rounds


class Watch:
    """Evaluates the exit codes of the ranks of one round."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Give ranks ``patience_s`` to save their state once others have saved theirs."""
        self.ended_first: frozenset[int] = frozenset()
        """Local ranks that failed before the others were told to end."""
        self._patience_s, self._clock = patience_s, clock
        self._since: float | None = None

    def verdict(self, codes: Mapping[int, int | None]) -> Literal["go", "wait", "stop"]:
        """Decide whether to go on, to wait for ranks that are leaving, or to stop the others.

        Args:
            codes: exit code of each rank, by local rank; None while it runs.
        """
        failed = frozenset(local for local, code in codes.items() if code)
        if not failed:
            return "go"
        self.ended_first = failed
        if None not in codes.values():
            return "go"
        if any(codes[local] != SAVED for local in failed):
            # The other ranks would wait for the failed one forever.
            return "stop"
        return "wait" if self._patient() else "go"

    def follows(self, ending: Ending, *, running: bool) -> bool:
        """Return whether this node ends now because another node has ended.

        If that node's ranks saved their state, ranks that still run here get time to save theirs.
        """
        return not (running and ending.code == SAVED and self._patient())

    def _patient(self) -> bool:
        if self._since is None:
            self._since = self._clock()
        return self._clock() - self._since < self._patience_s


_AFTER_FAILURE_S = 5
"""How long the remaining ranks get to exit after one has failed; they cannot continue."""


class NodeEndedError(HpcToolkitError):
    """Another node ended before the ranks of this node were done."""

    def __init__(self, message: str, *, hint: str = "", ending: Ending | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ending = ending
        """How the other node ended."""


class LeavingError(HpcToolkitError):
    """A warning signal came while no rank was running that could save its state."""

    exit_code = SAVED


@functools.cache
def agent_class() -> type[Any]:
    """Return the agent's class; torch is imported only when it is needed."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        """Starts the ranks of this node, watches them, and starts them again."""

        rounds: Rounds | None = None
        """Where the nodes meet; None with torch's own rendezvous."""
        meeting = True
        """Whether the agent is waiting for other nodes, so that no rank is running."""
        watch: Watch
        """Evaluates the exit codes of this round's ranks."""

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            self.meeting = True
            super()._rendezvous(worker_group)
            self.meeting = False
            self.watch = Watch(self._shutdown_timeout)
            if self.rounds is not None:
                # Every node counts a restart, whichever node the failed rank was on.
                self._remaining_restarts = worker_group.spec.max_restarts - self.rounds.number

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            return monitored(self, lambda: super(Agent, self)._monitor_workers(worker_group))

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            self._shutdown(timeout=min(_AFTER_FAILURE_S, self._shutdown_timeout))

        def _exit_barrier(self) -> None:
            # With rounds, all nodes are already done, and the store may be gone.
            if self.rounds is None:
                super()._exit_barrier()  # type: ignore[no-untyped-call] # torch's

    return Agent


def monitored(agent: Any, look: Callable[[], RunResult]) -> RunResult:
    """Check the ranks of this node, then whether another node has ended.

    Raises:
        NodeEndedError: another node has ended.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

    verdict = agent.watch.verdict(rank_codes(agent))
    if verdict == "wait":
        return RunResult(state=WorkerState.HEALTHY)
    if verdict == "stop":
        end_ranks(agent)
    for local, code in rank_codes(agent).items():
        if code:
            drop_if_torn(agent._pcontext.error_files[local])
    result = look()
    if result.state == WorkerState.FAILED and saved(ended_codes(agent)):
        agent._remaining_restarts = 0
    if agent.rounds is None:
        return result
    if result.state == WorkerState.SUCCEEDED and not agent.rounds.done_everywhere():
        # A rank on another node may still fail, and then all ranks restart.
        result = RunResult(state=WorkerState.HEALTHY)
    if result.state == WorkerState.HEALTHY:
        follow(agent, agent.rounds.ended())
    return result


def rank_codes(agent: Any) -> dict[int, int | None]:
    """Return the exit code of each rank of this node, by local rank; None while it runs."""
    context: Any = agent._pcontext
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers is not None:
        return {local: handler.proc.poll() for local, handler in handlers.items()}
    processes = getattr(getattr(context, "_pc", None), "processes", ())
    return {local: process.exitcode for local, process in enumerate(processes)}


def ended_codes(agent: Any) -> list[int]:
    """Return the exit codes of the ranks that have ended."""
    return [code for code in rank_codes(agent).values() if code is not None]


def end_ranks(agent: Any) -> None:
    """Terminate ranks that cannot continue; those that do not exit in time are killed."""
    # Only ranks that are subprocesses: torch itself ends forked ranks, in its own order.
    if hasattr(agent._pcontext, "subprocess_handlers"):
        agent._pcontext.close(signal.SIGTERM, min(_AFTER_FAILURE_S, agent._shutdown_timeout))


def follow(agent: Any, ending: Ending | None) -> None:
    """End the ranks of this node if another node has ended.

    Raises:
        NodeEndedError: another node has ended, and the ranks of this node were terminated.
    """
    running = None in rank_codes(agent).values()
    if ending is None or not agent.watch.follows(ending, running=running):
        return
    end_ranks(agent)
    raise NodeEndedError(ended_message(ending), ending=ending)


def rank_failures(agent: Any) -> list[RankFailure]:
    """Return the ranks of this node that ended with a code other than 0."""
    workers = agent.get_worker_group().workers
    return [
        RankFailure(
            rank=workers[local].global_rank, code=code, first=local in agent.watch.ended_first
        )
        for local, code in rank_codes(agent).items()
        if code
    ]


def forward(agent: Any, number: int) -> None:
    """Send a warning signal to the running ranks, not to their children, which may not handle it.

    Raises:
        LeavingError: no rank is running, because the nodes are meeting.
    """
    if agent is None or agent.meeting:
        message = f"{signal.Signals(number).name} came before the ranks had started"
        raise LeavingError(message, hint="start it again; nothing was done yet in this round")
    codes = rank_codes(agent)
    for local, pid in agent._pcontext.pids().items() if codes else ():
        if codes[local] is None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
