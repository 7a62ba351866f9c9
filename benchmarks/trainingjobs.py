"""Trainings as jobs of a lab: started, disturbed and followed to their ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainingruns import (
    DDP,
    HELD,
    TREES,
    Restart,
    Size,
    difference,
    kill_rank,
    loss_lines,
    overlap,
    repeated,
    restart_after,
)

from tests.slurm.rehearsal import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.templatesite import Site

CORES = len(os.sched_getaffinity(0))
_LIMIT_S = 1800.0
"""Guards against hanging, also on a busy machine."""
_WARNED = {"time": "3", "signal": "B:USR1@80"}
"""The ranks have 100 s to start and reach the step where they wait for the warning."""
_PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "nodes": ("train-multi-node", {"nodes": 2, "nproc_per_node": 2, "cpus_per_task": 2}),
    "ranks": ("train-multi-node", {"nodes": 2, "nproc_per_node": 2, "cpus_per_task": 1}),
    "single": ("train-single-gpu", {"nodes": 1, "cpus_per_task": 1}),
    "gpus": ("train-multi-gpu", {"nodes": 1, "gpus_per_node": 2, "cpus_per_task": 2}),
    "cpu": ("train-cpu", {"nodes": 1, "cpus_per_task": CORES}),
}
_PLACES["ranks"][1]["launch"] = "task-per-gpu"
WHAT = {
    "single": "train-single-gpu",
    "gpus": "train-multi-gpu, 1 node x 2 ranks",
    "nodes": "train-multi-node, 2 nodes x 2 ranks, task-per-node",
    "ranks": "train-multi-node, 2 nodes x 2 ranks, task-per-gpu",
    "cpu": f"train-cpu, {CORES} cores",
    "preempted": "train-multi-gpu, 2 ranks, preempted by a higher partition",
    "warned": "train-multi-gpu, 2 ranks, warned by its time limit",
    "killed": "train-multi-node, 2 nodes x 2 ranks, a rank killed by SIGKILL",
}
"""What each job is."""


@dataclass(frozen=True)
class Row:
    """What came of one job."""

    model: str
    name: str
    state: str
    code: int | None
    requeues: int | None
    steps: int
    twice: int
    """Steps made more than once."""
    difference: float
    """Largest difference of a step's loss from that of one process, in nats."""

    @property
    def kept(self) -> bool:
        """Whether it is as promised."""
        requeued = self.name in ("preempted", "warned")
        fine = self.state == "COMPLETED" and self.code == 0 and bool(self.requeues) == requeued
        return fine and self.difference <= 1e-5 and (self.name == "killed" or not self.twice)


class Trainings:
    """The trainings of one model on a lab."""

    def __init__(self, site: Site, model: str, size: Size) -> None:
        self.site, self.model, self.size = site, model, size
        self.runs = site.cwd / "runs"
        self._jobs: dict[str, str] = {}

    def run(self, name: str) -> Path:
        return self.runs / f"{self.model}-{name}"

    def alone(self) -> None:
        """Train in one process without Slurm, unless that was done."""
        if loss_lines(self.run("alone")):
            return
        argv = [sys.executable, DDP, *self.size.words(self.model)]
        done = subprocess.run(
            [*argv, "--output", str(self.run("alone"))],
            cwd=self.site.cwd, env={**self.site.lab.env, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def start(self, name: str, *, place: str = "", held: int = 0, **more: Any) -> None:
        """Submit a training; where is told by ``place``, or its name. ``held`` is after which
        step it waits, until it is told to stop or let go.
        """
        template, fields = _PLACES[place or name]
        data = self.run(name) / "data"
        data.mkdir(parents=True)
        for path in (self.run("alone") / "data").iterdir():
            shutil.copy(path, data)
        given = {"ntasks_per_node": None, "mem": "3G", "time": "60", **fields, **more}
        if template != "train-cpu":
            given["backend"] = "gloo"
        self._jobs[name] = self.site.submit(
            template,
            shell={"HPCTK_HELD": str(held), "HPCTK_HELD_UNTIL": str(self._let_go(name))},
            job_name=f"{self.model}-{name}",
            command=(HELD if held else DDP, *self.size.words(self.model)),
            **given,
        )

    def start_disturbed(self) -> None:
        """Submit the training that is preempted, and the one that is warned."""
        half = self.size.steps // 2
        self.start("warned", place="gpus", held=half, nodelist="n6", **_WARNED)
        self.start("preempted", place="gpus", held=half, nodelist="n7", exclusive=True)

    def start_together(self) -> None:
        """Submit two trainings on the same nodes, and have them train at the same time."""
        names = ("nodes", "ranks")
        for name in names:
            self.start(name, held=1, nodelist="n[1-2]")
        for name in names:
            self._wait_for_ranks(name, 4)
        for name in names:
            self._let_go(name).touch()

    def _let_go(self, name: str) -> Path:
        """The file that ends the waiting of a held training."""
        return self.run(f"{name}-goes-on")

    def _wait_for_ranks(self, name: str, ranks: int) -> None:
        """Until all ranks of a held training wait."""
        places = [self.run(name) / f"held-{rank}" for rank in range(ranks)]
        wait_until(
            lambda: all(path.exists() for path in places),
            lambda: self.said(name),
            limit_s=_LIMIT_S,
        )

    def preempt(self) -> None:
        """Take the node of the one that is preempted, once all of its ranks wait."""
        self._wait_for_ranks("preempted", 2)
        self.site.lab.preempt("--nodes=1", "--nodelist=n7")

    def kill(self) -> Restart | None:
        """Kill a rank of the job "killed" in the middle; None if it made no step again."""
        run, job = self.run("killed"), self._jobs["killed"]
        after = self.size.every * (self.size.steps // (2 * self.size.every)) + self.size.every // 2
        wait_until(
            lambda: len(loss_lines(run)) >= after, lambda: self.said("killed"), limit_s=_LIMIT_S
        )
        at, saved = kill_rank(run, 3)
        self.site.end_of(job, limit_s=_LIMIT_S)
        return restart_after(run, at, saved)

    def said(self, name: str) -> str:
        return self.site.said(self._jobs[name])

    def end(self, name: str) -> Row:
        """Wait for the end of a job, and compare its losses."""
        state, code, requeues = self.site.end_of(self._jobs[name], limit_s=_LIMIT_S)
        run = self.run(name)
        found = Row(
            model=self.model,
            name=name,
            state=state,
            code=code,
            requeues=requeues,
            steps=len({line["step"] for line in loss_lines(run)}),
            twice=repeated(run),
            difference=difference(run, self.run("alone")),
        )
        if not found.kept:
            print(self.said(name), file=sys.stderr)
        return found

    def together(self, one: str, other: str) -> int:
        """Steps of one that were made while the other made its own."""
        return overlap(self.run(one), self.run(other))


def grown(site: Site, grower: str, threads: int, turn: int, words: tuple[str, ...]) -> Any:
    """Train trees of XGBoost or LightGBM in a job with N cores; return what it printed."""
    name = f"{grower}-{threads}-{turn}"
    job = site.submit(
        "train-cpu", job_name=name, command=(TREES, "--library", grower, *words), nodes=1,
        ntasks_per_node=None, cpus_per_task=threads, mem="3G", time="60",
    )  # fmt: skip
    end = site.end_of(job, limit_s=_LIMIT_S)
    assert end == ("COMPLETED", 0, 0), site.said(job)
    line = next(line for line in site.said(job).splitlines() if '"threads"' in line)
    return json.loads(line.partition(": ")[2])
