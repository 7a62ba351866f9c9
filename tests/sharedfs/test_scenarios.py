"""Runs on real shared filesystems, worked on from two hosts and disturbed; see scenarios.py.

Every host is a host by itself for hpctk (HPCTK_HOST), so that deaths are seen by the evidence that
a cluster would have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sharedfs.filesystems import KINDS
from tests.sharedfs.rehearsal import FULL, HIT, SMALL, SPARED
from tests.sharedfs.scenarios import (
    additions,
    campaign,
    kills,
    one_machine,
    partition,
    proven_locks,
    server_restart,
    takeover,
)

if TYPE_CHECKING:
    from tests.sharedfs.conftest import Rehearse, Reports
    from tests.sharedfs.outcome import Outcome
    from tests.sharedfs.rehearsal import Size

KINDS_BY_NAME = {kind.name: kind for kind in KINDS}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.parametrize("name", [kind.name for kind in KINDS]),
    pytest.mark.parametrize(
        "size",
        [
            pytest.param(SMALL, id="small"),
            pytest.param(FULL, id="full", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
        ],
    ),
]


_COUNTS = ("done", "failed", "pending", "duplicates")
_AGAIN = (
    "start workers again; nothing is lost",
    "try again when the filesystem answers",
    "try again; nothing that was recorded is lost",
)


def _check_whole(found: Outcome) -> None:
    """Nothing is lost, each item has one row, no attempt was burnt, and all is told as it is."""
    assert len(found.gathered) == found.items
    assert set(found.gathered.values()) == {1}
    assert {row["attempts"] for row in found.rows} == {1}
    assert found.status["complete"] is True
    assert found.status["warnings"] == []
    stages = found.status["stages"].values()
    counts = {key: sum(one[key] for one in stages) for key in _COUNTS}
    assert (counts["done"], counts["failed"], counts["pending"]) == (found.items, 0, 0)
    assert counts["duplicates"] == sum(number - 1 for number in found.done_lines.values())


def _check_evidence(found: Outcome) -> None:
    """A free lock is believed on the dead worker's own host alone; elsewhere silence decides."""
    for death in found.deaths:
        assert death["evidence"] == "lease" or death["host"] == death["by"], death


def test_run_that_nothing_disturbs_repeats_nothing(
    rehearse: Rehearse, size: Size, name: str
) -> None:
    """Not even where locks are of one mount and two mounts are of one machine."""
    found = rehearse(one_machine, size, name)
    _check_whole(found)
    assert found.deaths == []
    assert max(found.executions.values()) == 1
    assert [(one.code, one.err) for one in found.ended] == [(0, ""), (0, "")]


def test_run_whose_workers_are_killed_is_whole(rehearse: Rehearse, size: Size, name: str) -> None:
    found = rehearse(kills, size, name)
    _check_whole(found)
    _check_evidence(found)
    assert {death["host"] for death in found.deaths} == {HIT, SPARED}
    assert found.evidence["lock"] > 0
    assert [one.err for one in found.ended] == ["", ""]


def test_units_of_a_dead_host_are_taken_over_after_the_lease(
    rehearse: Rehearse, size: Size, name: str
) -> None:
    found = rehearse(takeover, size, name)
    _check_whole(found)
    seen = [(death["host"], death["by"], death["evidence"]) for death in found.deaths]
    assert set(seen) == {(HIT, HIT, "lock"), (HIT, SPARED, "lease")}, found.notes
    # Its last heartbeat may have come a quarter of the lease before its end.
    assert found.notes["far_s"] >= 0.75 * size.lease_s


def test_workers_that_wait_take_up_what_is_added(rehearse: Rehearse, size: Size, name: str) -> None:
    found = rehearse(additions, size, name)
    _check_whole(found)
    assert max(found.executions.values()) == 1
    assert found.deaths == []
    waits = "every item is finished; items waits for more items, or for 'hpctk seal'"
    assert found.notes["said"] == waits
    assert max(found.notes["waits"]) < 20


def test_campaign_whose_workers_wait_on_both_hosts_is_conducted_from_one(
    rehearse: Rehearse, size: Size, name: str
) -> None:
    found = rehearse(campaign, size, name)
    _check_whole(found)
    assert max(found.executions.values()) == 1
    assert found.deaths == []
    arms = found.notes["arms"]
    tasks = 2 * size.workers
    assert len(arms) == len(set(arms)) == (found.items - 2 * tasks) / tasks
    assert found.notes["shares"] == {len(arms)}
    assert [(one.code, one.err) for one in found.ended] == 3 * [(0, "")]


def test_doctor_tells_whether_locks_reach_the_other_host(
    reports: Reports, size: Size, name: str
) -> None:
    report = reports(size, name)
    findings = {one["check"]: one for one in report["findings"]}
    assert report["apart"] is True
    assert [side["host"] for side in report["sides"]] == [HIT, SPARED]
    assert findings["exclusive names"]["verdict"] == "fine"
    if KINDS_BY_NAME[name].locks_reach:
        assert (report["locks_proven"], findings["locks (flock)"]["verdict"]) == (True, "fine")
        assert "free lock" in findings["deaths"]["found"]
    else:
        assert (report["locks_proven"], findings["locks (flock)"]["verdict"]) == (False, "slower")
        assert findings["locks (flock)"]["found"] == "granted to both sides at once"
        assert "lease" in findings["deaths"]["found"]


def test_death_on_the_other_host_is_seen_by_a_lock_where_doctor_proved_locks(
    rehearse: Rehearse, size: Size, name: str
) -> None:
    found = rehearse(proven_locks, size, name)
    _check_whole(found)
    evidence = "lock" if KINDS_BY_NAME[name].locks_reach else "lease"
    seen = [(death["host"], death["by"], death["evidence"]) for death in found.deaths]
    assert seen == [(HIT, SPARED, evidence)]
    assert [one.err for one in found.ended] == [""]


def test_host_that_comes_back_after_the_gather_changes_nothing(
    rehearse: Rehearse, size: Size, name: str
) -> None:
    found = rehearse(partition, size, name)
    _check_whole(found)
    assert {(death["host"], death["evidence"]) for death in found.deaths} == {(HIT, "lease")}
    assert found.rows == found.notes["published"]
    assert {one.host for one in found.ended} == {HIT, SPARED}


def test_run_whose_server_restarts_is_whole(rehearse: Rehearse, size: Size, name: str) -> None:
    found = rehearse(server_restart, size, name)
    _check_whole(found)
    _check_evidence(found)
    if (told := found.notes["told"]) is not None:
        assert "Transport endpoint is not connected" in told
        assert "try again" in told
    for one in found.ended:
        # Who left says why, and that it can be started again; how depends on what it was just at.
        assert one.code == 0 or any(hint in one.err for hint in _AGAIN), one.err
