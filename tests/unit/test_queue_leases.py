"""Who lives, as one observer may judge it: by heartbeats, its own clock, its own host's locks."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from dataclasses import replace
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.queue.control import DeathNotice
from hpc_toolkit.queue.leases import Liveness, WorkerLock, heartbeat_interval_s, lock_is_free
from hpc_toolkit.queue.presence import (
    DRAINING,
    FINISHED,
    Presence,
    PresenceFile,
    read_presence,
)
from hpc_toolkit.rundir.layout import RunPaths
from tests.manualclock import ManualClock

LEASE_S = 60.0


@pytest.fixture
def observer(paths: RunPaths, clock: ManualClock) -> Liveness:
    return Liveness(paths, clock, host="here", boot="boot", lease_s=LEASE_S)


def begin(paths: RunPaths, name: str = "w", **changes: Any) -> PresenceFile:
    fields = {"host": "elsewhere", "boot": "boot", "pid": 1, "rank": 0, "job": None, **changes}
    paths.worker_lock(name).touch()
    return PresenceFile(paths.worker(name), Presence(worker=name, **fields))


def test_a_worker_that_beats_lives_for_ever(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths)
    for _ in range(10):
        assert observer.verdict("w").alive
        clock.advance(LEASE_S - 1)
        worker.update()


def test_i3_a_silent_worker_is_dead_after_the_lease(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    begin(paths)

    assert observer.verdict("w").alive
    clock.advance(LEASE_S - 0.1)
    assert observer.verdict("w").alive
    clock.advance(0.2)
    verdict = observer.verdict("w")

    assert (verdict.alive, verdict.finished, verdict.evidence) == (False, False, "lease")
    assert verdict.host == "elsewhere"


def test_a_silence_that_ends_ends_the_verdict(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths)
    observer.verdict("w")
    clock.advance(LEASE_S + 1)
    assert not observer.verdict("w").alive

    worker.update()

    assert observer.verdict("w").alive


@given(
    st.lists(st.tuples(st.floats(0, 90), st.booleans(), st.floats(-1e9, 1e9)), max_size=12),
)
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
    observer = Liveness(paths, clock, host="here", boot="boot", lease_s=LEASE_S)
    worker = begin(paths, at=1e12, started=-5.0)
    silent_since = clock.now
    assert observer.verdict("w").alive
    for seconds, beats, skew in steps:
        clock.advance(seconds)
        clock.skew = skew
        if beats:
            worker.update(at=-skew)
            silent_since = clock.now
        assert observer.verdict("w").alive == (clock.now - silent_since < LEASE_S)


def test_i4_a_heartbeat_number_that_falls_is_a_change_as_well(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths, heartbeat=100)
    observer.verdict("w")
    clock.advance(LEASE_S + 1)
    paths.worker("w").write_bytes(replace(worker.presence, heartbeat=3).encode())

    assert observer.verdict("w").alive


def test_an_owner_without_a_file_is_timed_from_first_sight(
    observer: Liveness, clock: ManualClock
) -> None:
    clock.advance(10_000)
    assert observer.verdict("ghost").alive
    clock.advance(LEASE_S + 1)

    verdict = observer.verdict("ghost")

    assert (verdict.alive, verdict.evidence, verdict.host) == (False, "lease", "")


def test_a_copy_that_cannot_be_read_counts_as_unchanged(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    begin(paths)
    observer.verdict("w")
    path = paths.worker("w")
    path.write_bytes(path.read_bytes()[:-9] + b"00000000}")

    clock.advance(LEASE_S - 1)
    assert observer.verdict("w").alive
    clock.advance(2)
    assert not observer.verdict("w").alive


def test_a_free_lock_on_the_same_host_and_boot_is_death_at_once(
    paths: RunPaths, observer: Liveness
) -> None:
    begin(paths, host="here")

    verdict = observer.verdict("w")

    assert (verdict.alive, verdict.evidence) == (False, "lock")


@pytest.mark.parametrize(
    "place", [{"host": "there"}, {"host": "here", "boot": "other"}, {"host": "here", "device": 1}]
)
def test_i6_a_lock_of_another_host_boot_or_mount_proves_nothing(
    paths: RunPaths, observer: Liveness, place: dict[str, Any]
) -> None:
    begin(paths, **place)

    assert lock_is_free(paths, "w")
    assert observer.verdict("w").alive


def test_a_held_lock_is_life_until_the_lease_ends(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    """A frozen process holds its lock as well."""
    begin(paths, host="here")
    with FileLock(paths.worker_lock("w")):
        assert observer.verdict("w").alive
        clock.advance(LEASE_S + 1)
        assert observer.verdict("w").evidence == "lease"


def test_a_worker_holds_its_lock_until_it_releases_it(paths: RunPaths) -> None:
    lock = WorkerLock(paths.worker_lock("w"))

    assert not lock_is_free(paths, "w")
    lock.release()
    assert lock_is_free(paths, "w")


def test_a_worker_waits_for_those_who_test_its_lock(paths: RunPaths) -> None:
    tester = os.open(paths.worker_lock("w"), os.O_RDONLY | os.O_CREAT)
    fcntl.flock(tester, fcntl.LOCK_SH)
    threading.Timer(0.2, os.close, [tester]).start()

    WorkerLock(paths.worker_lock("w"))

    assert not lock_is_free(paths, "w")


def test_a_worker_without_a_lock_goes_on(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = WorkerLock(paths.workers / "missing" / "w.lock")
    missing.release()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    WorkerLock(paths.worker_lock("w"))
    assert not lock_is_free(paths, "w")


def test_a_worker_that_finished_is_gone_for_good(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths)
    worker.update(state=FINISHED)

    verdict = observer.verdict("w")
    paths.worker("w").unlink()
    clock.advance(1)

    assert (verdict.alive, verdict.finished) == (False, True)
    assert observer.verdict("w") == verdict


def test_a_death_while_draining_is_explained(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    begin(paths, state=DRAINING)
    observer.verdict("w")
    clock.advance(LEASE_S + 1)

    assert observer.verdict("w").explained == "drain"


def test_an_owner_that_beats_slowly_is_not_judged_by_a_short_lease(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    begin(paths, interval_s=50.0)
    observer.verdict("w")
    clock.advance(2 * LEASE_S)
    assert observer.verdict("w").alive

    clock.advance(LEASE_S)
    assert not observer.verdict("w").alive


def test_an_owner_that_writes_on_is_not_waited_for_beyond_a_lease_where_nothing_comes(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths)
    for second in range(int(LEASE_S) + 1):
        worker.update(journal=100 * (second + 1))
        observer.verdict("w")
        assert observer.is_behind("w", 0) == (second < LEASE_S)
        clock.advance(1)


def test_an_owner_whose_lines_come_late_is_waited_for_each_time(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths)
    for told in range(1, 10):
        worker.update(journal=100 * told)
        observer.verdict("w")
        assert observer.is_behind("w", 100 * (told - 1))
        clock.advance(LEASE_S - 1)


def test_heartbeats_slow_down_in_a_large_run() -> None:
    assert heartbeat_interval_s(8) == 10.0
    assert heartbeat_interval_s(5_000) == 100.0


def test_a_presence_is_read_back_and_has_a_fixed_length(paths: RunPaths) -> None:
    worker = begin(paths, note="a" * 10)
    size = len(worker.presence.encode())

    worker.update(done=12345678, note="ü" * 40)

    found = read_presence(paths.worker("w"))
    assert found == worker.presence
    assert (found.done, found.heartbeat) == (12345678, 1)
    assert len(paths.worker("w").read_bytes().splitlines(keepends=True)[0]) == size


def test_a_presence_whose_note_is_too_long_loses_the_note_alone(paths: RunPaths) -> None:
    worker = begin(paths)
    worker.update(done=3, note="x" * 5000)

    found = read_presence(paths.worker("w"))

    assert found is not None
    assert (found.done, found.note) == (3, "")


def test_a_mix_of_two_presences_cannot_be_read(paths: RunPaths) -> None:
    worker = begin(paths)
    before = paths.worker("w").read_bytes()
    worker.update(done=1)
    after = paths.worker("w").read_bytes()
    unreadable = 0
    for cut in range(0, len(before), 16):
        mix = after[:cut] + before[cut:]
        found = Presence.decode(mix)
        assert found is None or mix in (before, after)
        unreadable += found is None

    assert unreadable > 0
    assert read_presence(paths.worker("absent")) is None


def in_job(paths: RunPaths, clock: ManualClock, *, restart: int = 0) -> Liveness:
    return Liveness(
        paths, clock, host="here", boot="boot", lease_s=LEASE_S, job="17", restart=restart
    )


def notice_of(worker: PresenceFile, explained: str = "node failure") -> DeathNotice:
    presence = worker.presence
    return DeathNotice(worker=presence.worker, heartbeat=presence.heartbeat, explained=explained)


def test_i3_a_notice_of_slurm_is_a_death_long_before_the_lease(
    paths: RunPaths, observer: Liveness
) -> None:
    worker = begin(paths, job="17")
    assert observer.verdict("w").alive

    observer.take_notice(notice_of(worker))

    verdict = observer.verdict("w")
    assert (verdict.alive, verdict.evidence, verdict.explained) == (False, "slurm", "node failure")
    assert verdict.host == "elsewhere"


def test_i5_a_heart_that_beats_on_refutes_a_notice(paths: RunPaths, observer: Liveness) -> None:
    worker = begin(paths, job="17")
    observer.take_notice(notice_of(worker))
    assert not observer.verdict("w").alive

    worker.update()

    assert observer.verdict("w").alive


def test_a_refuted_notice_explains_no_later_death(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths, job="17")
    observer.take_notice(notice_of(worker))
    worker.update()
    assert observer.verdict("w").alive

    clock.advance(LEASE_S + 1)

    verdict = observer.verdict("w")
    assert (verdict.evidence, verdict.explained) == ("lease", "")


def test_a_job_that_started_again_has_lost_its_workers_of_before(
    paths: RunPaths, clock: ManualClock
) -> None:
    observer = in_job(paths, clock, restart=1)
    begin(paths, "before", job="17", restart=0)
    begin(paths, "now", job="17", restart=1)
    begin(paths, "other", job="18", restart=0)

    verdicts = {name: observer.verdict(name) for name in observer.names()}

    assert {name: verdict.alive for name, verdict in verdicts.items()} == {
        "before": False,
        "now": True,
        "other": True,
    }
    assert (verdicts["before"].evidence, verdicts["before"].explained) == ("slurm", "requeue")


def test_what_slurm_said_explains_a_death_that_was_seen_by_its_lock(
    paths: RunPaths, observer: Liveness
) -> None:
    worker = begin(paths, host="here", job="17")
    observer.take_notice(notice_of(worker, "preemption"))

    verdict = observer.verdict("w")

    assert (verdict.evidence, verdict.explained) == ("lock", "preemption")


def test_of_a_suspended_job_the_lease_decides_and_slurm_explains(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths, job="17")
    assert observer.verdict("w").alive
    observer.take_notice(notice_of(worker, "suspended"))
    clock.advance(LEASE_S - 1)
    assert observer.verdict("w").alive

    clock.advance(2)

    verdict = observer.verdict("w")
    assert (verdict.alive, verdict.evidence, verdict.explained) == (False, "lease", "suspended")
    worker.update()
    assert observer.verdict("w").alive


def test_a_job_of_another_cluster_is_none_of_this_slurms(
    paths: RunPaths, clock: ManualClock
) -> None:
    observer = Liveness(
        paths,
        clock,
        host="here",
        boot="boot",
        lease_s=LEASE_S,
        job="17",
        restart=1,
        cluster="alpha",
    )
    begin(paths, "mine", job="18", cluster="alpha", interval_s=10.0)
    begin(paths, "other", job="17", restart=0, cluster="beta", interval_s=10.0)
    assert all(observer.verdict(name).alive for name in observer.names())

    clock.advance(26)
    for name in observer.names():
        observer.verdict(name)

    assert [presence.worker for presence in observer.silent(missed=2.5)] == ["mine"]
    assert observer.verdict("other").alive, "it is no earlier start of this job"


def test_only_silent_workers_of_jobs_are_asked_about(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    begin(paths, "silent", job="17", interval_s=10.0)
    begin(paths, "slow", job="17", interval_s=20.0)
    begin(paths, "laptop", job=None, interval_s=10.0)
    begin(paths, "left", job="17", state=FINISHED)
    beats = begin(paths, "beats", job="17", interval_s=10.0)
    for seconds in (0, 26):
        clock.advance(seconds)
        beats.update()
        for name in observer.names():
            observer.verdict(name)

    assert [presence.worker for presence in observer.silent(missed=2.5)] == ["silent"]


def test_the_first_living_rank_of_a_cluster_speaks_for_all(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    ranks = [("9_1", 5), ("17", 0), ("17", 1)]
    workers = [
        begin(paths, f"w{job}-{rank}", job=job, rank=rank, interval_s=10.0) for job, rank in ranks
    ]
    begin(paths, "other", job="3", rank=0, cluster="elsewhere")
    begin(paths, "laptop", rank=0)

    def speakers() -> list[int]:
        for name in observer.names():
            observer.verdict(name)
        spoken = [observer.speaks(worker.presence, missed=2.5) for worker in workers]
        return [number for number, speaks in enumerate(spoken) if speaks]

    assert speakers() == [0], "the oldest job"
    clock.advance(26)
    for worker in workers[1:]:
        worker.update()
    assert speakers() == [0, 1], "the first may be dead"
    workers[0].update()
    assert speakers() == [0]


def test_nobody_speaks_outside_a_job(paths: RunPaths, observer: Liveness) -> None:
    worker = begin(paths)
    observer.verdict("w")

    assert not observer.speaks(worker.presence, missed=2.5)


def test_nobody_asks_about_a_silence_of_which_slurm_has_spoken(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    worker = begin(paths, job="17", interval_s=10.0)
    observer.verdict("w")
    clock.advance(26)
    observer.verdict("w")
    assert [presence.worker for presence in observer.silent(missed=2.5)] == ["w"]

    observer.take_notice(notice_of(worker))

    assert observer.silent(missed=2.5) == []


def test_an_older_notice_does_not_replace_a_newer_one(paths: RunPaths, observer: Liveness) -> None:
    worker = begin(paths, job="17")
    old = notice_of(worker, "preemption")
    worker.update()
    observer.take_notice(notice_of(worker, "node failure"))

    observer.take_notice(old)

    assert observer.verdict("w").explained == "node failure"


def test_nobody_is_silent_to_an_observer_that_does_not_look(
    paths: RunPaths, observer: Liveness, clock: ManualClock
) -> None:
    """Of many workers each is looked at seldom: it may have beaten all the time."""
    worker = begin(paths, job="17", interval_s=10.0)
    younger = begin(paths, "younger", job="18", interval_s=10.0)
    observer.verdict("w")
    clock.advance(1_000)

    assert observer.silent(missed=2.5) == []
    assert not observer.speaks(younger.presence, missed=2.5)
    worker.update()
    observer.verdict("w")
    assert observer.silent(missed=2.5) == []
