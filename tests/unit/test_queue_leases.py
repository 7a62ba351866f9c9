"""Who lives, as one observer judges it: by heartbeats, its clock, its host's locks, and Slurm.

And requests and notices: new files that everybody reads once.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.queue.control import (
    SILENT_NODE,
    ControlReader,
    DeathNotice,
    FreeUnit,
    Request,
    give_free,
    give_notice,
    may_ask,
)
from hpc_toolkit.queue.leases import POOL_ENDED, Liveness, Verdict, WorkerLock, lock_is_free
from hpc_toolkit.queue.presence import DRAINING, FINISHED, Presence, PresenceFile, read_presence
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm import client, controller
from hpc_toolkit.slurm.records import UNKNOWN, JobRecord, NodeRecord
from hpc_toolkit.system.ranks import process_id
from hpc_toolkit.worker.slurmliveness import SlurmLiveness, judge, main
from tests.manualclock import ManualClock
from tests.replacedcalls import CountedCalls

LEASE_S = 60.0


class Watched:
    """A run whose workers beat as the test says, and an observer of them on host ``here``."""

    def __init__(self, paths: RunPaths, clock: ManualClock | None = None, **facts: Any) -> None:
        self.paths = paths
        self.clock = clock or ManualClock()
        facts = {"host": "here", "boot": "boot", "lease_s": LEASE_S, **facts}
        self.observer = Liveness(paths, self.clock, **facts)

    def begin(self, name: str = "w", **changes: Any) -> PresenceFile:
        fields = {"host": "elsewhere", "boot": "boot", "pid": 1, "rank": 0, "job": None, **changes}
        self.paths.worker_lock(name).touch()
        return PresenceFile(self.paths.worker(name), Presence(worker=name, **fields))

    def verdict(self, name: str = "w") -> Verdict:
        return self.observer.verdict(name)

    def look(self) -> dict[str, Verdict]:
        """The verdict of each worker."""
        return {name: self.verdict(name) for name in self.observer.names()}

    def silent(self) -> list[str]:
        return [presence.worker for presence in self.observer.silent(missed=2.5)]


@pytest.fixture
def run(paths: RunPaths) -> Watched:
    return Watched(paths)


def test_i3_a_silent_worker_is_dead_after_the_lease(run: Watched) -> None:
    run.begin()

    assert run.verdict().alive
    run.clock.advance(LEASE_S - 0.1)
    assert run.verdict().alive
    run.clock.advance(0.2)
    verdict = run.verdict()

    assert (verdict.alive, verdict.finished, verdict.evidence) == (False, False, "lease")
    assert verdict.host == "elsewhere"


@given(st.lists(st.tuples(st.floats(0, 90), st.booleans(), st.floats(-1e9, 1e9)), max_size=12))
def test_i4_only_the_observers_monotonic_clock_decides(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, bool, float]]
) -> None:
    """Wall clocks of both sides jump by decades; the verdict rests on silence alone."""

    class Skewed(ManualClock):
        skew = 0.0

        def wall(self) -> float:
            return self.now + self.skew

    paths = RunPaths(tmp_path_factory.mktemp("run"))
    paths.make([])
    clock = Skewed()
    run = Watched(paths, clock)
    worker = run.begin(at=1e12, started=-5.0)
    silent_since = clock.now
    assert run.verdict().alive
    for seconds, beats, skew in steps:
        clock.advance(seconds)
        clock.skew = skew
        if beats:
            worker.update(at=-skew)
            silent_since = clock.now
        assert run.verdict().alive == (clock.now - silent_since < LEASE_S)


def test_i4_a_heartbeat_number_that_falls_is_a_change_as_well(run: Watched) -> None:
    worker = run.begin(heartbeat=100)
    run.verdict()
    run.clock.advance(LEASE_S + 1)
    run.paths.worker("w").write_bytes(replace(worker.presence, heartbeat=3).encode())

    assert run.verdict().alive


def test_a_free_lock_on_the_same_host_and_boot_is_a_death_that_can_be_told_at_once(
    run: Watched,
) -> None:
    run.begin(host="here", claim="items/000001-0.1")
    verdict = run.verdict()
    assert (verdict.alive, verdict.evidence) == (False, "lock")

    notice = run.observer.notice("w", "lock")

    assert (notice is not None, run.observer.claim_of("w")) == (True, "items/000001-0.1")


@pytest.mark.parametrize(
    "place", [{"host": "there"}, {"host": "here", "boot": "other"}, {"host": "here", "device": 1}]
)
def test_i6_a_lock_of_another_host_boot_or_mount_proves_nothing(
    run: Watched, place: dict[str, Any]
) -> None:
    run.begin(**place)

    assert lock_is_free(run.paths, "w")
    assert run.verdict().alive


def test_a_worker_waits_for_those_who_test_its_lock(paths: RunPaths) -> None:
    tester = os.open(paths.worker_lock("w"), os.O_RDONLY | os.O_CREAT)
    fcntl.flock(tester, fcntl.LOCK_SH)
    threading.Timer(0.2, os.close, [tester]).start()

    WorkerLock(paths.worker_lock("w"))

    assert not lock_is_free(paths, "w")


def test_a_worker_that_finished_is_gone_for_good(run: Watched) -> None:
    worker = run.begin()
    worker.update(state=FINISHED)

    verdict = run.verdict()
    run.paths.worker("w").unlink()
    run.clock.advance(1)

    assert (verdict.alive, verdict.finished) == (False, True)
    assert run.verdict() == verdict


def test_the_death_of_a_worker_is_explained_if_its_pool_is_gone_from_this_host(
    run: Watched,
) -> None:
    pid, ticks, namespace = process_id(os.getpid())
    gone = [pid, ticks - 1, namespace]  # another process has its id now
    near = {"host": "here"}
    for pool, where, explained in (
        ([], near, ""),
        ([pid, ticks, namespace], near, ""),
        (gone, near, POOL_ENDED),
        ([2**22 + 1, ticks, namespace], near, POOL_ENDED),
        ([pid, ticks - 1, namespace + 1], near, ""),
        (gone, {"host": "there"}, ""),
        (gone, {**near, "boot": "other"}, ""),
        (gone, {**near, "state": DRAINING}, "drain"),
    ):
        name = f"w{run.clock.now}"
        run.begin(name, pool=pool, **where)
        run.verdict(name)
        run.clock.advance(LEASE_S + 1)

        assert (run.verdict(name).alive, run.verdict(name).explained) == (False, explained), pool


def test_an_owner_that_beats_slowly_is_not_judged_by_a_short_lease(run: Watched) -> None:
    run.begin(interval_s=50.0)
    run.verdict()
    run.clock.advance(2 * LEASE_S)
    assert run.verdict().alive

    run.clock.advance(LEASE_S)
    assert not run.verdict().alive


def test_a_presence_is_read_back_and_has_a_fixed_length(run: Watched) -> None:
    worker = run.begin(note="a" * 10)
    size = len(worker.presence.encode())

    worker.update(done=12345678, note="ü" * 40)

    found = read_presence(run.paths.worker("w"))
    assert found == worker.presence
    assert (found.done, found.heartbeat) == (12345678, 1)
    assert len(run.paths.worker("w").read_bytes().splitlines(keepends=True)[0]) == size


def test_a_presence_whose_note_is_too_long_loses_the_note_alone(run: Watched) -> None:
    worker = run.begin()
    worker.update(done=3, note="x" * 5000)

    found = read_presence(run.paths.worker("w"))

    assert found is not None
    assert (found.done, found.note) == (3, "")


def test_a_mix_of_two_presences_cannot_be_read(run: Watched) -> None:
    worker = run.begin()
    before = run.paths.worker("w").read_bytes()
    worker.update(done=1)
    after = run.paths.worker("w").read_bytes()
    unreadable = 0
    for cut in range(0, len(before), 16):
        mix = after[:cut] + before[cut:]
        found = Presence.decode(mix)
        assert found is None or mix in (before, after)
        unreadable += found is None

    assert unreadable > 0
    assert read_presence(run.paths.worker("absent")) is None


def notice_of(worker: PresenceFile, explained: str = "node failure") -> DeathNotice:
    presence = worker.presence
    return DeathNotice(worker=presence.worker, heartbeat=presence.heartbeat, explained=explained)


@pytest.mark.parametrize(
    ("reports", "evidence", "explained"),
    [
        (["node failure"], "slurm", "node failure"),
        # The item is suspected.
        (["out of memory"], "slurm, out of memory", ""),
        # Two reports may be found in one listing, which has no order.
        (["node failure", SILENT_NODE], "slurm", "node failure"),
        ([SILENT_NODE, "node failure"], "slurm", "node failure"),
        (["suspended", ""], "slurm", ""),
    ],
)
def test_i3_a_notice_of_slurm_is_a_death_long_before_the_lease(
    run: Watched, reports: list[str], evidence: str, explained: str
) -> None:
    worker = run.begin(job="17")
    assert run.verdict().alive

    for one in reports:
        run.observer.take_notice(notice_of(worker, one))

    verdict = run.verdict()
    assert (verdict.alive, verdict.evidence, verdict.explained) == (False, evidence, explained)
    assert verdict.host == "elsewhere"


@pytest.mark.parametrize("evidence", ["slurm", "lease", "lock"])
def test_i5_a_heart_that_beats_on_refutes_a_notice(run: Watched, evidence: str) -> None:
    """A server frees the locks of a host that it cannot reach for a while."""
    worker = run.begin(host="here", job="17")
    lock = WorkerLock(run.paths.worker_lock("w"))
    assert run.verdict().alive
    run.observer.take_notice(replace(notice_of(worker, ""), evidence=evidence))
    assert (run.verdict().alive, run.verdict().evidence) == (False, evidence)

    worker.update()

    assert run.verdict().alive
    lock.close()


def test_a_job_that_started_again_has_lost_its_workers_of_before(paths: RunPaths) -> None:
    run = Watched(paths, job="17", restart=1)
    run.begin("before", job="17", restart=0)
    run.begin("now", job="17", restart=1)
    run.begin("other", job="18", restart=0)

    verdicts = run.look()

    assert {name: verdict.alive for name, verdict in verdicts.items()} == {
        "before": False,
        "now": True,
        "other": True,
    }
    assert (verdicts["before"].evidence, verdicts["before"].explained) == ("slurm", "requeue")


def test_i3_what_ended_a_worker_explains_more_than_the_silence_of_its_node(paths: RunPaths) -> None:
    """The silence of several nodes suspects an item, and a requeue never does."""
    run = Watched(paths, job="17", restart=1)
    pid, ticks, namespace = process_id(os.getpid())
    pool = [pid, ticks - 1, namespace]  # another process has its id now
    requeued = run.begin("requeued", job="17", restart=0)
    pooled = run.begin("pooled", host="here", pool=pool)
    other = run.begin("other", host="there")
    for worker in (requeued, pooled, other):
        run.observer.take_notice(notice_of(worker, SILENT_NODE))

    explained = {name: verdict.explained for name, verdict in run.look().items()}

    assert explained == {"requeued": "requeue", "pooled": POOL_ENDED, "other": SILENT_NODE}


def test_of_a_suspended_job_the_lease_decides_and_slurm_explains(run: Watched) -> None:
    worker = run.begin(job="17")
    assert run.verdict().alive
    run.observer.take_notice(notice_of(worker, "suspended"))
    run.clock.advance(LEASE_S - 1)
    assert run.verdict().alive

    run.clock.advance(2)

    verdict = run.verdict()
    assert (verdict.alive, verdict.evidence, verdict.explained) == (False, "lease", "suspended")
    worker.update()
    assert run.verdict().alive


def test_a_job_of_another_cluster_is_none_of_this_slurms(paths: RunPaths) -> None:
    run = Watched(paths, job="17", restart=1, cluster="alpha")
    run.begin("mine", job="18", cluster="alpha", interval_s=10.0)
    run.begin("other", job="17", restart=0, cluster="beta", interval_s=10.0)
    assert all(verdict.alive for verdict in run.look().values())

    run.clock.advance(26)
    run.look()

    assert run.silent() == ["mine"]
    assert run.verdict("other").alive, "it is not an earlier start of this job"


def test_only_silent_workers_of_jobs_are_asked_about(run: Watched) -> None:
    run.begin("silent", job="17", interval_s=10.0)
    run.begin("slow", job="17", interval_s=20.0)
    run.begin("laptop", job=None, interval_s=10.0)
    run.begin("lsf", job="lsf:17", interval_s=10.0)
    run.begin("left", job="17", state=FINISHED)
    beats = run.begin("beats", job="17", interval_s=10.0)
    for seconds in (0, 26):
        run.clock.advance(seconds)
        beats.update()
        run.look()

    assert run.silent() == ["silent"]


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


NOTICE = DeathNotice(worker="n3-1-a", heartbeat=7, explained="node failure")


def test_i5_a_notice_of_a_death_is_read_once_and_asks_nobody_to_leave(paths: RunPaths) -> None:
    """Its worker may live after all, and must not take it for a request."""
    reader = ControlReader(paths)
    give_notice(paths, [NOTICE])

    assert reader.poll() == ([], [NOTICE])
    assert reader.poll() == ([], [])


@pytest.mark.parametrize("explained", ["", "node failure", "end of its pool", "out of memory"])
def test_a_free_unit_is_read_from_its_name_alone(paths: RunPaths, explained: str) -> None:
    owner = DeathNotice(worker="n3-1-a.0002", heartbeat=7, explained=explained, evidence="lock")
    free = FreeUnit("my_stage-2", "000001-24", 3, owner)
    reader = ControlReader(paths)
    for by in "ab":
        give_free(paths, free, by)

    with CountedCalls() as counted:
        reader.poll()

    assert reader.free == [free]
    assert counted.opened() == []
    reader.poll()
    assert reader.free == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "") for name in ("free,a", "free,a,b,c,d,e,f,g", "free,a,b,1,w,2,lease,x,y")),
        ("new-0.json", '{"request": "of a later version", "workers": []}'),
        ("notes.txt", "drain"),
    ],
)
def test_other_requests_and_names_of_another_form_are_passed_over(
    paths: RunPaths, name: str, text: str
) -> None:
    (paths.control / name).write_text(text)
    reader = ControlReader(paths)

    assert reader.poll() == ([], [])
    assert reader.free == []


def test_a_question_to_slurm_is_no_news_for_workers_that_do_not_ask(paths: RunPaths) -> None:
    """Each of thousands of workers would list the directory for each question."""
    reader = ControlReader(paths)
    assert may_ask(paths, "alpha", 0, "w")

    reader.poll()

    assert (reader.asked["alpha"], reader.news) == (1, False)
    give_notice(paths, [NOTICE])
    reader.poll()
    assert reader.news


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"request": "drain"}',
        '{"request": "deaths", "workers": ["a"]}',
        '{"request": "deaths", "workers": {"a": {"heartbeat": "x", "explained": ""}}}',
        '{"request": "drain", "workers": 3}',
    ],
)
def test_a_file_that_cannot_be_read_yet_is_read_when_it_can(paths: RunPaths, text: str) -> None:
    path = paths.control / "drain-0.json"
    path.write_text(text)
    reader = ControlReader(paths)
    assert reader.poll() == ([], [])

    path.write_text(json.dumps({"request": "drain", "workers": ["a"]}))

    assert reader.poll() == ([Request("drain-0.json", frozenset({"a"}))], [])
