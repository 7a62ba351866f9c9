"""A run over checkpoints whose files are not in memory, with and without prefetch.

    python benchmarks/prefetch.py [--directory DIR] [--checkpoints 8] [--size 200] [--compute 1]

Checkpoints of SIZE megabytes are made below DIR, the system's directory for temporary files by
default. One worker reads each of them whole and then waits COMPUTE seconds, as a processor does
that waits for a GPU. Before each run the kernel is told to forget the files (POSIX_FADV_DONTNEED),
which it does on a local disk, and on a shared filesystem for this node alone: servers have caches
too. Runs with and without prefetch take turns. No tensors and no GPU are part of it: it shows
whether reading is hidden behind other work, and not what that is worth on a site's filesystem.

Takes about a minute and 1.6 GB of disk. Needs nothing.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import directory, number, parser, seconds
from resultsfile import facts, table, write_section

from hpc_toolkit.run import Run
from hpc_toolkit.science.workloads.checkpoints import prefetch_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TITLE = "Prefetch of checkpoints"
MEGABYTE = 10**6


class Alone:
    """Reads a checkpoint when it is loaded."""

    def __init__(self, *, root: str, compute_s: float) -> None:
        self._root = root
        self._compute_s = compute_s
        self._loads = 0

    def load(self, group: str) -> tuple[int, float]:
        """How many were loaded, and the seconds that it took to read this one."""
        self._loads += 1
        began = time.monotonic()
        for path in sorted((Path(self._root) / group).iterdir()):
            path.read_bytes()
        return self._loads, time.monotonic() - began

    def run(
        self, context: tuple[int, float], items: Iterable[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        for _ in items:
            time.sleep(self._compute_s)
            yield {"number": context[0], "load_s": context[1]}


class Prefetch(Alone):
    """Has the next one read meanwhile, as the workloads do that load models."""

    def prefetch(self, group: str) -> None:
        prefetch_checkpoint(self._root, group)


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--directory", type=directory, default=tempfile.gettempdir(), help="DIR")
    given.add_argument("--checkpoints", type=number, default=8, help="how many")
    given.add_argument("--size", type=number, default=200, help="of each, in megabytes")
    given.add_argument("--compute", type=seconds, default=1.0, help="seconds for each")
    given.add_argument("--rounds", type=number, default=3, help="runs of each kind")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        lines = compare(
            Path(scratch).resolve(),
            options.checkpoints,
            options.size,
            options.compute,
            options.rounds,
        )
        print("\n".join(lines))
        if options.write:
            write_section(TITLE, ["", facts(Path(scratch)), "", *lines])


def compare(scratch: Path, checkpoints: int, size: int, compute_s: float, rounds: int) -> list[str]:
    """The table of results."""
    root = scratch / "checkpoints"
    make(root, checkpoints, size * MEGABYTE)
    kinds = {"without prefetch": Alone, "with prefetch": Prefetch}
    loads: dict[str, list[float]] = {kind: [] for kind in kinds}
    walls: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds):
        for kind, workload in kinds.items():
            forget(root)
            began = time.monotonic()
            loads[kind] += drain(scratch / f"{workload.__name__}-{turn}", root, workload, compute_s)
            walls[kind].append(time.monotonic() - began)
    reader = Alone(root=str(root), compute_s=0.0)
    warm = [reader.load(path.name)[1] for path in [*root.iterdir()] * 2][checkpoints:]
    about = (
        f"{checkpoints} checkpoints of {size} MB, each followed by {compute_s:g} s of waiting, one "
        f"worker, {rounds} rounds. The first checkpoint of a run is never prefetched: it counts in "
        "the complete run but not among the loads. A checkpoint that is in memory takes "
        f"{statistics.median(warm):.3f} s to read."
    )
    head = ["", "load, median", "loads", "complete run, median", "runs"]
    rows = [[kind, *spread(loads[kind]), *spread(walls[kind])] for kind in kinds]
    return [about, "", *table(head, rows)]


def spread(values: list[float]) -> list[str]:
    ends = f"{min(values):.3f} to {max(values):.3f} s"
    return [f"{statistics.median(values):.3f} s", ends]


def make(root: Path, checkpoints: int, size: int) -> None:
    """Directories that look like checkpoints, on disk."""
    block = os.urandom(MEGABYTE)
    for step in range(checkpoints):
        path = root / f"step{step}"
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        with (path / "model.safetensors").open("wb") as file:
            for _ in range(size // MEGABYTE):
                file.write(block)


def forget(root: Path) -> None:
    """Have the kernel drop what it holds of the files."""
    for path in root.glob("*/*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def drain(path: Path, root: Path, workload: type[Alone], compute_s: float) -> list[float]:
    """One run; the seconds of each load but the first."""
    with contextlib.chdir(Path(__file__).parent):  # where its worker finds this file
        run = Run.create(
            path,
            [{"checkpoint": one.name} for one in sorted(root.iterdir())],
            workload=f"prefetch:{workload.__name__}",
            options={"root": str(root), "compute_s": compute_s},
            group_by="checkpoint",
        )
    code = run.work(1)
    assert code == 0, f"the worker ended with {code}"
    values = [row["value"] for row in run.results()]
    return [value["load_s"] for value in values if value["number"] > 1]


if __name__ == "__main__":
    main()
