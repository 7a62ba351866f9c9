"""The command line in a child process, one of whose system calls is cut.

The calls are counted at the border between Python and the kernel: every function of ``os`` that
changes a file below one directory. Whatever happens there, an error, half of a write or the end
of the process, happens once.
"""

from __future__ import annotations

import errno
import faulthandler
import importlib
import io
import mmap
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_toolkit.system.processes import die_with_parent
from tests.closingline import CLOSING

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EINTR)
WAYS = (
    "kill before",
    "kill after",
    "kill and power loss",
    "half and kill",
    "half",
    *(errno.errorcode[number] for number in ERRORS),
    "EIO after",
)
"""How a call is cut: ``half`` is a short write; ``EIO after``, done and its reply lost. After a
power loss the test takes off the journal what was not synced."""
FREEZE = "freeze"
"""The process is stopped before the call, until it is woken."""
ENTRIES = "entries"
"""It is stopped before each exclusive name from there on."""

_PATHS = ("symlink", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "truncate", "link")
_FDS = ("write", "pwrite", "fsync", "fdatasync", "ftruncate")
_LIMIT_S = 400.0
_KEPT = 8
_SEEN = struct.Struct("=qqqq64s")

# What the commands import on their way: once here instead of in every child.
_NEEDED = (
    *("cli.runs", "cli.working", "cli.statusview", "cli.reading", "cli.gathering"),
    *("worker.worker", "worker.pool", "results.explain", "results.tables"),
)


class Cut:
    """Cuts the n-th of the calls that change something below ``root``."""

    def __init__(self, root: Path, at: int, way: str, seen: mmap.mmap) -> None:
        self._root = os.path.realpath(root)
        self._at = at
        self._way = way
        self._seen = seen
        self._pid = os.getpid()
        self._count = 0
        self._fired = ""
        self._synced = {".jsonl": 0, ".values": 0}
        self._real: dict[str, Any] = {}

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What another process would do: no change is counted, and none is cut."""
        pid, self._pid = self._pid, 0
        try:
            yield
        finally:
            self._pid = pid

    def leave_out(self) -> None:
        """Count nothing of this process."""
        self._pid = 0

    def follow(self) -> None:
        """Count the calls of this process, a child of the command, unless one was cut before."""
        if not _SEEN.unpack(self._seen[:])[1]:
            self._pid = os.getpid()

    def wrap(self, owner: Any, name: str) -> None:
        """Count another function that changes something, as ``write``."""
        setattr(owner, name, self._wrap("write", getattr(owner, name), told=True))

    def install(self) -> None:
        """For the rest of this process."""
        for name in ("open", *_PATHS, *_FDS):
            self._real[name] = real = getattr(os, name)
            setattr(os, name, self._wrap(name, real))

    def _wrap(
        self, name: str, real: Callable[..., Any], *, told: bool = False
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # The executor's calls are its own: whatever happens to it happens to it alone.
            if self._fired or os.getpid() != self._pid:
                return real(*args, **kwargs)
            if not told and not self._concerns(name, args, kwargs):
                return real(*args, **kwargs)
            self._count += 1
            if self._way == ENTRIES and name == "symlink" and self._count >= self._at:
                os.kill(os.getpid(), signal.SIGSTOP)
                return real(*args, **kwargs)
            if self._way == ENTRIES or self._count < self._at or not self._fits(name):
                found = real(*args, **kwargs)
                if name == "fdatasync":
                    suffix = os.path.splitext(self._path(name, args))[1]
                    self._synced[suffix] = os.fstat(args[0]).st_size
                self._note()
                return found
            self._fired = name
            self._note()
            return self._strike(real, args, kwargs)

        return call

    def _concerns(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "open":
            flags = kwargs.get("flags", args[1] if len(args) > 1 else 0)
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return False
        return self._path(name, args).startswith(self._root)

    def _path(self, name: str, args: tuple[Any, ...]) -> str:
        if name in _FDS:
            try:
                return os.readlink(f"/proc/self/fd/{args[0]}")
            except OSError:
                return ""
        path: str = os.fspath(args[1] if name in ("symlink", "link") else args[0])
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))

    def _fits(self, name: str) -> bool:
        return not self._way.startswith("half") or name in ("write", "pwrite")

    def _note(self) -> None:
        fired = self._fired.encode()
        self._seen[:] = _SEEN.pack(
            self._count, bool(fired), *list(self._synced.values())[:2], fired
        )

    def _strike(self, real: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._way == FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
            return real(*args, **kwargs)
        if self._way in ("kill before", "kill and power loss"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._way == "kill after":
            with suppress(OSError):
                real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._way.startswith("half"):
            data = bytes(args[1])
            found = real(args[0], data[: max(1, len(data) // 2)], *args[2:])
        elif self._way == "EIO after":
            found = real(*args, **kwargs)
        else:
            number = getattr(errno, self._way)
            raise OSError(number, os.strerror(number), str(args[0]))
        if self._way == "half and kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._way == "EIO after":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(args[0]))
        return found


@dataclass(frozen=True)
class Struck:
    """How a command ended."""

    code: int
    """Exit code; -9 if it was killed."""
    out: str
    err: str
    count: int
    """Calls that changed something."""
    synced: int
    """Bytes of a journal that were committed before the cut."""
    kept: int
    """Bytes of a value file that were committed before the cut."""
    fired: str
    """The call that was cut; "" if none was."""


class Going:
    """A command that runs in a child."""

    def __init__(self, pid: int, words: tuple[object, ...], seen: mmap.mmap, said: Path) -> None:
        self.pid = pid
        self._words = words
        self._seen = seen
        self._said = said
        self._status: int | None = None
        self._stopped = False

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is true, while the command runs."""
        end = time.monotonic() + _LIMIT_S
        while not condition():
            assert not self._poll(), f"{self._words} ended: {self.end()}"
            assert time.monotonic() < end, f"{self._words}: waited {_LIMIT_S:g} s"
            time.sleep(0.002)

    def frozen(self) -> bool:
        """Wait until it is stopped; False if it came to its end before."""
        self._wait(lambda: self._stopped)
        return self._stopped

    def kill(self) -> None:
        """End it where it stands."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.end().code == -signal.SIGKILL

    def wake(self) -> None:
        self._stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> Struck:
        """Wait for its end, and say how it was."""
        self._wait(lambda: False)
        assert self._status is not None
        count, fired, synced, kept, name = _SEEN.unpack(self._seen[:])
        call = name.rstrip(b"\0").decode() if fired else ""
        out, err = (self._said.with_suffix(f".{one}").read_text() for one in ("out", "err"))
        err = CLOSING.sub("", err)
        return Struck(os.waitstatus_to_exitcode(self._status), out, err, count, synced, kept, call)

    def _wait(self, enough: Callable[[], bool]) -> None:
        end = time.monotonic() + _LIMIT_S
        while not self._poll() and not enough():
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGABRT)
                os.kill(self.pid, signal.SIGCONT)
                os.waitpid(self.pid, 0)
                stack = self._said.with_suffix(".err").read_text()
                message = f"{self._words} hung for {_LIMIT_S:g} s in\n{stack}"
                raise AssertionError(message)
            time.sleep(0.002)

    def _poll(self) -> bool:
        """Whether it ended."""
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if ended and os.WIFSTOPPED(status):
                self._stopped = True
            elif ended:
                self._status = status
        return self._status is not None


class Commands:
    """Calls the command line below one directory, each time in a child."""

    def __init__(self, cwd: Path, begin: Callable[[Cut], None] = lambda _cut: None) -> None:
        """``begin`` is called in each child before its command."""
        self._begin = begin
        for name in _NEEDED:
            importlib.import_module(f"hpc_toolkit.{name}")
        self._cwd = cwd
        self._started = 0

    def __call__(self, *words: object, root: Path, at: int = 0, way: str = "kill before") -> Struck:
        """Run one command; with ``at`` its ``at``-th change below ``root`` is cut."""
        return self.start(*words, root=root, at=at, way=way).end()

    def start(
        self, *words: object, root: Path, at: int = 0, way: str = FREEZE, host: str = "here"
    ) -> Going:
        """Start one command, which is cut as by calling this."""
        seen = mmap.mmap(-1, _SEEN.size)
        self._started += 1
        said = self._cwd / f".said-{self._started % _KEPT}"
        pid = os.fork()
        if pid == 0:
            cut = Cut(root, at or 1 << 62, way, seen)
            self._become(list(map(str, words)), said, host, cut)
        return Going(pid, words, seen, said)

    def _become(self, words: list[str], said: Path, host: str, cut: Cut) -> None:
        """Never returns."""
        code = 70
        try:
            os.setsid()
            die_with_parent()  # also where it is frozen
            os.chdir(self._cwd)
            for target, name in enumerate(("out", "err"), 1):
                path = said.with_suffix(f".{name}")
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                os.dup2(fd, target)
            sys.stdout, sys.stderr = (_stream(fd) for fd in (1, 2))
            faulthandler.enable(sys.stderr)
            # As srun starts a rank: this process is the worker.
            os.environ.update({"SLURM_STEP_ID": "0", "HPCTK_HOST": host})
            sys.argv = ["hpctk", *words]
            cut._pid = os.getpid()
            cut.install()
            self._begin(cut)
            _main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _main() -> None:
    from hpc_toolkit.cli import main

    main()


def _stream(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True)


def copy_of(template: Path, target: Path) -> Path:
    """A copy of a run, in place of the one before."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(template, target, symlinks=True)
    return target
