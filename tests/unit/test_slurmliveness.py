"""What Slurm's words say of silent workers, and how seldom it is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.slurm.records import UNKNOWN, JobRecord, NodeRecord
from hpc_toolkit.worker.slurmliveness import judge

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
