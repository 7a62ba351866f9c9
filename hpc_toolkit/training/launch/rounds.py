"""Rounds in which the nodes of a launch meet: all ranks start together, and again after a failure.

Nothing of one round is read in another: the keys carry its number, and the store in which the
ranks' own process group meets is made anew. Torch's own rendezvous keeps both, and a new round
that meets stale keys hangs (pytorch issue 135712).
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.training.launch.meeting import Address, NodesMissingError
from hpc_toolkit.training.launch.outcome import SAVED

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 0.05
_LOOK_S = 0.5
FAREWELL_S = 5.0
"""How long others may take to see that a launch is over, which they ask twice a second."""


class Store(Protocol):
    """What is needed of torch's key-value store."""

    def set(self, key: str, value: str) -> None:
        """Give a key a value."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        ...


class RendezvousLostError(HpcToolkitError):
    """The node that holds the store is gone: without a word, unless it bears that node's code."""

    # A node that fails says so before it leaves, so this one was lost, and all may start again.
    exit_code = SAVED


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a node ended its part of a launch."""

    node: int
    """Its number."""
    host: str
    code: int
    """Its exit code."""
    reason: str
    """One line for people."""


def ended_message(ending: Ending) -> str:
    """What the other nodes say of it."""
    return f"node {ending.node} ({ending.host}) has ended: {ending.reason}"


class Rounds:
    """One node's part of a launch."""

    def __init__(
        self,
        store: Store,
        *,
        node: int,
        nodes: int,
        host: str,
        timeout_s: float,
        open_store: Callable[[], tuple[Address, object]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take part as number ``node`` of ``nodes``.

        Args:
            store: what all nodes share.
            node: number of this node; node 0 makes the stores of the ranks.
            nodes: how many there are.
            host: the name of this one, for messages.
            timeout_s: how long to wait for all nodes in each round.
            open_store: makes a store for ranks: its address, and what keeps it open.
            clock: seconds that never go back.
            sleep: waits so many seconds.
        """
        self.number = -1
        self.nodes = nodes
        self._store, self._node, self._host = store, node, host
        self._timeout_s, self._open_store = timeout_s, open_store
        self._clock, self._sleep = clock, sleep
        self._held: object = None
        self._looked_at = -_LOOK_S
        self._wanted = False
        self._ending: Ending | None = None
        self._finished = self._all_done = False

    def join(self) -> Address:
        """Begin the next round as soon as all nodes want it; where its ranks meet.

        A node that takes the place of one that was lost comes to rounds that have begun: it wants
        the next one, and the others follow.

        Raises:
            NodesMissingError: some did not come in time.
            RendezvousLostError: the node that holds the store is gone.
        """
        number = self.number + 1 if self.number >= 0 else self._first()
        self._finished = self._all_done = False
        self._set("wanted", str(number))
        self._set(f"round/{number}/node/{self._node}", self._host)
        address_key = f"round/{number}/address"
        if self._node == 0:
            self._wait_for([f"round/{number}/node/{node}" for node in range(self.nodes)], number)
            # What the last round's ranks shared is closed before the new one's is opened.
            self._held = None
            address, self._held = self._open_store()
            self._set(address_key, str(address))
        else:
            self._wait_for([address_key], number)
        self.number = number
        self._wanted = False
        return Address.parse(self._get(address_key))

    def _first(self) -> int:
        number = int(self._get("wanted")) if self._check(["wanted"]) else 0
        return number + self._check([f"round/{number}/address"])

    def wanted(self) -> bool:
        """Whether another node wants the next round."""
        self._look()
        return self._wanted

    def ended(self, *, at_once: bool = False) -> Ending | None:
        """How another node ended; None while none has, or where the store does not say."""
        if at_once:
            self._looked_at = -_LOOK_S
            with suppress(RendezvousLostError):
                self._look()
        else:
            self._look()
        return self._ending

    def finish(self) -> bool:
        """Say that the ranks of this node are done; whether those of all nodes are."""
        if self.nodes == 1:
            return True
        if not self._finished:
            self._set(f"round/{self.number}/done/{self._node}", "")
            self._finished = True
        self._look()
        return self._all_done

    def done_everywhere(self) -> bool:
        """Say that the ranks of this node are done, and wait for those of the others.

        False once another node wants the next round, or has ended. Torch's agent would ask again
        only when it looks at its ranks, by when node 0 and the store may be gone.
        """
        while not self.finish():
            if self._wanted or self._ending is not None:
                return False
            self._sleep(_LOOK_S)
        return True

    def end(self, code: int, reason: str) -> None:
        """Tell the other nodes that this one is leaving before its ranks are done."""
        if self.nodes > 1 and self._ending is None:
            ending = Ending(self._node, self._host, code, reason)
            with suppress(RendezvousLostError):
                self._set("ending", json.dumps(asdict(ending)))

    def leave(self, patience_s: float = FAREWELL_S, *, together: bool = False) -> None:
        """Leave: node 0, which holds the store, waits so long until the others have left.

        With ``together`` every node does, since srun may end all tasks as soon as one has ended.
        """
        with suppress(RendezvousLostError):
            self._set(f"left/{self._node}", "")
            end = self._clock() + patience_s
            came = [n for n in range(self.nodes) if self._check([f"round/0/node/{n}"])]
            left = [f"left/{node}" for node in came]
            while (together or self._node == 0) and self._clock() < end and not self._check(left):
                self._sleep(_POLL_S)
        self._held = None

    def _look(self) -> None:
        """Ask the store, at most twice a second: ranks are looked at far more often."""
        now = self._clock()
        # Whoever knows that another node has ended asks no more: the store may be gone.
        if self.nodes == 1 or self._ending is not None or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        self._wanted = int(self._get("wanted")) > self.number
        self._ending = self._read_ending()
        done = [f"round/{self.number}/done/{node}" for node in range(self.nodes)]
        self._all_done = self._finished and self._check(done)

    def _read_ending(self) -> Ending | None:
        if not self._check(["ending"]):
            return None
        ending = Ending(**json.loads(self._get("ending")))
        return ending if ending.node != self._node else None

    def _wait_for(self, keys: list[str], number: int) -> None:
        """Wait in short steps, since a signal is not seen inside torch's own waiting."""
        end = self._clock() + self._timeout_s
        while not self._check(keys):
            if (ending := self._read_ending()) is not None:
                lost = RendezvousLostError(ended_message(ending))
                lost.exit_code = ending.code
                raise lost
            if self._clock() >= end:
                raise self._missing(number)
            self._sleep(_POLL_S)

    def _missing(self, number: int) -> NodesMissingError:
        absent = [
            str(node)
            for node in range(self.nodes)
            if not self._check([f"round/{number}/node/{node}"])
        ]
        which = f"node {', '.join(absent)} of {self.nodes}" if absent else "node 0"
        again = "" if number == 0 else f" to start again (round {number})"
        message = f"{which} did not come{again} within {self._timeout_s:g} s"
        hint = "see that node's own output; --start-timeout waits longer"
        return NodesMissingError(message, hint=hint)

    def _set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def _get(self, key: str) -> str:
        value: bytes = self._ask(self._store.get, key)
        return value.decode()

    def _check(self, keys: list[str]) -> bool:
        return bool(self._ask(self._store.check, keys))

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError as error:  # torch's DistError
            message = "node 0, where all nodes of this launch meet, does not answer"
            hint = "its output tells why; ranks of this node were stopped"
            raise RendezvousLostError(message, hint=hint) from error
