"""The workers of a run on one node: one of them, the observer, watches other nodes for all.

It also looks for new items, if any of them waits, and tells the others when there are some.

They meet at an abstract socket (unix(7)), which the kernel frees when its process ends, however it
ends. So the observer sees at once when another worker of its node ends, and the others see when
the observer does; then one of them takes its place. No file is read for that. Whatever one of them
says, only exclusive names decide who works on a unit.
"""

from __future__ import annotations

import os
import socket
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.queue.control import ControlReader, Request, give_free
from hpc_toolkit.system.processes import readable
from hpc_toolkit.system.ranks import host_name, task_counts
from hpc_toolkit.worker.starting import meet

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.queue.assignment import Picker
    from hpc_toolkit.queue.pacing import Pacing
    from hpc_toolkit.system.clock import Clock

_SAYS_EVERY_S = 5.0
_SAYS_SOON_S = 1.0
"""Seconds between two messages that a worker waits; those with short items often begin to."""
_SILENT_S = 20.0
"""A worker that does not even write to another one of its node may be frozen."""
_MOST = 256


def watch_if_due(
    node: Node, picker: Picker, pacing: Pacing, control: ControlReader
) -> list[Request] | None:
    """Read what others ask and report, and look for deaths; None: it is not time for that."""
    node.say_whether_waiting(pacing.waits)
    news = node.tick()
    if node.ended or (node.added and node.entries > picker.entries):
        pacing.poll_now()
    picker.watch.moves()
    pacing.share_looks(alone=node.observes, others_wait_since=node.others_wait_since)
    if node.others_wait_since is not None and pacing.poll_due:
        picker.look_for_items(pacing)
    if node.has_others:
        node.show(picker.entries)
    if not (news or (node.observes and pacing.watch_due())):
        return None
    requests, notices = control.poll()
    for notice in notices:
        picker.liveness.take_notice(notice)
    picker.left.hear_of(control.free, pacing.workers)
    if not node.observes:
        pacing.watched(node.workers or pacing.workers)  # the observer says when to look again
        return requests
    picker.watch.met = node.met
    found = picker.notice_deaths(pacing.at_most, node.mates)
    with suppress(OSError):  # scans find them
        for one in found if picker.shared else ():
            give_free(picker.view.paths, one, picker.worker)
    watch = picker.watch
    node.tell(watch.living, news=control.news or bool(found))
    pacing.watched(watch.living, watch.lease_left_s, watch.nodes if picker.shared else None)
    return requests


class Node:
    """A worker's place among the workers of its run on this node."""

    def __init__(self, root: Path, worker: str, clock: Clock, *, local: bool) -> None:
        """``local``: each worker looks at all others, which costs little."""
        about = root.stat()
        # Workers that use the run through another mount do not share locks with these.
        host = zlib.crc32(os.fsencode(host_name()))  # a socket's name has 107 characters
        here = (os.getuid(), about.st_dev, about.st_ino, host)
        name = "\0hpctk-node-" + "-".join(map(str, here))
        self._name = "" if local else name
        self._worker, self._clock = worker, clock
        self._listener: socket.socket | None = None
        self._observer: socket.socket | None = None
        self._others: dict[int, socket.socket] = {}
        self._heard: dict[int, tuple[str, float, float | None]] = {}
        """The name of the worker at each socket, when it wrote last, and since when it waits."""
        self._says_at = self._said_at = self._told_at = 0.0
        self._ticked_at = clock.monotonic()
        self._new, self._alone, self._told = True, False, 0
        self.ended = False
        """Whether the last tick saw a worker of this node end: perhaps no item is left."""
        self.met: set[str] = set()
        """All workers of this node that this observer heard of."""
        self.workers = 0
        """Workers of the run that live, as the observer says; 0: unknown."""
        self.entries = 0
        """Entries of the logs that the observer has seen."""
        self.added = False
        """Whether the last tick heard of more entries than before."""
        self._waits = self._said_waits = False
        self._join(tries=100)

    @property
    def observes(self) -> bool:
        """Whether this worker watches other nodes: while its observer is frozen, it must."""
        return self._observer is None or self._ticked_at - self._told_at > _SILENT_S

    def say_whether_waiting(self, waits: bool) -> None:
        """Tell the observer soon if this worker begins to wait for items."""
        self._waits = waits
        new = waits and not self._said_waits and self._observer is not None
        if new and self._clock.monotonic() - self._said_at >= _SAYS_SOON_S:
            self._say()

    @property
    def has_others(self) -> bool:
        """Whether it is in contact with another worker of this node."""
        return self._observer is not None or bool(self._others)

    @property
    def others_wait_since(self) -> float | None:
        """When another worker of this node began to wait, the last of them; None: none waits."""
        waits = [since for _, _, since in self._heard.values() if since is not None]
        return max(waits, default=None)

    @property
    def wake_fds(self) -> list[int]:
        """What is readable when the observer of this worker says something."""
        return [] if self._observer is None else [self._observer.fileno()]

    @property
    def mates(self) -> set[str]:
        """Other workers of this node that live, as this observer knows."""
        return {name for name, at, _ in self._heard.values() if self._ticked_at - at < _SILENT_S}

    @property
    def watches_for(self) -> int:
        """As in :class:`hpc_toolkit.queue.presence.Presence`."""
        return 1 + len(self.mates) if self.observes else 0

    def of_the_step(self, workers: int) -> int:
        """Number of workers that watch as this one does, as far as is known at the start."""
        nodes = len(task_counts(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")))
        return nodes if nodes > 1 and self.observes else workers

    def _join(self, tries: int) -> None:
        self._listener, self._observer = meet(self._name, tries)
        if self._listener is not None:
            self._listener.setblocking(False)
        self._told_at = self._clock.monotonic()
        if self._observer is not None:
            self._say()

    def _say(self) -> None:
        self._said_at, self._said_waits = self._clock.monotonic(), self._waits
        self._says_at = self._said_at + _SAYS_EVERY_S
        with suppress(OSError):  # its queue is full, or it has ended, which the next look shows
            assert self._observer is not None
            self._observer.send(f"{self._waits:d} {self._worker}".encode())

    def tick(self) -> bool:
        """Exchange what there is, without waiting; whether there is news in ``control/``."""
        news, self._new, self.ended, self.added = self._new, False, False, False
        self._passed()
        if self._observer is None and self._listener is None and self._name:
            self._join(tries=1)
        if self._observer is not None:
            return self._hear(self._observer) or news
        if self._listener is not None:
            self.ended = self._serve(self._listener)
        return self.ended

    def _passed(self) -> None:
        """Count no silence while this process did not run: all may wait for the file server."""
        before, self._ticked_at = self._ticked_at, self._clock.monotonic()
        if (gap_s := self._ticked_at - before) > _SAYS_EVERY_S:
            self._told_at += gap_s
            self._heard = {fd: (one, at + gap_s, w) for fd, (one, at, w) in self._heard.items()}

    def _hear(self, observer: socket.socket) -> bool:
        news = False
        if self._clock.monotonic() >= self._says_at:
            self._say()
        with suppress(BlockingIOError):
            while True:
                try:
                    said = observer.recv(64)
                except ConnectionError:
                    said = b""
                if not said:
                    observer.close()
                    self._observer, self.ended = None, True
                    self._join(tries=1)
                    return True
                before, self._told_at = (self._told, self.entries), self._clock.monotonic()
                self._told, self.workers, self.entries = map(int, said.split())
                news |= self._told != before[0]
                self.added |= self.entries > before[1]
        alone, self._alone = self._alone, self.observes
        return news or self._alone > alone

    def _serve(self, listener: socket.socket) -> bool:
        """Whether a worker of this node ended."""
        from hpc_toolkit.worker.forkserver import is_own

        ended, now = False, self._clock.monotonic()
        for fd in readable(listener.fileno(), *self._others, timeout_s=0.0):
            if fd == listener.fileno():
                with suppress(OSError):
                    for _ in range(_MOST - len(self._others)):  # others may try without an end
                        other, _ = listener.accept()
                        other.setblocking(False)
                        if is_own(other):
                            self._others[other.fileno()] = other
                        else:
                            other.close()
                continue
            said = b""
            with suppress(ConnectionError):
                said = self._others[fd].recv(256)
            if said:
                waits, _, name = said.decode(errors="replace").partition(" ")
                since = self._heard.get(fd, ("", now, None))[2] or now
                self._heard[fd] = name, now, since if waits == "1" else None
                self.met.add(name)
            else:
                self._others.pop(fd).close()
                ended |= self._heard.pop(fd, None) is not None
        if now >= self._says_at:
            self.tell(self.workers, news=False)
        return ended

    def show(self, entries: int) -> None:
        """Note how many entries of the logs this worker has seen; as the observer, tell others."""
        if entries > self.entries:
            self.entries = entries
            if self._observer is None:
                self.tell(self.workers, news=False)

    def tell(self, workers: int, *, news: bool) -> None:
        """Tell the other workers of this node how many live, and whether to read ``control/``."""
        self.workers, self._says_at = workers, self._clock.monotonic() + _SAYS_EVERY_S
        self._told += news
        for other in self._others.values():
            with suppress(OSError):  # a frozen worker's queue is full; the next number tells it
                other.send(f"{self._told} {workers} {self.entries}".encode())

    def close(self) -> None:
        """Leave; another worker of the node becomes its observer."""
        for one in (self._listener, self._observer, *self._others.values()):
            if one is not None:
                one.close()
        self._listener = self._observer = None
        self._others.clear()
        self._heard.clear()
        self._name = ""
