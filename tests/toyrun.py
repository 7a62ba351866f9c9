"""A run directory whose workers are imitated by the test."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from hpc_toolkit.queue import items as items_module
from hpc_toolkit.queue.items import Item, encode_segment
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import FINISHED, Presence, PresenceFile
from hpc_toolkit.queue.units import Claims
from hpc_toolkit.queue.view import RunView, StageView
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.journal import JournalWriter, encode_line
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec, WorkloadSpec
from tests.replacedcalls import ReplacedCalls

NOOP = WorkloadSpec(function="hpc_toolkit.science.workloads.synthetic:Noop")


def spec_of(name: str = "items", **changes: Any) -> StageSpec:
    """Return a stage of no-ops."""
    return StageSpec(**{"name": name, "workload": NOOP, **changes})


def plain_items(count: int) -> list[Item]:
    return [{"id": index} for index in range(count)]


@contextlib.contextmanager
def units_of(size: int) -> Iterator[None]:
    """Divide every segment that is created inside the block into units of ``size`` items."""

    def cut(_spans: Any, count: int, **_more: Any) -> list[tuple[int, int]]:
        return [(first, min(size, count - first)) for first in range(0, count, size)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items_module, "plan_units", cut)
        yield


def empty_campaign(root: Path) -> Run:
    """Create the run of a campaign whose coordinator has not begun."""
    stages = (spec_of("metrics"), spec_of("tasks"))
    manifest = Manifest(run=root.name, stages=stages, campaign={"name": "toy"})
    return create_run(root, manifest, {}, sealed=False)


class ToyRun:
    """A run with one stage, ``items``, in units of ``unit`` items."""

    def __init__(
        self, root: Path, count: int = 4, *, unit: int = 4, sealed: bool = True, **spec: Any
    ) -> None:
        self.unit = unit
        manifest = Manifest(run=root.name, stages=(spec_of(**spec),))
        with units_of(unit):
            items = {"items": plain_items(count)} if count else {}
            self.run = create_run(root, manifest, items, sealed=sealed)
        self.root = root
        self.paths: RunPaths = self.run.paths
        self.stage_paths = self.paths.stage("items")

    def worker(self, name: str, **presence: Any) -> ToyWorker:
        return ToyWorker(self.paths, name, **presence)

    def view(self) -> RunView:
        """Return the view of a process that starts now."""
        view = RunView(self.paths, self.run.manifest)
        view.poll_claims()
        view.poll()
        return view

    def stage(self) -> StageView:
        return self.view().stages["items"]

    def reopen(self) -> Run:
        return Run.open(self.root)

    def log(self) -> StageLog:
        log = StageLog(self.stage_paths)
        log.poll()
        return log

    def add(self, items: list[Item]) -> bool:
        with units_of(self.unit):
            return self.log().add_segment(encode_segment(items, group_by=None))

    def unit_name(self, first: int, entry: int = 1) -> str:
        return f"{entry:06d}-{first}"

    def states(self) -> dict[tuple[int, int], str]:
        """Return the state of every item by log entry and position in the segment."""
        stage = self.stage()
        return {
            (unit.unit.entry, item): str(state)
            for unit in stage.state.units.values()
            for item, state in stage.states(unit)
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that a new reader would get."""
        return self.reopen().results(partial=True)


class ToyWorker:
    """Writes a journal line by line, as :class:`hpc_toolkit.worker.unitruns.UnitRunner` does."""

    def __init__(self, paths: RunPaths, name: str, **presence: Any) -> None:
        self.name = name
        self.paths = paths
        fields = {"host": "here", "boot": "boot", "pid": 2**22, "rank": 0, "job": None}
        self.presence = PresenceFile(
            paths.worker(name), Presence(worker=name, **{**fields, **presence})
        )
        self.journal = JournalWriter(paths.journal(name))
        self.unit = ""
        self.generation = 0
        self._start = 0
        self._written: list[bytes] = []
        self._kinds: list[str] = []

    def claim(self, unit: str, generation: int = 1) -> bool:
        claims = Claims(self.paths.stage("items"))
        won = claims.create(unit, generation, self.name)
        if won:
            self.begin(unit, generation)
        return won

    def begin(self, unit: str, generation: int) -> None:
        """Start a pass."""
        self.unit, self.generation = f"items/{unit}", generation
        self._start = self.journal.size
        self._written, self._kinds = [], []

    def attempt(self, item: int, kind: str = "done", **fields: Any) -> None:
        """Write the line of one attempt: ``done``, ``failed`` or ``permanent``.

        ``short`` is a failure for lack of memory.
        """
        if kind == "short":
            kind, fields = "failed", {"oom": True, **fields}
        default = {"value": {"by": self.name}} if kind == "done" else {"error": f"{kind} of test"}
        record = {
            "type": kind,
            "unit": self.unit,
            "generation": self.generation,
            "item": item,
            "at": 0.0,
            "seconds": 1.0,
            **default,
            **fields,
        }
        self._write(record)

    def death(self, item: int, *, generation: int | None = None, **fields: Any) -> None:
        """Write a death line; with a ``generation`` it is not part of the current pass."""
        record = {
            "type": "death",
            "unit": self.unit,
            "generation": self.generation if generation is None else generation,
            "item": item,
            "worker": self.name,
            "host": "here",
            "evidence": "executor killed by SIGSEGV",
            "explained": "",
            "alone": False,
            "at": 0.0,
            **fields,
        }
        if generation is None:
            self._write(record)
        else:
            self.journal.append(encode_line(record))
            self._start = self.journal.size

    def _write(self, record: dict[str, Any]) -> None:
        line = encode_line(record)
        self.journal.append(line)
        self._written.append(line)
        self._kinds.append(record["type"])

    def release(self, at: float = 0.0, *, seconds: float | None = None) -> None:
        """End the pass, which took one second per line unless ``seconds`` is given."""
        done = self._kinds.count("done")
        failed = self._kinds.count("failed") + self._kinds.count("permanent")
        self.journal.append(
            encode_line(
                {
                    "type": "release",
                    "unit": self.unit,
                    "generation": self.generation,
                    "lines": len(self._kinds),
                    "done": done,
                    "failed": failed,
                    "seconds": float(len(self._kinds)) if seconds is None else seconds,
                    "at": at,
                    "start": self._start,
                    "sum": f"{crc32(b''.join(self._written)):08x}",
                }
            )
        )
        self.journal.sync()
        self.unit = ""

    def work(self, unit: str, generation: int = 1, **kinds: str) -> None:
        """Run a complete pass; ``i3="failed"`` makes item 3 fail."""
        assert self.claim(unit, generation)
        for name, kind in kinds.items():
            self.attempt(int(name[1:]), kind)
        self.release()

    def finish(self) -> None:
        """Leave in good order."""
        self.presence.update(state=FINISHED, journal=self.journal.size)


class Faults(ReplacedCalls):
    """Makes one system call fail: number ``at`` of those that can write."""

    CALLS = (
        "open",
        "write",
        "pwrite",
        "fsync",
        "fdatasync",
        "symlink",
        "link",
        "mkdir",
        "rename",
        "replace",
    )

    def __init__(self, at: int, kind: int | str) -> None:
        self.at = at
        self.kind = kind
        """An errno, or ``short``: the first write from there on writes only half."""
        self.count = 0
        self.fired = ""
        """The call that failed."""

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.fired or self.count < self.at:
                return real(*args, **kwargs)
            if self.kind != "short":
                self.fired = name
                assert isinstance(self.kind, int)
                raise OSError(self.kind, os.strerror(self.kind), str(args[0]))
            if name == "write" and len(args[1]) > 1:
                self.fired = name
                return real(args[0], bytes(args[1])[: len(args[1]) // 2])
            return real(*args, **kwargs)

        return call


FAULTS = [errno.EIO, errno.ENOSPC, errno.ESTALE, "short"]
"""Ways in which a call can fail."""


def every_fault(kind: int | str) -> Iterator[Faults]:
    """Faults at the first call, at the second one, and so on, until no call is left to fail."""
    for at in count(1):
        faults = Faults(at, kind)
        yield faults
        if not faults.fired:
            return


def all_at_once(call: Callable[[int], object], count: int) -> None:
    """Call with the numbers below ``count`` in threads that begin together."""
    barrier = threading.Barrier(count)

    def one(number: int) -> None:
        barrier.wait()
        call(number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, mtime, and content or target of everything below a directory."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        info = path.lstat()
        if path.is_symlink():
            content = os.readlink(path).encode()
        else:
            content = b"" if path.is_dir() else path.read_bytes()
        found[str(path.relative_to(root))] = (info.st_mode, info.st_mtime_ns, content)
    return found
