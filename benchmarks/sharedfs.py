"""What becomes of runs, and of other queues, on real shared filesystems that are disturbed?

    PYTHONPATH=. python benchmarks/sharedfs.py [--full] [--peer-python PYTHON] [--write]

As root, with the packages that ``.ci/system`` installs. GlusterFS and MooseFS with default options,
and bindfs, whose locks are local to a mount, are mounted by two hosts, which are namespaces of this
machine. On each, ``hpctk doctor`` examines a directory; the scenarios of ``tests/sharedfs`` are
played; and other queues, and ours beside them, drain items with two workers a host, undisturbed and
with one worker killed. The filesystems are measured side by side. Exit code 0 if nothing of ours
was lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from resultsfile import facts, table, write_section
from sharedfs_peers import PEERS, SCRIPT, Came, Drain, play_ours

from tests.sharedfs import scenarios
from tests.sharedfs.filesystems import mounted
from tests.sharedfs.outcome import COLUMNS, Cells, said_by
from tests.sharedfs.plays import Plays
from tests.sharedfs.rehearsal import FULL, SMALL, Size

if TYPE_CHECKING:
    from tests.sharedfs.filesystems import Filesystem

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
    filesystem: Filesystem, python: Path, make_directory: Directories, names: list[str]
) -> list[tuple[str, bool, Came]]:
    """Every queue on one filesystem, undisturbed and with a worker killed."""
    found = []
    for name, kill in itertools.product(names, (False, True)):
        cwd = make_directory(f"{filesystem.name}-{name}")
        drain = Drain(filesystem, python, cwd, _ITEMS, _ITEM_S, _CAP_S)
        came = play_ours(drain, kill=kill) if name == OURS else drain.play(name, kill=kill)
        found.append((name, kill, came))
        print(filesystem.name, name, kill, came, file=sys.stderr, flush=True)
    return found


def measure(options: argparse.Namespace, size: Size, base: Path) -> tuple[list[Cells], set[str]]:
    """Rows of the table, and what other queues said when they failed."""
    known = versions(options.peer_python)
    make_directory = Directories(base)
    rows, said = [], set()
    (base / "hosts").mkdir()
    with mounted(base / "hosts") as filesystems, ThreadPoolExecutor() as threads:
        plays = Plays(filesystems, make_directory)
        words = {name: said_by(plays.report(size, name)) for name in filesystems}
        queues = [OURS, *known]
        futures = {
            name: threads.submit(drains, one, options.peer_python, make_directory, queues)
            for name, one in filesystems.items()
        }
        for filesystem, future in futures.items():
            for name, kill, came in future.result():
                title = f"{name} {known.get(name, '')}".strip()
                scenario = "two a host, " + ("one killed" if kill else "undisturbed")
                rows.append((filesystem, words[filesystem], title, scenario, *came.cells()))
                if came.said:
                    said.add(f"{title}, {filesystem}: {came.said.replace(str(base), '')}")
        for play, name in itertools.product(PLAYED, filesystems):
            title = play.__name__.replace("_", " ")
            try:
                outcome = plays.outcome(play, size, name)
            except AssertionError as error:
                empty = [""] * 5
                rows.append((name, words[name], OURS, title, "", f"failed: {error}", *empty, ""))
                continue
            cells = outcome.cells(name, words[name], title)
            rows.append((*cells, str(outcome.items - len(outcome.gathered))))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        plays.close()
    order = list(filesystems)
    rows.sort(key=lambda cells: order.index(cells[0]))
    return rows, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--full", action="store_true", help="scenarios at the size of 'make soak'")
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = parser.parse_args()
    size = FULL if options.full else SMALL
    with tempfile.TemporaryDirectory(prefix="sharedfs-") as base:
        rows, said = measure(options, size, Path(base))
    lines = [
        facts(),
        "",
        "Two a host: four workers of a queue drain",
        f"{_ITEMS} items of {_ITEM_S:g} s. Seconds count from the start, ours with that of Python,",
        f"to the last worker's end, which is made after {_CAP_S:g} s; leases are the default.",
        "Lost: without a result then. Left to a person: also after one more worker was started.",
        "",
        "The other scenarios are those of tests/sharedfs/scenarios.py:",
        f"{size.workers} workers a host, items of {size.seconds:g} s, lease {size.lease_s:g} s, a",
        f"host cut off for at least {size.silence_s:g} s. Seconds count from the disturbance until",
        "the run is whole.",
        "",
        *table([*COLUMNS, "left to a person"], [list(cells) for cells in rows]),
    ]
    if said:
        lines += ["", *(f"- {one}" for one in sorted(said))]
    print("\n".join(lines))
    if options.write:
        write_section("Shared filesystems", lines)
    lost = [cells for cells in rows if cells[2] == OURS and cells[5] != "0"]
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
