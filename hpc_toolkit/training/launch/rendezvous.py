"""The rendezvous of a launch: rounds, in a store that node 0 serves.

In a round all ranks start together, and again after a failure. A round never reads data of an
earlier one: its keys contain its number, and the ranks' own process group meets in a new store.
Torch's own rendezvous reuses both, and a new round that finds stale keys hangs (pytorch issue
135712).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import TRY_AGAIN, ConfigError, HpcToolkitError, RunError
from hpc_toolkit.system.options import spelled
from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.training.launch import meeting
from hpc_toolkit.training.launch.meeting import Address

if TYPE_CHECKING:
    from hpc_toolkit.training.launch.plan import Plan

_POLL_S = 0.05
_LOOK_S = 0.5
FAREWELL_S = 5.0
"""How long other nodes get to see that a launch is over; they ask twice a second."""


class Place(NamedTuple):
    """What the ranks of one node need to know of their round."""

    address: Address
    """Where the ranks of all nodes meet."""
    first: int
    """Number of this node's first rank."""
    world_size: int


class RendezvousLostError(HpcToolkitError):
    """The node that holds the store is gone, or another node ended (with that node's exit code)."""

    # A node that fails reports it before it leaves: this one was lost, and all may start again.
    exit_code = TRY_AGAIN


class Ending(NamedTuple):
    """How a node ended its part of a launch before its ranks were done."""

    node: int
    host: str
    code: int
    """Its exit code."""
    reason: str

    def __str__(self) -> str:
        """Return the message that the other nodes print."""
        return f"node {self.node} ({self.host}) has ended: {self.reason}"


@dataclass(kw_only=True)
class Rounds:
    """The rounds of a launch, as one of its nodes joins them."""

    plan: Plan
    """This node's plan; node 0 creates the stores of the ranks."""
    store: Any
    """torch's key-value store, which all nodes share."""
    open_store: Callable[[], tuple[Address, Callable[[], object]]]
    """Creates a store for ranks; returns its address and a function that closes it."""
    host: str = field(default_factory=host_name)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    number: int = -1
    """The number of this round, from 0, and so the number of restarts."""
    _close: Callable[[], object] = lambda: None
    _looked_at: float = -math.inf
    _wanted: bool = False
    _ending: Ending | None = None
    _finished: bool = False
    _all_done: bool = False

    def join(self) -> Place:
        """Begin the next round when all nodes want it.

        A node that replaces a lost one finds that rounds have already begun: it requests the next
        one, and the others follow.

        Raises RunError if some nodes did not come in time, or RendezvousLostError if the node that
        holds the store is gone or another node ended.
        """
        number = self.number + 1
        if self.number < 0 and self._check(["wanted"]):
            number = int(self._get("wanted"))
            number += self._check([f"round/{number}/ranks"])
        self._finished = self._all_done = False
        self._set("wanted", str(number))
        self._set(f"round/{number}/node/{self.plan.node_rank}", str(self.plan.ranks))
        if self.plan.node_rank == 0:
            nodes = self._of_nodes(f"round/{number}/node")
            self._wait_for(nodes, number)
            # Close the store of the last round's ranks before the new one is opened.
            self._close()
            address, self._close = self.open_store()
            counts = [int(self._get(node)) for node in nodes]
            self._set(f"round/{number}/ranks", json.dumps([str(address), counts]))
        else:
            self._wait_for([f"round/{number}/ranks"], number)
        self.number = number
        self._wanted = False
        where, counts = json.loads(self._get(f"round/{number}/ranks"))
        return Place(Address.parse(where), sum(counts[: self.plan.node_rank]), sum(counts))

    def wanted(self) -> bool:
        """Return whether another node wants the next round."""
        self._look()
        return self._wanted

    def ended(self, *, at_once: bool = False) -> Ending | None:
        """Return how another node ended; None while none has.

        With ``at_once`` the store is asked immediately, and None also means that it is gone.
        """
        if at_once:
            self._looked_at = -math.inf
        try:
            self._look()
        except RendezvousLostError:
            if not at_once:
                raise
        return self._ending

    def finish(self) -> bool:
        """Report that the ranks of this node are done; return whether those of all nodes are."""
        if self.plan.nodes == 1:
            return True
        if not self._finished:
            self._set(f"round/{self.number}/done/{self.plan.node_rank}", "")
            self._finished = True
        self._look()
        return self._all_done

    def end(self, code: int, reason: str) -> None:
        """Tell the other nodes that this node leaves before its ranks are done."""
        if self.plan.nodes > 1 and self._ending is None:
            ending = Ending(self.plan.node_rank, self.host, code, reason)
            with suppress(RendezvousLostError):
                self._set("ending", json.dumps(ending))

    def leave(self, patience_s: float = FAREWELL_S, *, together: bool = False) -> None:
        """Leave; node 0, which holds the store, waits up to ``patience_s`` until all have left.

        With ``together`` every node waits, since srun may end all tasks as soon as one has ended.
        """
        with suppress(RendezvousLostError):
            self._set(f"left/{self.plan.node_rank}", "")
            end = self.clock() + patience_s
            came = zip(self._of_nodes("round/0/node"), self._of_nodes("left"), strict=True)
            left = [key for joined, key in came if self._check([joined])]
            while (
                (together or self.plan.node_rank == 0)
                and self.clock() < end
                and not self._check(left)
            ):
                self.sleep(_POLL_S)
        self._close()

    def _look(self) -> None:
        """Ask the store, at most twice a second: the agent checks its ranks far more often."""
        now = self.clock()
        # Once another node has ended, the store may be gone.
        if self.plan.nodes == 1 or self._ending is not None or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        self._wanted = int(self._get("wanted")) > self.number
        self._ending = self._read_ending()
        done = self._of_nodes(f"round/{self.number}/done")
        self._all_done = self._finished and self._check(done)

    def _read_ending(self) -> Ending | None:
        if not self._check(["ending"]):
            return None
        ending = Ending(*json.loads(self._get("ending")))
        return ending if ending.node != self.plan.node_rank else None

    def _wait_for(self, keys: list[str], number: int) -> None:
        """Wait for keys in short steps, since signals are not handled inside torch's own wait."""
        end = self.clock() + self.plan.start_timeout_s
        while not self._check(keys):
            if (ending := self._read_ending()) is not None:
                lost = RendezvousLostError(str(ending))
                lost.exit_code = ending.code
                raise lost
            if self.clock() >= end:
                raise self._missing(number)
            self.sleep(_POLL_S)

    def _missing(self, number: int) -> RunError:
        nodes = enumerate(self._of_nodes(f"round/{number}/node"))
        absent = [str(node) for node, key in nodes if not self._check([key])]
        which = f"node {', '.join(absent)} of {self.plan.nodes}" if absent else "node 0"
        again = "" if number == 0 else f" to start again (round {number})"
        message = f"{which} did not come{again} within {format_duration(self.plan.start_timeout_s)}"
        hint = "see that node's own output; --start-timeout waits longer"
        return RunError(message, hint=hint)

    def _of_nodes(self, name: str) -> list[str]:
        return [f"{name}/{node}" for node in range(self.plan.nodes)]

    def _set(self, key: str, value: str) -> None:
        self._ask(self.store.set, key, value)

    def _get(self, key: str) -> str:
        value: bytes = self._ask(self.store.get, key)
        return value.decode()

    def _check(self, keys: list[str]) -> bool:
        return bool(self._ask(self.store.check, keys))

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:  # torch's DistError
            message = "node 0, the meeting point of this launch, does not answer"
            hint = "see the output of node 0; the ranks of this node were stopped"
            raise RendezvousLostError(message, hint=hint) from error


def open_rounds(plan: Plan, stack: contextlib.ExitStack) -> Rounds:
    """Return the rounds of a launch once this node has reached node 0.

    Raises ConfigError if node 0 cannot listen on its port, or RunError if node 0 did not come in
    time or the name of this launch is taken.
    """
    if plan.nodes == 1:
        return Rounds(plan=plan, store=_OwnKeys(), open_store=partial(_serve_alone, plan))
    host = plan.local_addr or plan.host or meeting.own_host()

    def open_store() -> tuple[Address, Callable[[], object]]:
        opened = [_serve(0, plan.start_timeout_s)]
        return Address(host, opened[0].port), opened.clear

    return Rounds(plan=plan, store=_meet(plan, host, stack), open_store=open_store)


class _OwnKeys(dict[str, bytes]):
    """The keys of a node without others, which so needs no store of torch."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return self.keys() >= {*keys}


def _serve_alone(plan: Plan) -> tuple[Address, Callable[[], object]]:
    address, child = meeting.serve_apart("127.0.0.1", plan.start_timeout_s)

    def close() -> None:
        child.kill()
        child.wait()

    return address, close


def _meet(plan: Plan, host: str, stack: contextlib.ExitStack) -> Any:
    """Return the store that all nodes share and node 0 serves."""
    if plan.node_rank == 0:
        store = _serve(plan.port, plan.start_timeout_s)
        if plan.meeting == "directory":
            meeting.publish(plan.rendezvous, Address(host, store.port))
            stack.callback(plan.rendezvous.unlink, missing_ok=True)
        return store
    address = Address(plan.host, plan.port)
    if plan.meeting == "directory":
        address = meeting.find(plan.rendezvous, timeout_s=plan.start_timeout_s)
    meeting.wait_for_listener(address, timeout_s=plan.start_timeout_s)
    return meeting.open_store(address, plan.start_timeout_s, serve=False)


def _serve(port: int, timeout_s: float) -> Any:
    """Serve a store from this process; with port 0 the kernel chooses a free port."""
    try:
        return meeting.open_store(Address("127.0.0.1", port), timeout_s, serve=True)
    except RuntimeError as error:
        message = f"cannot listen on port {port}: {str(error).splitlines()[0]}"
        option = spelled("master_port")
        hint = f"choose another port for all nodes with {option}, or use only --run-dir"
        raise ConfigError(message, hint=hint) from error
