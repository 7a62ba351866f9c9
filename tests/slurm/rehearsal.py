"""A run on the lab: made, submitted and disturbed by the command line, and measured."""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.journal import decode_line
from tests.integration import realrun
from tests.integration.realrun import HANG_S
from tests.slurm.reallab import LOOK_S, LabUnderTest

T = TypeVar("T")

LAYERS = 12
"""Items of one group."""

MEASURED: list[str] = []
"""What the scenarios of this test run came to; shown at its end."""


@dataclass(frozen=True)
class Size:
    """How much is rehearsed."""

    groups: int
    """Checkpoints; each has LAYERS items."""
    seconds: float
    """Length of an item."""
    gpus_per_node: int = 2
    """Each has a rank."""
    limit_s: float = HANG_S
    """After so long the scenario is taken for stuck."""

    @property
    def items(self) -> int:
        return self.groups * LAYERS

    @property
    def ranks(self) -> int:
        """On the 8 nodes of the lab."""
        return 8 * self.gpus_per_node


SMALL = Size(groups=48, seconds=0.25)
FULL = Size(groups=432, seconds=0.25, gpus_per_node=4)
"""3 sizes of a model x 144 checkpoints x 12 layers."""


def wait_until(
    condition: Callable[[], T], what: str | Callable[[], str], *, limit_s: float = HANG_S
) -> T:
    """As tests of other commands do, but with fewer looks: each starts a program of Slurm."""
    return realrun.wait_until(condition, what, limit_s=limit_s, every_s=LOOK_S)


class CpuClock:
    """The share of this machine's cores that was busy, from /proc/stat (proc(5))."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[int, int]:
        fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    def share(self) -> float:
        total, idle = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return 1 - idle / max(1, total)


@dataclass(frozen=True)
class Measured:
    """What the files of a run say of it."""

    items: int
    done_lines: Counter[tuple[str, int]]
    """How many done lines each item has."""
    ended: list[tuple[float, str]]
    """Epoch seconds and worker of every done line, in time's order."""
    claimed: list[tuple[float, str]]
    """The same of every claim; roughly, since names of one file share its time: when the first
    item began that has a line, else when the worker claimed for the first time."""
    deaths: list[dict[str, Any]]
    workers: dict[str, dict[str, Any]]

    @property
    def span_s(self) -> float:
        """From the first claim to the last result."""
        return self.ended[-1][0] - self.claimed[0][0]

    def efficiency(self, seconds: float, ranks: int) -> float:
        return self.items * seconds / (ranks * self.span_s)

    @property
    def evidence(self) -> Counter[tuple[str, str]]:
        """Deaths by what they were seen by and what explains them."""
        return Counter((line["evidence"], line["explained"]) for line in self.deaths)

    def workers_of(self, *, host: str | None = None, job: str | None = None) -> set[str]:
        return {
            name
            for name, presence in self.workers.items()
            if host in (None, presence["host"]) and job in (None, presence["job"])
        }


@dataclass
class Rehearsal:
    """One run in a directory of its own, on one lab."""

    lab: LabUnderTest
    cwd: Path
    environ: dict[str, str] = field(default_factory=dict)
    """What is added to the environment of every command."""

    @property
    def run(self) -> Path:
        return self.cwd / "run"

    @property
    def program(self) -> list[str]:
        """The words with which a job's script calls hpctk."""
        return [sys.executable, "-m", "hpc_toolkit"]

    def call(self, *argv: object, timeout_s: float = HANG_S) -> str:
        """A program that must succeed; its stdout."""
        words = map(str, argv)
        return self.lab.run(*words, cwd=self.cwd, env=self.environ, timeout_s=timeout_s).stdout

    def hpctk(self, *words: object, timeout_s: float = HANG_S) -> str:
        return self.call(*self.program, *words, timeout_s=timeout_s)

    def init(
        self,
        size: Size,
        *words: object,
        workload: str = "hpc_toolkit.science.workloads.synthetic:Sleep",
        command: str = "",
    ) -> None:
        """A run of items that sleep, or are done by a command, sealed."""
        lines = [
            json.dumps({"checkpoint": f"step{group}", "layer": layer, "seconds": size.seconds})
            for group in range(size.groups)
            for layer in range(LAYERS)
        ]
        (self.cwd / "items.jsonl").write_text("\n".join(lines))
        self.hpctk(
            *("init", self.run, "--items", "items.jsonl"),
            *(("--command", command) if command else ("--workload", workload)),
            *("--group-by", "checkpoint", *words),
        )

    def render(self, template: str = "work-queue", **options: object) -> Path:
        """A script for the lab; the options are those of ``hpctk render``."""
        words: list[object] = ["--cluster", "lab"]
        for name, value in {"time": "30:00", "mem": "10G", "cpus_per_task": 2, **options}.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is None else [value])]
        return self.cwd / self.hpctk("render", template, *words).strip()

    def sbatch(self, *argv: object) -> str:
        """The id of the new job."""
        return self.call("sbatch", "--parsable", *argv).strip()

    def node_state(self, node: str) -> str:
        """Slurm's word for a node, in lower case; a final * means that it does not respond."""
        return self.call("sinfo", "-hN", "-p", "main", "-n", node, "-o", "%T").strip()

    def log(self) -> str:
        """All that the jobs' scripts printed."""
        logs = sorted([*(self.cwd / "slurm" / "logs").glob("*.out"), *self.cwd.glob("*.out")])
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.hpctk("status", self.run, "--json", "--no-slurm"))
        return found

    def complete(self) -> bool:
        return Run.open(self.run).status().complete

    def done(self) -> int:
        return self.measure().items

    def wait_for_done(self, number: int, *, limit_s: float = HANG_S) -> None:
        """Until so many results are in the journals."""
        wait_until(lambda: self.done() >= number, f"{number} results", limit_s=limit_s)

    def wait_for_end(self, *jobs: str, limit_s: float = HANG_S) -> None:
        """Until these jobs ended for good."""
        for job in jobs:
            self.lab.wait_for(job, timeout_s=limit_s)

    def rows(self) -> list[dict[str, Any]]:
        assert self.status()["complete"], self.log()
        self.hpctk("gather", self.run, "-o", "rows.jsonl")
        return [json.loads(line) for line in (self.cwd / "rows.jsonl").read_text().splitlines()]

    def measure(self) -> Measured:
        """Read everything that the run's workers left."""
        done: Counter[tuple[str, int]] = Counter()
        ended, deaths = [], []
        began: dict[tuple[str, int], float] = {}
        for worker, line in self._lines():
            record = decode_line(line)
            assert record is not None
            if record["type"] == "done":
                done[record["unit"].partition("-")[0], record["item"]] += 1
                ended.append((record["at"], worker))
                key = record["unit"], record["generation"]
                began[key] = min(began.get(key, math.inf), record["at"] - record["seconds"])
            elif record["type"] == "death":
                deaths.append(record)
        claims = []
        for path in self.run.glob("stages/*/claims/*.lock"):
            unit, _, generation = path.stem.rpartition(".")
            key = f"{path.parent.parent.name}/{unit}", int(generation)
            claims.append((began.get(key, os.lstat(path).st_mtime), os.readlink(path)))
        found = [read_presence(path) for path in self.run.glob("workers/*.json")]
        presences = [asdict(one) for one in found if one is not None]
        return Measured(
            items=len(done),
            done_lines=done,
            ended=sorted(ended),
            claimed=sorted(claims),
            deaths=deaths,
            workers={presence["worker"]: presence for presence in presences},
        )

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        for path in self.run.glob("journals/*.jsonl"):
            for line in path.read_bytes().split(b"\n")[:-1]:
                yield path.stem, line


def check_whole(rehearsal: Rehearsal, size: Size) -> Measured:
    """Nothing is lost, each item has one result, and no attempt was burnt."""
    rows = rehearsal.rows()
    found = rehearsal.measure()
    assert len(rows) == size.items
    assert {row["state"] for row in rows} == {"done"}
    assert {row["attempts"] for row in rows} == {1}
    assert len({json.dumps(row["item"]) for row in rows}) == size.items
    assert set(found.done_lines.values()) == {1}
    return found
