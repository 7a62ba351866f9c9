"""A file server in simulated time: it counts requests, takes time for them, and shows names late.

While a simulation runs, the functions of ``os`` that its workers call on files of the run go
through a :class:`FileServer`. The files are real, in memory. The server adds to each call:

- its requests, as counted on NFSv4.2 ("File operations of a worker" in benchmarks/results.md): one
  to open and one to close, one to read if the file changed since this host read it, one for each
  sync, one to create or look up a name, and a listing by READDIR;
- their time: a round trip each, and the service time at the one server, where requests queue;
- the attribute cache of each host: for 30 s (60 s if nothing changed) a host does not find a name
  that was missing when it looked, unless it creates a name in that directory or lists it. A listing
  asks whether the directory has changed, and is complete.

Not modelled: delegations, write-back (the server never sees an unsynced write, and readers see it
at once), lost packets, slow hosts, disks. A file is fresh when it is opened, as NFS promises. The
calls of a worker between two waits are charged one after the other, but others see their effects
from the start: a name appears too early by the length of that burst.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from simulation.worker import VirtualClock

_TICK_S = 0.01
_CACHED_S, _LONGEST_S = 30.0, 60.0
"""acdirmin and acdirmax of nfs(5): the defaults."""
_NAMES = 600
"""Names in the answer to one READDIR."""
_OF_FILES = (
    "close",
    "fdatasync",
    "flock",
    "fsync",
    "ftruncate",
    "pread",
    "pwrite",
    "read",
    "write",
)
_OF_NAMES = ("listdir", "lstat", "open", "readlink", "stat", "symlink", "utime")


@dataclass(slots=True)
class _File:
    """An open file of the run."""

    path: str
    where: str
    dirty: bool = False


@dataclass(slots=True)
class _Directory:
    """A directory as one host knows it."""

    until: float
    """When the host asks for its attributes again."""
    since: float
    """When it last saw a change."""
    names: int
    """Names at the last look; the host shows these."""
    listed: int = -1
    """Names in its copy of the listing."""
    for_s: float = _CACHED_S


class Queue:
    """One server, whose requests wait for each other. They need not come in order of time."""

    def __init__(self, service_s: float) -> None:
        self._service_s = service_s
        self._busy_s: dict[int, float] = {}
        """Seconds of service in each tick."""
        self._next: dict[int, int] = {}
        """For each full tick, a later one."""

    def serve(self, at: float, requests: int) -> float:
        """Serve requests that arrive at a time; return when the last one is answered."""
        left, tick = requests * self._service_s, int(at / _TICK_S)
        ends = at + left
        while left > 0.0:
            tick = self._with_room(tick)
            busy_s = self._busy_s.get(tick, 0.0)
            part_s = min(left, _TICK_S - busy_s)
            left -= part_s
            self._busy_s[tick] = busy_s + part_s
            if busy_s + part_s > _TICK_S - 1e-9:
                self._next[tick] = tick + 1
        return max(ends, tick * _TICK_S + self._busy_s[tick])

    def _with_room(self, tick: int) -> int:
        full = []
        while tick in self._next:
            full.append(tick)
            tick = self._next[tick]
        self._next.update(dict.fromkeys(full, tick))
        return tick


class FileServer:
    """Stands between the workers of one simulation and the files of its run."""

    def __init__(self, *, trip_s: float = 0.001, service_s: float = 0.0001) -> None:
        self._trip_s = trip_s
        self._queue = Queue(service_s)
        self._real: dict[str, Callable[..., Any]] = {}
        self._files: dict[int, _File] = {}
        self._versions: dict[str, int] = {}
        self._read: dict[tuple[str, str], int] = {}
        self._names: dict[str, list[str]] = {}
        self._directories: dict[tuple[str, str], _Directory] = {}
        self._missing: dict[tuple[str, str], float] = {}
        self._targets: set[tuple[str, str]] = set()
        self.host = ""
        """The host whose worker runs now. Without one, calls cost nothing and show everything."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """By kind, and file or directory of the run."""
        self.per_s: Counter[int] = Counter()
        """Requests in each second."""
        self.names_sent = 0
        """Names in the answers to listings."""
        self.made: Counter[str] = Counter()
        """Names made in each directory."""

    @contextmanager
    def between(self, root: Path, clock: VirtualClock) -> Iterator[None]:
        """Stand between all calls below ``root`` until the end of the block."""
        self._root, self._clock = f"{root}{os.sep}", clock
        homes = {name: fcntl if name == "flock" else os for name in (*_OF_FILES, *_OF_NAMES)}
        self._real = {name: getattr(home, name) for name, home in homes.items()}
        try:
            for name, home in homes.items():
                of = self._on_name if name in _OF_NAMES else self._on_file
                setattr(home, name, partial(of, name, self._real[name]))
            yield
        finally:
            for name, home in homes.items():
                setattr(home, name, self._real[name])

    def _on_file(self, name: str, real: Callable[..., Any], fd: int, *args: Any) -> Any:
        file = self._files.get(fd)
        if file is None:
            return real(fd, *args)
        if name == "close":
            del self._files[fd]
        if self.host:
            self._charge(name, file)
        return real(fd, *args)

    def _charge(self, name: str, file: _File) -> None:
        version = self._versions[file.path]
        key = (self.host, file.path)
        if name in ("read", "pread"):
            if self._read.get(key) != version:
                self._read[key] = version
                self._ask("read", file.where)
        elif name in ("write", "pwrite", "ftruncate"):
            file.dirty = True
            self._versions[file.path] = self._read[key] = version + 1
        elif name == "flock":
            self._ask("lock", file.where)
        else:
            if file.dirty:
                file.dirty = False
                self._ask("write", file.where)
            if name == "close":
                self._ask("close", file.where)

    def _on_name(
        self, name: str, real: Callable[..., Any], path: Any, *args: Any, **more: Any
    ) -> Any:
        of = args[0] if name == "symlink" else path
        if self.host and not isinstance(of, int):
            of = os.fspath(of)
            if of.startswith(self._root):
                answer: Callable[[str, Callable[[], Any]], Any]
                answer = getattr(self, f"_{name}", self._stat)
                call = partial(real, path, *args, **more)
                if name == "open":
                    return self._open(of, call, args[0])
                return answer(of, call)
        return real(path, *args, **more)

    def _open(self, path: str, call: Callable[[], int], flags: int) -> int:
        if flags & os.O_DIRECTORY:
            return call()  # only to sync it, which asks nothing
        where = self._where(path)
        self._ask("open", where)
        fd = call()
        self._files[fd] = _File(path, where)
        if path not in self._versions:
            self._versions[path] = 0
            if flags & os.O_CREAT:
                self._made(path)
        return fd

    def _symlink(self, path: str, call: Callable[[], None]) -> None:
        self._ask("create", self._where(path))
        self._missing.pop((self.host, path), None)
        call()
        self._targets.add((self.host, path))
        self._made(path)

    def _listdir(self, path: str, _call: Callable[[], list[str]]) -> list[str]:
        if (self.host, path) in self._directories:
            self._directories[self.host, path].until = self._clock.now
        known = self._look(path)
        if known.listed < known.names:
            known.listed = known.names
            self.names_sent += known.names
            self._ask("readdir", self._where(path), 1 + known.names // _NAMES)
        return self._names[path][: known.listed]

    def _readlink(self, path: str, call: Callable[[], str]) -> str:
        if (self.host, path) in self._targets:
            return call()
        self._find(path, call)
        self._targets.add((self.host, path))
        self._ask("readlink", self._where(path))
        return call()

    def _stat(self, path: str, call: Callable[[], Any]) -> Any:
        if path in self._names:
            self._look(path)
            return call()
        return self._find(path, call)

    def _utime(self, path: str, call: Callable[[], None]) -> None:
        self._find(path, call)
        self._ask("setattr", self._where(path))

    def _find(self, path: str, call: Callable[[], Any]) -> Any:
        """Look up a name; the host may remember that it was missing."""
        key, known = (self.host, path), self._look(os.path.dirname(path))
        if self._missing.get(key, -1.0) >= known.since:
            raise FileNotFoundError(2, "remembered as missing", path)
        self._ask("lookup", self._where(path))
        try:
            return call()
        except FileNotFoundError:
            self._missing[key] = self._clock.now
            raise

    def _look(self, directory: str) -> _Directory:
        """The directory as this host knows it, after asking for its attributes if it is time."""
        now, key = self._clock.now, (self.host, directory)
        if directory not in self._names:
            self._names[directory] = self._real["listdir"](directory)
        count = len(self._names[directory])
        known = self._directories.get(key)
        if known is None:
            known = self._directories[key] = _Directory(now + _CACHED_S, now, count)
            self._ask("getattr", self._where(directory))
        elif now >= known.until:
            changed = count > known.names
            known.for_s = _CACHED_S if changed else min(_LONGEST_S, 2 * known.for_s)
            known.until = now + known.for_s
            if changed:
                known.names, known.since = count, now
            self._ask("getattr", self._where(directory))
        return known

    def _made(self, path: str) -> None:
        """Note a name that this host made: it asks for the directory's attributes again."""
        directory, _, name = path.rpartition(os.sep)
        self.made[self._where(path)] += 1
        if directory in self._names:
            self._names[directory].append(name)
        if (self.host, directory) in self._directories:
            self._directories[self.host, directory].until = self._clock.now

    def _where(self, path: str) -> str:
        """``claims``, ``workers``, ..., or the name of a file."""
        parts = path.removeprefix(self._root).split(os.sep)
        return parts[2] if parts[0] == "stages" and len(parts) > 2 else parts[0]

    def _ask(self, kind: str, where: str, requests: int = 1) -> None:
        self.requests[kind, where] += requests
        arrives = self._clock.now + self._trip_s / 2
        self.per_s[int(arrives)] += requests
        # The requests of a listing follow each other, because each needs the last one's cookie.
        trips_s = self._trip_s * (requests - 0.5)
        self._clock.now = self._queue.serve(arrives, requests) + trips_s
