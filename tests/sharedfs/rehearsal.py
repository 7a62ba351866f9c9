"""A run on a shared filesystem: worked on from two hosts by the command line, and measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_toolkit.lab.commands import search_path
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.units import parse_claim
from hpc_toolkit.rundir.journal import decode_line
from tests.sharedfs import arms
from tests.sharedfs.agent import MARK
from tests.sharedfs.hosts import HOSTS, OWN
from tests.sharedfs.outcome import Ended, Outcome, standstill
from tests.sharedfs.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.sharedfs.filesystems import Filesystem

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[2]
TESTED = os.environ.get("TESTED_PACKAGE", str(REPOSITORY))
"""A directory with the package that hosts run, and without tests: to measure another version."""
PYTHONPATH = os.pathsep.join([TESTED, str(REPOSITORY)])
HIT, SPARED = HOSTS
"""What happens to one host happens to the first; the second is where the run is looked at."""

_CALL_S = 400.0
_EXAMINED_S = 240.0


@dataclass(frozen=True)
class Size:
    """How much is rehearsed."""

    items: int
    seconds: float
    """Length of an item."""
    workers: int
    """On each host."""
    lease_s: float
    """Heartbeats come four times as often."""
    silence_s: float
    """How long a host is cut off at least; longer than the lease."""
    limit_s: float
    """After so long a scenario is taken for stuck. MooseFS keeps a file locked for 120 s to which a
    host was writing that is lost, and a process whose thread reads it ends no sooner."""
    server_lease_s: int = 90
    """Of an NFS server, after which it gives a lost client up; the default of Linux."""
    server_grace_s: int = 90
    """Of an NFS server, which grants no new locks for so long after its start."""
    eviction_s: int = 0
    """After which CephFS evicts a client that does not give back what others wait for; 0: when its
    session ends, after 60 s. These are the defaults of Ceph."""


SMALL = Size(items=48, seconds=0.1, workers=2, lease_s=3.0, silence_s=4.0, limit_s=400.0,
             server_lease_s=45, server_grace_s=15, eviction_s=10)  # fmt: skip
FULL = Size(items=3000, seconds=0.2, workers=8, lease_s=20.0, silence_s=60.0, limit_s=600.0)
"""The silence is longer than the 42 s after which GlusterFS gives a server up (ping-timeout)."""


def wait_until(condition: Callable[[], T], what: str, *, limit_s: float) -> T:
    """Wait until a condition is true and give what it gave; the limit guards against hanging.

    A filesystem that does not answer counts as a condition that is not true.
    """
    end = time.monotonic() + limit_s
    while True:
        with suppress(OSError):
            if found := condition():
                return found
        if time.monotonic() >= end:
            message = f"waited {limit_s:g} s for {what}"
            raise AssertionError(message)
        time.sleep(0.05)


def _presence(data: bytes) -> Presence | None:
    try:
        # Another version of the package may have written more lines.
        return Presence.decode(data.partition(b"\n")[0] + b"\n")
    except (ValueError, TypeError):
        return None


def released(records: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """The claims that their workers gave back."""
    return {(one["unit"], one["generation"]) for one in records if one["type"] == "release"}


class Rehearsal:
    """One run on one filesystem; its directory on the machine takes what commands print."""

    def __init__(self, filesystem: Filesystem, cwd: Path, size: Size, name: str) -> None:
        self.filesystem = filesystem
        self.hosts = filesystem.hosts
        filesystem.adapt(size)
        self.size = size
        self.cwd = cwd
        self._traced = f"{name}-{cwd.name}"
        self.trace = OWN / self._traced
        """Where items tell when they begin and end; a file for each host."""
        self._started: list[Ranks] = []
        self._closed = False
        self._ids = 0
        self.run = filesystem.shared / name
        self.names = dict(zip(HOSTS, HOSTS, strict=True))
        """What each host calls itself."""
        self.lease_s = size.lease_s
        self.item_s = size.seconds

    def read(self, pattern: str) -> dict[str, bytes]:
        """Files of the run as the spared host sees them, see :meth:`Hosts.read`."""
        return self.hosts.read(SPARED, self.run, pattern)

    def environment(self, host: str) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": search_path(),
            "HPCTK_HOST": self.names[host],
            "PYTHONPATH": PYTHONPATH,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "COLUMNS": "100",
        }

    def hpctk(self, host: str, *words: object, codes: tuple[int, ...] = (0,)) -> Ended:
        """A command of hpctk on a host, to its end; ``codes`` are those that are expected."""
        argv = [sys.executable, "-m", "hpc_toolkit", *map(str, words)]
        try:
            done = subprocess.run(
                self.hosts.command(host, argv),
                env=self.environment(host),
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=min(_CALL_S, self.size.limit_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"hpctk {words} on {host} did not end"
            raise AssertionError(message) from None
        assert done.returncode in codes, f"hpctk {words} on {host}: {done.stderr}"
        return Ended(host, done.returncode, done.stdout, done.stderr)

    def items(self, number: int, *, seconds: float | None = None, pairs: bool = False) -> Path:
        """A file of so many further items that sleep and leave a trace; with ``pairs`` each second
        one follows the one before."""
        length_s = self.item_s if seconds is None else seconds
        ids = range(self._ids, self._ids + number)
        self._ids += number
        path = self.cwd / f"items-{ids.start}.jsonl"
        trace = str(self.trace)
        lines: list[dict[str, Any]] = [
            {"id": one, "seconds": length_s, "trace": trace}
            | ({"after": [one - 1] if one % 2 else []} if pairs else {})
            for one in ids
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def init(
        self, number: int, *words: str, seconds: float | None = None, pairs: bool = False
    ) -> None:
        workload = "hpc_toolkit.science.workloads.synthetic:Sleep"
        items = self.items(number, seconds=seconds, pairs=pairs)
        self._settle()
        self.hpctk(HIT, "init", self.run, "--workload", workload, "--items", items, *words)

    def init_campaign(self, asks: int) -> None:
        """Make a run that the coordinator fills: a group for each worker, and a task for each."""
        workers = len(HOSTS) * self.size.workers
        self._ids += workers * arms.LAYERS + asks * workers
        (self.cwd / "arms.py").write_bytes(Path(arms.__file__).read_bytes())
        path = self.cwd / "campaign.toml"
        path.write_text(
            arms.CAMPAIGN.format(
                steps=list(range(workers)),
                seconds=self.size.seconds,
                trace=self.trace,
                together=workers,
                names=[f"t{number}" for number in range(workers)],
                asks=asks,
            )
        )
        self._settle()
        self.hpctk(HIT, "init", self.run, "--campaign", path)

    def _settle(self) -> None:
        # After a partition GlusterFS answers ENOTCONN until it has connected again.
        for host in HOSTS:
            self.filesystem.wait_for(host)

    def examine(self) -> dict[str, Any]:
        """What ``hpctk doctor`` says of the run, as two tasks of a Slurm step, one on each host."""
        step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
        step["SLURM_CONF"] = os.devnull  # there is no Slurm: it is not to be waited for
        lead, helper = (
            self.start(host, "doctor", self.run, "--json", **step, SLURM_PROCID=str(rank))
            for rank, host in enumerate(HOSTS)
        )
        report = lead.ended(limit_s=_EXAMINED_S)
        assert report.code == 0, f"doctor: {report}"
        ended = helper.ended(limit_s=_CALL_S)
        assert ended.code == 0, f"doctor: {ended}"
        found: dict[str, Any] = json.loads(report.out)
        return found

    def work(self, host: str, workers: int | None = None, *, lease_s: float | None = None) -> Ranks:
        """Start workers on a host; by default as many as the size says."""
        count = self.size.workers if workers is None else workers
        lease_s = self.lease_s if lease_s is None else lease_s
        return self.start(host, "work", self.run, "--workers", count, "--lease", f"{lease_s}s")

    def start(self, host: str, *words: object, **environment: str) -> Ranks:
        """Start a command of hpctk on a host."""
        argv = [sys.executable, "-m", "hpc_toolkit", *map(str, words)]
        return self.start_program(host, argv, **environment)

    def start_program(self, host: str, argv: list[str], **environment: str) -> Ranks:
        """Start a program on a host that may import hpctk."""
        assert not self._closed
        number = len(self._started)
        out, err = self.cwd / f"out-{number}", self.cwd / f"err-{number}"
        mark = f"{self._traced}-{number}"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                self.hosts.command(host, argv),
                env={**self.environment(host), **environment, MARK: mark},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
        self._started.append(Ranks(self.hosts, host, mark, process, out, err))
        return self._started[-1]

    def told(self, host: str = "") -> list[list[str]]:
        """The words of each line that items wrote, on one host or on all, in no order of hosts.

        What began or ended, which item, the process, its parent, and when in epoch seconds.
        """
        return [line.split() for line in self.hosts.traced(self._traced, host).splitlines()]

    def begun(self) -> Counter[str]:
        """How often each item was begun; the trace is not on the filesystem."""
        return Counter(words[1] for words in self.told() if words[0] == "start")

    def until_begun(self, number: int) -> None:
        """Wait until so many items were begun."""
        self.until(lambda: len(self.begun()) >= number, f"{number} items that are begun")

    def until(self, condition: Callable[[], T], what: str) -> T:
        def looked() -> T:
            assert not self._closed, f"closed while it waits for {what}"
            return condition()

        return wait_until(looked, what, limit_s=self.size.limit_s)

    def presences(self) -> dict[str, Presence]:
        """The workers' files, by name."""
        found = map(_presence, self.read("workers/*.json").values())
        return {one.worker: one for one in found if one is not None}

    def records(self) -> list[dict[str, Any]]:
        """All whole journal lines; ``by`` is the worker who wrote it."""
        found = []
        for name, journal in self.read("journals/*.jsonl").items():
            for line in journal.split(b"\n")[:-1]:
                record = decode_line(line)
                assert record is not None, f"{name} has the damaged line {line!r}"
                found.append({**record, "by": Path(name).stem})
        return found

    def done(self) -> int:
        """How many items have a result."""
        done = {(one["unit"].partition("-")[0], one["item"])
                for one in self.records() if one["type"] == "done"}  # fmt: skip
        return len(done)

    def idle(self) -> bool:
        """Whether all that was begun has a result, and every claim was given back."""
        records = self.records()
        done = sum(one["type"] == "done" for one in records)
        return self._claims() == released(records) and done >= len(self.begun())

    def _claims(self) -> set[tuple[str, int]]:
        """Every unit, with its stage, and generation that was ever claimed."""
        found = set()
        for path in map(Path, self.read("stages/*/claims/*.lock")):
            unit, generation = parse_claim(path.name) or ("", 0)
            found.add((f"{path.parts[-3]}/{unit}", generation))
        return found

    def living(self, host: str) -> list[int]:
        """Workers of a host that live, by their id there."""
        own = [one.pid for one in self.presences().values() if one.host == host]
        living = self.hosts.living(host)
        return [pid for pid in own if pid in living]

    def busy(self, host: str) -> list[int]:
        """Workers of a host that live and are in the middle of an item, by their id there."""
        living = self.hosts.living(host)
        last = {int(words[3]): words[0] for words in self.told(host)}
        return [pid for pid, word in last.items() if word == "start" and pid in living]

    def add(self, number: int, *, seconds: float | None = None) -> None:
        """Add further items to an open run."""
        path = self.items(number, seconds=seconds)
        self.hpctk(SPARED, "add", self.run, "--items", path)

    @contextmanager
    def held(self, host: str, *, feed: int = 0) -> Iterator[list[int]]:
        """Stop the workers of a host in the middle of items: what they do cannot be written now.

        On a busy machine a worker may have ended its item before it is stopped, and both hosts all
        of theirs: then ``feed`` more items, each time twice as long, are added to the open run.
        """
        length_s = self.item_s

        def stop() -> list[int]:
            chosen = self.busy(host)
            stopped.extend(self.hosts.signal(host, chosen, signal.SIGSTOP))
            # Others may have begun an item since.
            found = [pid for pid in self.busy(host) if pid in chosen]
            if not found:
                release()
                if feed and self.done() == self._ids:
                    nonlocal length_s
                    length_s *= 2
                    self.add(feed, seconds=length_s)
            return found

        def release() -> None:
            self.hosts.signal(host, stopped, signal.SIGCONT)

        stopped: list[int] = []
        try:
            yield self.until(stop, f"a worker of {host} in the middle of an item")
        finally:
            release()

    def outcome(
        self,
        ended: list[Ended],
        seconds: float,
        *,
        since: float | None = None,
        living: tuple[str, ...] = HOSTS,
        **notes: Any,
    ) -> Outcome:
        """Read what the run's files say after its end.

        Args:
            since: epoch seconds of a disturbance, after which these hosts have work all the time.
        """
        rows = []
        for stage in self.read("stages/*"):
            table = self.hpctk(SPARED, "gather", self.run, "--stage", Path(stage).name).out
            rows += [json.loads(line) for line in table.splitlines()]
        records = self.records()
        hosts = {name: one.host for name, one in self.presences().items()}
        # A worker may hold more units than it was told dead with, so what counts is its death.
        told = [(Path(path).name.split(",")[4], hosts[teller.decode()])
                for path, teller in self.read("control/free,*").items()]  # fmt: skip
        deaths = {}
        for one in records:
            if one["type"] == "death":
                key = one["unit"], one["generation"]
                by = hosts[one["by"]]
                found_by = {by, *(host for worker, host in told if worker == one["worker"])}
                deaths[key] = {**one, "by": by, "found_by": found_by}
        followed = {(unit, generation - 1) for unit, generation in self._claims() if generation > 1}
        return Outcome(
            items=self._ids,
            rows=rows,
            done_lines=Counter(
                f"{one['unit'].partition('-')[0]}/{one['item']}"
                for one in records
                if one["type"] == "done"
            ),
            executions=self.begun(),
            deaths=list(deaths.values()),
            untold=sorted(followed - deaths.keys() - released(records)),
            ended=ended,
            status=json.loads(self.hpctk(SPARED, "status", self.run, "--json").out),
            seconds=seconds,
            notes=notes,
            standstill_s=None
            if since is None
            else standstill(records, {name for name in hosts if hosts[name] in living}, since),
            taken_over_s=[]
            if since is None
            else sorted(round(death["at"] - since, 3) for death in deaths.values()),
        )

    def close(self) -> None:
        """End what a scenario left running that failed, or that nobody waits for."""
        self._closed = True
        for ranks in self._started:
            if ranks.process.poll() is None:
                ranks.kill()
