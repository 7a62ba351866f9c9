"""What Slurm's words say of silent workers, and how seldom it is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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


def said(state: str, *, restarts: int | None = 1) -> dict[str, JobRecord]:
    return {"17": JobRecord(id="17", state=state, restarts=restarts)}


@pytest.mark.parametrize(
    ("state", "explained"),
    [
        ("PREEMPTED", "preemption"),
        ("TIMEOUT", "time limit"),
        ("NODE_FAIL", "node failure"),
        ("CANCELLED", "cancel"),
        ("REQUEUED", "requeue"),
        ("SUSPENDED", "suspended"),
        ("OUT_OF_MEMORY", "out of memory"),
        ("COMPLETED", ""),
    ],
)
def test_a_job_that_ended_is_a_death_explained_in_our_words(state: str, explained: str) -> None:
    (notice,) = judge([SILENT], said(state), {})

    assert (notice.worker, notice.heartbeat, notice.explained) == ("n3-1-a", 5, explained)


@pytest.mark.parametrize(
    ("record", "dead"),
    [
        *((said(state), []) for state in ("RUNNING", "COMPLETING", UNKNOWN)),
        (said("RUNNING", restarts=None), []),
        (said("RUNNING", restarts=2), ["requeue"]),
        ({}, []),
    ],
)
def test_a_job_that_may_run_proves_nothing_unless_it_started_again(
    record: dict[str, JobRecord], dead: list[str]
) -> None:
    assert [notice.explained for notice in judge([SILENT], record, {})] == dead


@pytest.mark.parametrize(
    ("node", "dead"),
    [
        (NodeRecord(name="n3", state="DOWN"), True),
        (NodeRecord(name="n3", state="ALLOCATED", flags=frozenset({"NOT_RESPONDING"})), True),
        (NodeRecord(name="n3", state="MIXED", flags=frozenset({"DRAIN"})), False),
        (NodeRecord(name="n3", state=UNKNOWN), False),
    ],
)
def test_a_lost_node_is_a_death_although_the_job_runs(node: NodeRecord, dead: bool) -> None:
    notices = judge([SILENT], said("RUNNING"), {"n3": node})

    assert [notice.explained for notice in notices] == (["node failure"] if dead else [])


def test_all_nodes_of_a_suspended_job_are_known_by_one_question(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those that other workers watch would count as dead after half a lease."""
    for name, job in (("n3-1-a", "17"), ("n4-1-a", "17"), ("n5-1-a", "18")):
        one = replace(SILENT, worker=name, host=name[:2], job=job)
        PresenceFile(paths.worker(name), one).close()
    records = said("SUSPENDED")
    monkeypatch.setattr(client, "job_states", lambda ids, **_: {one: records[one] for one in ids})
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
