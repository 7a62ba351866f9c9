"""What becomes of runs, and of other queues, on real shared filesystems that are disturbed?

    python benchmarks/sharedfs.py [--full] [--only FILESYSTEM...] [--peer-python PYTHON] [--write]

GlusterFS, MooseFS and CephFS, and bindfs, whose locks are local to a mount, are mounted by two
hosts, which are namespaces of this machine. NFSv3 and NFSv4.2 are mounted by two hosts that are
kernels, from a third one. On each, ``hpctk doctor`` examines a directory; the scenarios of
``tests/sharedfs`` are played; and other queues, and ours beside them, drain items with two workers
a host, undisturbed and with one worker killed. The filesystems are measured side by side, those of
one kind of hosts after the others. What fails is a row of the table as well, which says what was
seen. Exit code 0 if nothing of ours failed or was lost.

Takes several minutes, with --full longer. Needs root and the packages that
``.ci/system`` installs; for the other queues the interpreter that ``make bench`` makes.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import parser
from ending import interrupted
from failures import Failure, tried
from resultsfile import facts, table, write_section
from sharedfs_peers import PEERS, SCRIPT, Came, Drain, play_ours

from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from tests.sharedfs import scenarios
from tests.sharedfs.filesystems import mounted
from tests.sharedfs.hosts import HostsError
from tests.sharedfs.outcome import COLUMNS, Cells, said_by
from tests.sharedfs.plays import FUSE_KINDS, NFS_KINDS, Plays, is_played
from tests.sharedfs.rehearsal import FULL, SMALL, Size

if TYPE_CHECKING:
    from argparse import Namespace

    from tests.sharedfs.filesystems import Filesystem

    Kinds = tuple[type[Filesystem], ...]

OURS = "hpctk"
PEER_PYTHON = Path(__file__).parent.parent / ".venv" / "peers" / "bin" / "python"
PLAYED = (
    scenarios.one_machine,
    scenarios.kills,
    scenarios.takeover,
    scenarios.proven_locks,
    scenarios.additions,
    scenarios.campaign,
    scenarios.partition,
    scenarios.server_restart,
    scenarios.orderly_restart,
    scenarios.power_cut,
    scenarios.power_cut_of_proven_locks,
)
_ITEMS, _ITEM_S, _CAP_S = 200, 0.1, 60.0


class Directories:
    """New directories of this machine, for what is written down there."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._number = itertools.count()

    def __call__(self, name: str) -> Path:
        path = self._base / f"{name}-{next(self._number)}"
        path.mkdir()
        return path


def versions(python: Path) -> dict[str, str]:
    """The other queues that can be measured."""
    if not python.exists():
        return {}
    argv = [str(python), str(SCRIPT), "--installed", "--all"]
    found = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    return {name: found[name] for name in PEERS if name in found}


def drains(
    filesystem: Filesystem,
    python: Path,
    make_directory: Directories,
    names: list[str],
    size: Size,
) -> list[tuple[str, bool, Came | Failure]]:
    """Every queue on one filesystem, undisturbed and with a worker killed."""
    found = []
    size = replace(size, items=_ITEMS, seconds=_ITEM_S, workers=1, lease_s=DEFAULT_LEASE_S,
                   limit_s=_CAP_S)  # fmt: skip
    for name, kill in itertools.product(names, (False, True)):
        cwd = make_directory(f"{filesystem.name}-{name}")
        drain = Drain(filesystem, python, cwd, size)
        came = tried(
            f"{filesystem.name} {name}",
            partial(play_ours, drain, kill=kill)
            if name == OURS
            else partial(drain.play, name, kill=kill),
        )
        found.append((name, kill, came))
        print(filesystem.name, name, kill, came, file=sys.stderr, flush=True)
    return found


def cells_of(came: Came | Failure) -> list[str]:
    """From the number of items on; what was seen stands where others have what was lost."""
    return ["", came.seen, *[""] * 8] if isinstance(came, Failure) else came.cells()


@dataclass
class Table:
    """What was measured so far."""

    rows: list[Cells] = field(default_factory=list)
    said: set[str] = field(default_factory=set)
    """By other queues when they failed."""

    def add(self, *cells: str) -> None:
        self.rows.append(cells)
        print(*cells, sep=" | ", file=sys.stderr, flush=True)

    @property
    def lost(self) -> bool:
        """Whether anything of ours failed, or was lost."""
        return any(cells[2] == OURS and cells[5] != "0" for cells in self.rows)


def chosen(kinds: Kinds, names: list[str] | None) -> Kinds:
    """Those of these names, and further mounts of the same hosts; all of them without names."""
    return tuple(one for one in kinds if names is None or (one.set_of or one.name) in names)


def measure(options: Namespace, size: Size, base: Path, found: Table, kinds: Kinds) -> None:
    """Fill the table with rows about these filesystems."""
    known = versions(options.peer_python)
    make_directory = Directories(base)
    (base / "hosts").mkdir(parents=True)
    threads = ThreadPoolExecutor()
    rows = Table(said=found.said)
    with mounted(base / "hosts", kinds) as filesystems:
        played = Plays(filesystems, make_directory)
        try:
            words = {name: examined(played, size, name, rows) for name in filesystems}
            queues = [OURS, *known]
            futures = {
                name: threads.submit(drains, one, options.peer_python, make_directory, queues, size)
                for name, one in filesystems.items()
                if not one.set_of
            }
            for filesystem, future in futures.items():
                for name, kill, came in future.result():
                    title = f"{name} {known.get(name, '')}".strip()
                    scenario = "two a host, " + ("one killed" if kill else "undisturbed")
                    rows.add(filesystem, words[filesystem], title, scenario, *cells_of(came))
                    if isinstance(came, Came) and came.said:
                        rows.said.add(f"{title}, {filesystem}: {came.said.replace(str(base), '')}")
            for play, (name, one) in itertools.product(PLAYED, filesystems.items()):
                if is_played(type(one), play):
                    rows.add(name, words[name], OURS, *row_of(played, play, size, name))
        finally:
            played.close()
            threads.shutdown(wait=False, cancel_futures=True)
    order = list(filesystems)
    found.rows += sorted(rows.rows, key=lambda cells: order.index(cells[0]))


def row_of(played: Plays, play: scenarios.Scenario, size: Size, name: str) -> list[str]:
    """A scenario on one filesystem, from its title on."""
    title = play.__name__.replace("_", " ")
    outcome = tried(f"{name} {title}", partial(played.outcome, play, size, name))
    if isinstance(outcome, Failure):
        return [title, *cells_of(outcome)]
    left = str(outcome.items - len(outcome.gathered))
    return [*outcome.cells("", "", title)[3:], left]


def examined(played: Plays, size: Size, name: str, found: Table) -> str:
    """What doctor says of a filesystem, in words."""
    if not played.examines(name):
        return "-"
    report = tried(f"{name} doctor", partial(played.report, size, name))
    if isinstance(report, Failure):
        found.add(name, "failed", OURS, "examination", *cells_of(report))
        return "failed"
    return said_by(report)


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--full", action="store_true", help="scenarios at the size of 'make soak'")
    names = [kind.name for kind in (*FUSE_KINDS, *NFS_KINDS) if not kind.set_of]
    given.add_argument("--only", nargs="+", choices=names, metavar="FILESYSTEM",
                       help=f"measure only these of {', '.join(names)}")  # fmt: skip
    given.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="has other queues")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if options.only and options.write:
        given.error("--write replaces the rows of all filesystems; leave --only out")
    if os.geteuid() != 0:
        given.error("only root can mount filesystems")
    size = FULL if options.full else SMALL
    found, failure = Table(), ""
    try:
        with tempfile.TemporaryDirectory(prefix="sharedfs-", ignore_cleanup_errors=True) as base:
            for group, kinds in {"namespaces": FUSE_KINDS, "kernels": NFS_KINDS}.items():
                if wanted := chosen(kinds, options.only):
                    measure(options, size, Path(base) / group, found, wanted)
    except HostsError as error:
        failure = f"error: {error}"
    except KeyboardInterrupt:
        interrupted()
    if found.rows:
        show(options, size, found)
    if failure:
        print(failure, "hint: .ci/system installs what is needed", sep="\n", file=sys.stderr)
    sys.exit(1 if failure or found.lost else 0)


def show(options: Namespace, size: Size, found: Table) -> None:
    """Print the table, and write it where that is asked for."""
    lines = [
        facts(),
        "",
        "Queues: four workers, two per host, process",
        f"{_ITEMS} items of {_ITEM_S:g} s. Seconds count from the start (for hpctk, including that",
        f"of Python) to the exit of the last worker, or to its end by force after {_CAP_S:g} s.",
        "Leases are the default. Lost: items without a result then. Left to a person: still",
        "without one after a further worker.",
        "",
        "The other scenarios are defined in tests/sharedfs/scenarios.py:",
        f"{size.workers} workers per host, items of {size.seconds:g} s, lease {size.lease_s:g} s,",
        f"a host cut off for at least {size.silence_s:g} s. Seconds count from the disturbance",
        "until the run is complete. Longest standstill: seconds without a result of a worker that",
        "was not disturbed and had items. Taken over after: seconds until each death was",
        f"detected. NFS servers keep the locks of a lost client for {size.server_lease_s} s.",
        "",
        *table([*COLUMNS, "left to a person"], [list(cells) for cells in found.rows]),
    ]
    if found.said:
        lines += ["", *(f"- {one}" for one in sorted(found.said))]
    print("\n".join(lines))
    if options.write:
        write_section("Shared filesystems", lines)


if __name__ == "__main__":
    main()
