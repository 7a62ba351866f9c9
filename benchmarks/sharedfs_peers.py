"""Two workers a host of one queue, on a filesystem that both hosts mount; one may be killed.

What an item was, whether it began, and whether it came to its end is told by the item itself, in a
file of its host beside the filesystem. Its result is a line on the shared filesystem.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.sharedfs.agent import MARK
from tests.sharedfs.hosts import HOSTS, OWN
from tests.sharedfs.rehearsal import HIT, SPARED, Rehearsal, Size, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sharedfs.filesystems import Filesystem
    from tests.sharedfs.hosts import Hosts

PEERS = ("dirq", "jug", "naive_filelock", "persist-queue")
SCRIPT = Path(__file__).with_name("peers.py")
_READY_S = 30.0
_A_HOST = 2


@dataclass(frozen=True)
class Came:
    """What a drain of a queue came to."""

    items: int
    lost: int
    """Without a result when the workers that were left had ended, or at the cap."""
    twice: int
    """Begun more than once."""
    once: int
    """With one result."""
    duplicates: int
    seconds: float
    """Until the last worker ended."""
    capped: bool
    """Whether workers had to be ended."""
    person: int
    """Without a result also after one more worker was started."""
    said: str = ""
    """The last words of workers that failed."""
    seen: str = "-"
    """How deaths were seen."""

    def cells(self) -> list[str]:
        """From the number of items on, as :data:`tests.sharedfs.outcome.COLUMNS` has them."""
        took = f"{self.seconds:.1f}"
        if self.capped:
            took = f"cut at {took}"
        elif self.lost:
            took = f"not whole at {took}"
        counts = (self.items, self.lost, self.twice, self.duplicates, self.once)
        return [*map(str, counts), took, self.seen, "-", "-", str(self.person)]


class Trace:
    """What the items say of themselves."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self._hosts = hosts
        self._name = name
        self.path = OWN / name

    def _lines(self, host: str = "") -> list[list[str]]:
        return [line.split() for line in self._hosts.traced(self._name, host).splitlines()]

    def begun(self) -> Counter[str]:
        return Counter(words[1] for words in self._lines() if words[0] == "start")

    def is_inside(self, host: str, pid: int) -> bool:
        """Whether a process, by its id on its host, is in the middle of an item."""
        own = [words[0] for words in self._lines(host) if int(words[2]) == pid]
        return bool(own) and own[-1] == "start"


class Worker:
    """One worker of another queue on a host."""

    def __init__(self, filesystem: Filesystem, host: str, argv: list[str], log: Path) -> None:
        self._hosts = filesystem.hosts
        self._host = host
        self._mark = str(log)
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                self._hosts.command(host, [*argv, "--worker"]),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd="/",
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark},
            )

    @property
    def ready(self) -> bool:
        return self._out.read_text().startswith("ready") or self.ended

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def go(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()

    def find(self) -> int | None:
        """Its id on its host; None if it has ended."""
        return next(iter(self._hosts.family(self._host, self._mark)), None)

    def send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to it, by its id on its host."""
        self._hosts.signal(self._host, [pid], number)

    def wait(self, until: float) -> bool:
        """Wait for its end until a monotonic time, and kill it then; whether it ended by itself."""
        # nsenter(1) stops itself with what it started, and would not see its end.
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            if (pid := self.find()) is not None:
                self.send(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            return False
        return True

    def said(self) -> str:
        """The last line of its complaint, if it failed."""
        lines = self._err.read_text(errors="replace").splitlines()
        return lines[-1] if lines and self._process.returncode not in (0, -signal.SIGKILL) else ""


@dataclass(frozen=True)
class Drain:
    """One drain of another queue."""

    filesystem: Filesystem
    python: Path
    """The interpreter that has the queues."""
    cwd: Path
    """On this machine; an empty directory."""
    size: Size
    """How many items of which length, and what an NFS server grants: another grant restarts it."""

    def play(self, name: str, *, kill: bool) -> Came:
        """Fill a queue, drain it from both hosts, and see what is left."""
        trace = Trace(self.filesystem.hosts, f"peers-{self.cwd.name}")
        root = self.filesystem.shared / f"{name}-{'killed' if kill else 'calm'}"
        argv = [str(self.python), str(SCRIPT), name, "--items", str(self.size.items)]
        argv += [
            "--dir",
            str(root),
            "--seconds",
            str(self.size.seconds),
            "--trace",
            str(trace.path),
        ]
        self.filesystem.hosts.call(HIT, *argv, "--fill", limit_s=self.size.limit_s)
        workers = [
            Worker(self.filesystem, host, argv, self.cwd / f"{host}-{number}")
            for host in HOSTS
            for number in range(_A_HOST)
        ]
        for worker in workers:
            wait_until(lambda one=worker: one.ready, "a worker", limit_s=_READY_S)  # type: ignore[misc]
        began = time.monotonic()
        for worker in workers:
            worker.go()
        if kill:
            self._kill_one(workers[:_A_HOST], trace)
        ended = [worker.wait(began + self.size.limit_s) for worker in workers]
        seconds = time.monotonic() - began
        results = self._results(root)
        lost = self.size.items - len(results)
        person = lost
        if lost:
            another = Worker(self.filesystem, SPARED, argv, self.cwd / "another")
            wait_until(lambda: another.ready, "another worker", limit_s=_READY_S)
            another.go()
            another.wait(time.monotonic() + self.size.limit_s)
            person = self.size.items - len(self._results(root))
        return Came(
            items=self.size.items,
            lost=lost,
            twice=sum(number > 1 for number in trace.begun().values()),
            once=sum(number == 1 for number in results.values()),
            duplicates=sum(number - 1 for number in results.values()),
            seconds=seconds,
            capped=not all(ended),
            person=person,
            said="; ".join(sorted({one.said() for one in workers} - {""})),
        )

    def _kill_one(self, victims: list[Worker], trace: Trace) -> None:
        """SIGKILL for a worker in the middle of an item, after a quarter of all items."""

        numbers = {worker.find(): worker for worker in victims}

        def hit() -> bool:
            if all(worker.ended for worker in victims):  # by themselves: there is nobody to kill
                return True
            if len(trace.begun()) < self.size.items // 4:
                return False
            for pid, worker in numbers.items():
                if pid is None or not trace.is_inside(HIT, pid):
                    continue
                worker.send(pid, signal.SIGSTOP)
                if trace.is_inside(HIT, pid):  # what it does cannot end any more
                    worker.send(pid, signal.SIGKILL)
                    return True
                worker.send(pid, signal.SIGCONT)
            return False

        with suppress(AssertionError):  # a queue that hangs is a result as well
            wait_until(hit, "a worker in the middle of an item", limit_s=self.size.limit_s)

    def _results(self, root: Path) -> Counter[int]:
        """Results of each item, as the spared host reads them."""
        found: Counter[int] = Counter()
        for text in self.filesystem.hosts.read(SPARED, root, "done/*").values():
            for line in text.splitlines():
                with suppress(ValueError):
                    found[json.loads(line)["item"]] += 1
        return found


def play_ours(drain: Drain, *, kill: bool) -> Came:
    """The same with ``hpctk work``, a command for each worker."""
    size = drain.size
    name = f"hpctk-{'killed' if kill else 'calm'}"
    run = Rehearsal(drain.filesystem, drain.cwd, size, name)
    with _closed(run):
        run.init(size.items)
        began = time.monotonic()
        ranks = [run.work(host) for host in HOSTS for _ in range(_A_HOST)]
        if kill:
            run.until_begun(size.items // 4)
            with run.held(HIT) as held:
                victim = next(one for one in ranks if held[0] in one.family())
                victim.kill()
            ranks.remove(victim)
        ended = [one.ended(limit_s=size.limit_s) for one in ranks]
        seconds = time.monotonic() - began
        assert {one.code for one in ended} == {0}, f"workers left: {ended}"
        found = run.outcome(ended, seconds)
    lost = found.items - len(found.gathered)
    return Came(
        items=found.items,
        lost=lost,
        twice=sum(number > 1 for number in found.executions.values()),
        once=sum(number == 1 for number in found.gathered.values()),
        duplicates=sum(number - 1 for number in found.done_lines.values()),
        seconds=seconds,
        capped=False,
        person=lost,
        seen=", ".join(f"{name} {number}" for name, number in found.evidence.items()) or "-",
    )


@contextmanager
def _closed(run: Rehearsal) -> Iterator[None]:
    try:
        yield
    finally:
        run.close()
