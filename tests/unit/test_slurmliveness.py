"""What Slurm's words say of silent workers, and how seldom it is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.presence import Presence, PresenceFile
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm import client, controller
from hpc_toolkit.slurm.records import UNKNOWN, JobRecord, NodeRecord
from hpc_toolkit.worker.slurmliveness import SlurmLiveness, judge, main
from tests.manualclock import ManualClock

SILENT = Presence(
    worker="n3-1-a", host="n3", boot="b", pid=1, rank=8, job="17", restart=1, heartbeat=5
)


def silent(worker: str) -> Presence:
    return replace(SILENT, worker=worker)


@pytest.mark.parametrize(
    ("job", "node", "deaths"),
    [
        ({"state": "PREEMPTED"}, {}, ["preemption"]),
        ({"state": "TIMEOUT"}, {}, ["time limit"]),
        ({"state": "NODE_FAIL"}, {}, ["node failure"]),
        ({"state": "CANCELLED"}, {}, ["cancel"]),
        ({"state": "REQUEUED"}, {}, ["requeue"]),
        ({"state": "SUSPENDED"}, {}, ["suspended"]),
        ({"state": "OUT_OF_MEMORY"}, {}, ["out of memory"]),
        ({"state": "COMPLETED"}, {}, [""]),
        # A job that may run proves nothing unless it started again, or its node is lost.
        *(({"state": state}, {}, []) for state in ("RUNNING", "COMPLETING", UNKNOWN)),
        (None, {}, []),
        ({"restarts": None}, {}, []),
        ({"restarts": 2}, {}, ["requeue"]),
        ({}, {"state": "DOWN"}, ["node failure"]),
        ({}, {"state": "ALLOCATED", "flags": frozenset({"NOT_RESPONDING"})}, ["node failure"]),
        ({}, {"state": "MIXED", "flags": frozenset({"DRAIN"})}, []),
        ({}, {"state": UNKNOWN}, []),
    ],
)
def test_what_slurm_says_is_a_death_explained_in_our_words_or_proves_nothing(
    job: dict[str, Any] | None, node: dict[str, Any], deaths: list[str]
) -> None:
    record = JobRecord(**{"id": "17", "state": "RUNNING", "restarts": 1, **(job or {})})
    nodes = {"n3": NodeRecord(name="n3", **node)} if node else {}

    found = judge([SILENT], {} if job is None else {"17": record}, nodes)

    assert [(one.worker, one.heartbeat, one.explained) for one in found] == [
        ("n3-1-a", 5, explained) for explained in deaths
    ]


def test_all_nodes_of_a_suspended_job_are_known_by_one_question(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those that other workers watch would count as dead after half a lease."""
    for name, job in (("n3-1-a", "17"), ("n4-1-a", "17"), ("n5-1-a", "18")):
        one = replace(SILENT, worker=name, host=name[:2], job=job)
        PresenceFile(paths.worker(name), one).close()
    record = JobRecord(id="17", state="SUSPENDED", restarts=1)
    monkeypatch.setattr(client, "job_states", lambda ids, **_: dict.fromkeys(ids, record))
    monkeypatch.setattr(controller, "node_states", lambda _, **__: {})

    assert main([str(paths.root), f"n3-1-a:{SILENT.heartbeat}"]) == 0

    _, notices = ControlReader(paths).poll()
    assert sorted(one.worker for one in notices) == ["n3-1-a", "n4-1-a"]
    assert {one.explained for one in notices} == {"suspended"}


class Asking(SlurmLiveness):
    """The part of one worker, which notes what it would ask."""

    def __init__(self, root: Path, clock: ManualClock, name: str) -> None:
        super().__init__(root, clock)
        self.own = replace(SILENT, worker=name)
        self.control = ControlReader(RunPaths(root))
        self.asked: list[str] = []

    def look(self, *silent: str) -> None:
        self.control.poll()
        found = [replace(SILENT, worker=name) for name in silent]
        self.ask(found, self.own, self.control.asked[self.own.cluster])

    def _start(self, silent: list[Presence]) -> None:
        self.asked += [one.worker for one in silent]


def test_of_all_workers_that_see_deaths_at_once_one_asks_slurm(tmp_path: Path) -> None:
    RunPaths(tmp_path).make([])
    clock = ManualClock()
    workers = [Asking(tmp_path, clock, f"n{number}-1-a") for number in range(20)]

    for number, worker in enumerate(workers):
        worker.look(f"n{number + 100}-1-a")

    assert [len(worker.asked) for worker in workers] == [1] + 19 * [0]
    # Its answer did not show the deaths that the others see.
    clock.advance(46.0)
    for number, worker in enumerate(workers[1:]):
        worker.look(f"n{number + 100}-1-a")
    assert sum(len(worker.asked) for worker in workers) == 2


def test_the_slurm_of_each_cluster_is_asked(tmp_path: Path) -> None:
    RunPaths(tmp_path).make([])
    workers = [Asking(tmp_path, ManualClock(), name) for name in ("n1-1-a", "n2-1-a")]
    workers[1].own = replace(workers[1].own, cluster="beta")

    for worker in workers:
        worker.look("n3-1-a")

    assert [worker.asked for worker in workers] == [["n3-1-a"], ["n3-1-a"]]
