"""How many requests does a run cost an NFS server? Counted at the server, by kind.

    python benchmarks/nfs_load.py [--workers 8 32 64] [--write]

The server and two hosts that mount its export are kernels of their own (user-mode Linux). nfsstat
on the server counts before and after an interval. For each number of workers, half of them on each
host: workers without items, after they have settled; workers on items of 1 s and of 10 s; one more
process that follows the run; one status. Then no-op items, a search, and lists of 200 items that
hpctk and other queues work through.

Takes about 7 minutes for each number of workers. Needs root and the packages that ``.ci/system``
installs; for the other queues the interpreter that ``make bench`` makes.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import number, parser
from ending import interrupted
from failures import Failure, tried
from resultsfile import facts, table, write_section
from sharedfs import PEER_PYTHON, versions
from sharedfs_peers import Drain

from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from tests.sharedfs.filesystems import mounted
from tests.sharedfs.hosts import HOSTS, SERVER, HostsError
from tests.sharedfs.nfs import NFS42
from tests.sharedfs.rehearsal import HIT, SPARED, Rehearsal, Size

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from tests.sharedfs.filesystems import Filesystem
    from tests.sharedfs.hosts import Hosts
    from tests.sharedfs.ranks import Ranks

_EXPORT = Path("/srv/export")
_RANKS = """
import os, sys
import hpc_toolkit.cli, hpc_toolkit.run, hpc_toolkit.worker.pool, hpc_toolkit.worker.worker
first, count, total = map(int, sys.argv[1:4])
for rank in range(first, first + count):
    if os.fork() == 0:
        os.environ |= {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(total)}
        sys.argv = ["hpctk", "work", sys.argv[4]]
        hpc_toolkit.cli.main()
        os._exit(70)
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(count)))
"""
"""Starts the workers of a host as srun would: each is a rank with a share of its own."""
_CARRIERS = ("total", "sequence", "putfh", "putrootfh", "getfh", "savefh", "restorefh", "getattr",
             "access", "null")  # fmt: skip
"""Operations of NFSv4 that accompany another one in a request, or stand alone and ask about one
file; the requests of the latter are what the named operations leave."""
_IDLE_S, _BUSY_S, _STEP_S, _SETTLED_S = 60.0, 40.0, 15.0, 180.0
_SHOWN = 7
"""Kinds of requests in a row."""
_SIZE = Size(items=200, seconds=0.1, workers=1, lease_s=DEFAULT_LEASE_S, silence_s=0.0,
             limit_s=400.0)  # fmt: skip
_SEARCH_WORKERS, _ASKS = 8, 12
_WORDS = f"""
nfsstat on the server counted over {_IDLE_S:.0f} s with idle workers, which had no items and had
settled, and over {_BUSY_S:.0f} s otherwise. Half of the workers ran on each of two hosts, as ranks
of one Slurm step. The server and the hosts are kernels of their own (user-mode Linux). A request of
NFSv4 is a compound, counted by its main operation. Items sleep. Load: the machine's load average.
"""
_NOOPS = (1, 1_000, 10_000)
_QUEUES = ("dirq", "jug", "naive_filelock")
"""Other queues that finish on NFS."""


@dataclass
class Load:
    """What reached the server in an interval."""

    requests: int
    kinds: Counter[str]
    """Requests by their main operation."""
    seconds: float = 0.0

    def rate(self) -> str:
        return f"{self.requests / self.seconds:.1f}"

    def each(self, things: int) -> str:
        return f"{self.requests / things:.1f}" if things else "-"

    def shown(self, per: float) -> str:
        """The most frequent kinds, per second or per thing."""
        common = self.kinds.most_common(_SHOWN)
        return ", ".join(f"{kind} {count / per:.2f}" for kind, count in common if count > 0)


def counted(hosts: Hosts) -> tuple[int, Counter[str]]:
    """Requests that the server has answered, and how many of each kind."""
    requests, kinds = 0, Counter[str]()
    for line in hosts.call(SERVER, "nfsstat", "-s", "-l").splitlines():
        match line.split():
            case ["nfs", "v4", "server", "compound:", count]:
                requests = int(count)
            case ["nfs", "v4", "servop", kind, count] if kind.rstrip(":") not in _CARRIERS:
                kinds[kind.rstrip(":")] = int(count)
    kinds["getattr or access alone"] = requests - kinds.total()
    return requests, kinds


@contextmanager
def measured(hosts: Hosts) -> Iterator[Load]:
    """Count what reaches the server until the end of the block."""
    load = Load(0, Counter())
    before, kinds = counted(hosts)
    began = time.monotonic()
    yield load
    load.seconds = time.monotonic() - began
    after, load.kinds = counted(hosts)
    load.kinds.subtract(kinds)
    load.requests = after - before


@dataclass
class Run:
    """A run on the export, looked at by the server alone, so that nothing is counted for it."""

    rehearsal: Rehearsal
    name: str
    rows: list[list[str]] = field(default_factory=list)
    ranks: list[Ranks] = field(default_factory=list)

    @property
    def hosts(self) -> Hosts:
        return self.rehearsal.hosts

    @property
    def at_server(self) -> Path:
        return _EXPORT / self.rehearsal.filesystem.shared.name / self.name

    def work(self) -> None:
        """Start the workers, half of them on each host."""
        rehearsal, count = self.rehearsal, self.rehearsal.size.workers
        for index, host in enumerate(HOSTS):
            words = [index * count, count, len(HOSTS) * count, rehearsal.run]
            argv = [sys.executable, "-c", _RANKS, *map(str, words)]
            self.ranks.append(rehearsal.start_program(host, argv))

    def until_left(self) -> None:
        """Wait until all workers have exited."""
        for one in self.ranks:
            ended = one.ended(limit_s=_SIZE.limit_s)
            if ended.code != 0:
                message = f"workers of {one.host} exited with {ended.code}: {ended.err}"
                raise HostsError(message)

    def listed(self, what: str) -> int:
        """Number of files of a directory of the run."""
        return len(self.hosts.call(SERVER, "ls", self.at_server / what).split())

    def ended(self) -> int:
        """Number of items that came to their end."""
        return sum(words[0] == "end" for words in self.rehearsal.told())

    def until_present(self, workers: int) -> None:
        limit = time.monotonic() + _SIZE.limit_s
        while self.listed("workers") < 2 * workers:  # a presence and a lock each
            if time.monotonic() > limit:
                message = f"not all of {workers} workers started"
                raise HostsError(message)
            time.sleep(1.0)

    def settle(self) -> None:
        """Wait until idle workers make no fewer requests than before: starts have passed."""
        until, last = time.monotonic() + _SETTLED_S, float("inf")
        while time.monotonic() < until:
            with measured(self.hosts) as load:
                time.sleep(2 * _STEP_S)
            if load.requests >= 0.8 * last:
                return
            last = load.requests

    def row(self, what: str, workers: int, load: Load, items: int = 0) -> None:
        cells = [what, str(workers), load.rate(), load.each(items), load.shown(load.seconds)]
        self.rows.append([*cells, f"{os.getloadavg()[0]:.1f}"])
        print(*self.rows[-1], sep=" | ", file=sys.stderr, flush=True)


@contextmanager
def opened(filesystem: Filesystem, base: Path, name: str, workers: int) -> Iterator[Run]:
    cwd = base / name
    cwd.mkdir()
    size = replace(_SIZE, workers=workers // len(HOSTS))
    rehearsal = Rehearsal(filesystem, cwd, size, name)
    try:
        yield Run(rehearsal, name)
    finally:
        rehearsal.close()


def of_workers(filesystem: Filesystem, base: Path, workers: int) -> list[list[str]]:
    """Rows about idle and busy workers, and about those who look on."""
    with opened(filesystem, base, f"workers-{workers}", workers) as run:
        rehearsal, hosts = run.rehearsal, run.hosts
        rehearsal.init(1, "--open", seconds=0.0)
        run.work()
        run.until_present(workers)
        run.settle()
        with measured(hosts) as load:
            time.sleep(_IDLE_S)
        run.row("idle", workers, load)
        for item_s, items in ((1.0, 60 * workers), (10.0, 30 * workers)):
            already = len(rehearsal.begun())
            rehearsal.add(items, seconds=item_s)
            rehearsal.until_begun(already + workers)
            time.sleep(_STEP_S)
            busy(run, f"items of {item_s:g} s", workers)
            if item_s < 2.0:
                rehearsal.until_begun(already + items)
                time.sleep(_STEP_S)
        looking_on(run, workers)
        with measured(hosts) as load:
            time.sleep(_STEP_S)
        with measured(hosts) as once:
            rehearsal.hpctk(SPARED, "status", rehearsal.run)
        extra = once.requests - load.requests / load.seconds * once.seconds
        run.rows.append(
            ["one `status`", str(workers), "-", "-", f"{extra:.0f} requests in all", ""]
        )
        return run.rows


def busy(run: Run, what: str, workers: int) -> None:
    already = run.ended()
    with measured(run.hosts) as load:
        time.sleep(_BUSY_S)
    run.row(what, workers, load, run.ended() - already)


def looking_on(run: Run, workers: int) -> None:
    """The same with one more process that follows the run."""
    hpctk = [sys.executable, "-m", "hpc_toolkit"]
    root = str(run.rehearsal.run)
    command = shlex.join([*hpctk, "status", root, "--watch"])
    with_terminal = f"sleep 300 | script -qfc {shlex.quote('stty rows 40 cols 120; ' + command)}"
    argv = run.hosts.command(
        SPARED,
        ["timeout", f"{_BUSY_S + 2 * _STEP_S:.0f}", "sh", "-c", f"{with_terminal} /dev/null"],
    )
    process = subprocess.Popen(
        argv, env={**run.rehearsal.environment(SPARED), "TERM": "xterm"}, cwd="/",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    time.sleep(_STEP_S)
    busy(run, "the same beside `status --watch`", workers)
    said, _ = process.communicate()
    print(said[-300:], file=sys.stderr, flush=True)


def of_noops(filesystem: Filesystem, base: Path, items: int, workers: int) -> list[str]:
    """What a list of no-ops costs, from `hpctk work` to the exit of all workers, and its files."""
    with opened(filesystem, base, f"noops-{items}-{workers}", workers) as run:
        rehearsal = run.rehearsal
        noop = "hpc_toolkit.science.workloads.synthetic:Noop"
        rehearsal.hpctk(HIT, "init", rehearsal.run, "--workload", noop, "--count", items)
        with measured(run.hosts) as load:
            run.work()
            run.until_left()
        claims = run.listed("stages/items/claims")
        files = len(run.hosts.call(SERVER, "find", run.at_server).splitlines())
        size = int(run.hosts.call(SERVER, "du", "-s", "-b", run.at_server).split()[0])
        cells = [f"{items:,}", str(workers), f"{load.requests:,}", f"{load.requests / workers:.0f}",
                 load.each(claims), f"{claims:,}", f"{files:,}", f"{size / items:,.0f}",
                 load.shown(claims)]  # fmt: skip
    print(*cells, sep=" | ", file=sys.stderr, flush=True)
    return cells


def of_search(filesystem: Filesystem, base: Path) -> list[str]:
    """What a search costs, from its coordinator's start to the exit of all."""
    with opened(filesystem, base, "search", _SEARCH_WORKERS) as run:
        rehearsal = run.rehearsal
        rehearsal.init_campaign(_ASKS)
        run.work()
        run.until_present(_SEARCH_WORKERS)
        with measured(run.hosts) as load:
            run.ranks.append(rehearsal.start(HIT, "campaign", "coordinate", rehearsal.run))
            run.until_left()
        results = len(rehearsal.begun())
        return [str(_ASKS), str(results), f"{load.seconds:.0f} s",
                str(load.requests), load.each(results), load.shown(results)]  # fmt: skip


def of_queues(filesystem: Filesystem, base: Path, python: Path) -> list[list[str]]:
    """What a list of items costs, from its creation to the exit of four workers."""
    rows = []
    known = versions(python)
    for name in ("hpctk", *(one for one in _QUEUES if one in known)):
        cwd = base / f"queue-{name}"
        title = f"{name} {known.get(name, '')}".strip()
        if name == "hpctk":
            play: Callable[[], None] = partial(drain_ours, filesystem, base)
        else:
            cwd.mkdir()
            play = partial(drain_peer, Drain(filesystem, python, cwd, _SIZE), name)
        with measured(filesystem.hosts) as load:
            came = tried(title, play)
        seen = came.seen if isinstance(came, Failure) else load.shown(_SIZE.items)
        rows.append(
            [title, str(load.requests), load.each(_SIZE.items), f"{load.seconds:.0f} s", seen]
        )
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return rows


def drain_ours(filesystem: Filesystem, base: Path) -> None:
    with opened(filesystem, base, "queue", 4) as run:
        run.rehearsal.init(_SIZE.items)
        run.work()
        run.until_left()


def drain_peer(drain: Drain, name: str) -> None:
    drain.play(name, kill=False)


def report(filesystem: Filesystem, base: Path, options: Namespace) -> list[str]:
    rows = [row for workers in options.workers for row in of_workers(filesystem, base, workers)]
    head = ["", "workers", "requests/s", "requests an item", "most frequent, a second", "load"]
    lines = table(head, rows)
    if options.lists:
        rows = [of_noops(filesystem, base, items, n) for n in options.lists for items in _NOOPS]
        head = ["no-ops", "workers", "requests", "a worker", "a claim", "claims", "files",
                "bytes an item", "most frequent, a claim"]  # fmt: skip
        lines += ["", *table(head, rows)]
        head = ["asks", "results", "took", "requests", "a result", "most frequent, a result"]
        lines += ["", f"A search, {_SEARCH_WORKERS} workers and a coordinator:", ""]
        lines += table(head, [of_search(filesystem, base)])
        head = [f"{_SIZE.items} items of {_SIZE.seconds:g} s, four workers", "requests", "an item",
                "took", "most frequent, an item"]  # fmt: skip
        lines += ["", *table(head, of_queues(filesystem, base, options.peer_python))]
    return lines


def main() -> None:
    given = parser(__doc__)
    given.add_argument(
        "--workers", type=number, nargs="*", default=[8, 32, 64], help="idle and busy"
    )
    given.add_argument(
        "--lists",
        type=number,
        nargs="*",
        default=[8],
        help="workers on no-op lists; none: also no search and no other queues",
    )
    given.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="has other queues")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if os.geteuid() != 0:
        given.error("only root can mount filesystems")
    try:
        with tempfile.TemporaryDirectory(prefix="nfs-load-", ignore_cleanup_errors=True) as base:
            (Path(base) / "hosts").mkdir()
            with mounted(Path(base) / "hosts", (NFS42,)) as filesystems:
                lines = report(filesystems[NFS42.name], Path(base), options)
    except HostsError as error:
        sys.exit(f"error: {error}\nhint: .ci/system installs what is needed")
    except KeyboardInterrupt:
        interrupted()
    print("\n".join(lines))
    if options.write:
        write_section(
            f"Load of an NFS server, {NFS42.name}", [facts(), *_WORDS.splitlines(), "", *lines]
        )


if __name__ == "__main__":
    main()
