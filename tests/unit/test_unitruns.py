"""One pass over a unit, with an executor that the test plays: what is journaled, and when."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.queue.assignment import Assignment
from hpc_toolkit.queue.leases import Verdict
from hpc_toolkit.queue.units import Claims
from hpc_toolkit.rundir.journal import read_lines
from hpc_toolkit.system.processes import readable
from hpc_toolkit.worker import unitlines, unitruns
from hpc_toolkit.worker.attempts import CONSECUTIVE_FAILURES, DONE, END, UNWRITABLE
from hpc_toolkit.worker.hosthealth import FailureCount
from hpc_toolkit.worker.membership import Drain
from hpc_toolkit.worker.unitlines import Outcome
from hpc_toolkit.worker.unitruns import UnitRunner
from tests.manualclock import ManualClock
from tests.model.hands import PlayedExecutor
from tests.replacedcalls import CountedCalls
from tests.toyrun import ToyRun, ToyWorker

FAILURES = {
    "failed": ValueError("wrong"),
    "oom": MemoryError(),
    "gpu_oom": RuntimeError("CUDA out of memory. Tried to allocate"),
    "permanent": PermanentError("no weights"),
}
Act = str | Callable[[], None]
Make = Callable[..., "Stage"]


class FakeExecutor(PlayedExecutor):
    """Answers with the next act of the script whenever its worker looks up."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def start(self, request: dict[str, Any], lines: list[bytes]) -> None:
        super().start(request, lines)
        self._stage.requests.append(request)

    def act(self, what: str) -> None:
        assert self.report is not None
        match what:
            case "done" | "object":
                plain = {"n": self.report.index}
                self.report.result(plain if what == "done" else ValueError("an object"))
            case "oom" | "gpu_oom" | "permanent" | "failed":
                self.report.failure(FAILURES[what])
            case "die":
                self.die()
            case end:
                self.send(END, end.removeprefix("end ").removeprefix("end").encode())

    def stop(self) -> None:
        self._stage.stops += 1

    def end(self) -> str:
        self._stage.ends += 1
        return self._stage.how


class Failures(FailureCount):
    """Notes the checks, and holds at each of them if the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[int] = []
        self.holds = False

    def check(self) -> bool:
        self.looked.append(self.weight)
        self.hold = self.holds
        return self.hold


class Stage:
    """A pass runner on a toy run, and the script of its executors."""

    def __init__(self, toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.toy = toy
        self.script: list[Act] = []
        self.requests: list[dict[str, Any]] = []
        self.stops = self.ends = 0
        self.how = "killed by SIGKILL"
        self.clock = ManualClock()
        self.drain = Drain(self.clock)
        self.failures = Failures()
        self.next_group: Callable[[], str | None] = lambda: None
        self.view = toy.view()
        self.worker: ToyWorker = toy.worker("me")
        self.wake, self._wake_write = os.pipe()
        self._executor: FakeExecutor | None = None
        monkeypatch.setattr(unitruns, "Executor", self._make)
        self.runner = self._runner(self.worker)

    def _runner(self, worker: ToyWorker) -> UnitRunner:
        return UnitRunner(
            worker=worker.name,
            host="here",
            view=self.view,
            journal=worker.journal,
            clock=self.clock,
            drain=self.drain,
            failures=self.failures,
            next_group=lambda _: self.next_group(),
            wake_fd=self.wake,
            tick=self._tick,
            stages=dict,
            look_s=10.0,
        )

    def passing(self, seconds: float) -> Act:
        """Time that passes while the worker waits."""
        return lambda: self.clock.advance(seconds)

    def poll(self) -> None:
        """Read what others wrote."""
        self.view.poll_claims()
        self.view.poll_journals()

    def rename(self) -> list[bytes]:
        """Go on under another name; return what the journal of the former one may lack."""
        lines, former = self.worker.journal.unsynced, self.runner
        self.worker = self.toy.worker("me.0002")
        self.runner = self._runner(self.worker)
        former.stop()
        self.runner.adopt(former)
        return lines

    def act(self, *acts: str) -> None:
        """Let the executor answer several times before its worker looks."""
        assert self._executor is not None
        for what in acts:
            self._executor.act(what)

    def send(self, kind: bytes, text: bytes) -> None:
        assert self._executor is not None
        self._executor.send(kind, text)

    def _make(self, *_: object) -> FakeExecutor:
        self._executor = FakeExecutor(self)
        return self._executor

    def _tick(self) -> None:
        assert self.script, "the worker waits for more than the script has"
        what = self.script.pop(0)
        if callable(what):
            what()
            os.write(self._wake_write, b"x")  # look up again at once
        else:
            assert self._executor is not None
            self._executor.act(what)

    def run(
        self,
        *script: Act,
        unit: str = "000001-0",
        generation: int = 1,
        died: tuple[str, Verdict] | None = None,
    ) -> Outcome:
        stage = self.view.stages["items"]
        assert stage.claims.create(unit, generation, self.worker.name)
        self.script = list(script)
        assignment = Assignment(stage, stage.unit(unit), generation, died)
        outcome = self.runner.run(assignment)
        assert not self.script, "the worker did not wait for the whole script"
        return outcome

    def journal(self) -> list[tuple[Any, ...]]:
        """(type, generation, item) of every line."""
        lines = self.records()
        return [(line["type"], line["generation"], line.get("item")) for line in lines]

    def records(self) -> list[dict[str, Any]]:
        path = self.toy.paths.journal(self.worker.name)
        return [line.record for line in read_lines(path, 0, path.stat().st_size)]

    def close(self) -> None:
        self.runner.close()
        os.close(self.wake)
        os.close(self._wake_write)


@pytest.fixture
def make(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the runner of a run; its arguments are the number of items and the stage's settings."""
    with ExitStack() as made:

        def one(items: int = 4, **spec: Any) -> Stage:
            found = Stage(ToyRun(fast_dir / "r", items, **spec), monkeypatch)
            made.callback(found.close)
            return found

        yield one


@pytest.fixture
def stage(make: Make) -> Stage:
    return make()


def test_i1_every_line_is_on_disk_when_a_pass_returns(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = os.fdatasync

    def note(fd: int) -> None:
        real(fd)
        sizes.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fdatasync", note)

    stage.run("done", "failed", "permanent", "done", "end")

    assert sizes[-1:] == [stage.toy.paths.journal("me").stat().st_size]
    assert not stage.worker.journal.dirty


def test_i1_long_passes_are_synced_on_the_way(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: sizes.append(os.fstat(fd).st_size))

    second = stage.passing(1.0)

    stage.run("done", second, "done", second, "done", "done", "end")

    assert len(sizes) >= 3


def test_i1_the_bytes_that_a_line_names_are_on_disk_before_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}
    directories: list[str] = []
    real, real_of_directory = os.fdatasync, os.fsync

    def sync(fd: int) -> None:
        real(fd)
        synced[os.readlink(f"/proc/self/fd/{fd}")] = os.fstat(fd).st_size

    def sync_directory(fd: int) -> None:
        real_of_directory(fd)
        directories.append(os.readlink(f"/proc/self/fd/{fd}"))

    def append(data: bytes) -> None:
        seen.append((synced.get(str(path)), path.exists() and path.stat().st_size, [*directories]))
        written(data)

    path, seen = stage.toy.paths.values("me"), list[tuple[Any, Any, list[str]]]()
    written = stage.worker.journal.append
    monkeypatch.setattr(stage.worker.journal, "append", append)
    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(os, "fsync", sync_directory)

    stage.run("object", "done", "object", "object", "end")

    assert [(size == there, names) for size, there, names in seen if there] == [
        (True, [str(path.parent)])
    ] * len(seen)
    assert len(seen) == 5


@pytest.mark.parametrize("call", ["fdatasync", "write"])
def test_i1_a_disk_that_fails_ends_the_pass_and_claims_no_result(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(os, call)
    journal = stage.worker.journal._fd

    def fail(fd: int, *rest: Any) -> Any:
        if fd == journal:
            raise OSError(errno.ENOSPC, "disk full")
        return real(fd, *rest)

    monkeypatch.setattr(os, call, fail)

    with pytest.raises(OSError, match="disk full"):
        stage.run("done", "done", "done", "done", "end")

    assert stage.worker.journal.dirty or stage.worker.journal.size == 0
    monkeypatch.undo()
    stage.script.clear()


def test_i1_another_name_journals_what_the_executor_still_answers_and_runs_the_rest(
    stage: Stage,
) -> None:
    with pytest.raises(OSError, match="Bad file"):
        stage.run("done", stage.worker.journal.close, "done")
    carried = b"".join(stage.rename())
    assert (stage.runner.is_answered, stage.stops) == (True, 1)
    stage.worker.journal.append(carried)
    stage.view.poll_journal("me.0002")

    outcome = stage.run("failed", "end stopped", "done", "done", "end", generation=2)

    assert outcome is Outcome.COMPLETE
    assert [request["positions"] for request in stage.requests] == [[0, 1, 2, 3], [2, 3]]
    assert stage.journal() == [
        *(("done", 1, 0), ("done", 1, 1), ("failed", 1, 2)),
        *(("done", 2, 2), ("done", 2, 3), ("release", 2, None)),
    ]
    assert stage.runner.counts.done + stage.runner.counts.failed == 3
    assert stage.ends == 1, "an item that failed runs again in a fresh process"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_i1_no_line_is_carried_that_names_bytes_which_were_not_synced(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.fdatasync

    def refuse(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".values"):
            raise OSError(number, os.strerror(number))
        real(fd)

    def both() -> None:
        stage.act("done", "object")

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        stage.run(both)

    (line,) = stage.worker.journal.unsynced
    assert b'"item":0,' in line
    # Of what was appended before that sync, another one that succeeds proves nothing.
    monkeypatch.setattr(os, "fdatasync", real)
    stage.act("object", "done", "end stopped")
    stage.rename()
    stage.run("done", "done", "object", "end", generation=2)
    lines = stage.journal()
    assert lines[:1] == [("done", 1, 3)]
    assert lines[1:] == [*(("done", 2, item) for item in range(3)), ("release", 2, None)]


def test_a_result_that_its_value_file_does_not_take_ends_the_name_and_not_the_executor(
    stage: Stage,
) -> None:
    def refused() -> None:
        stage.act("done")
        stage.send(UNWRITABLE, str(errno.ENOSPC).encode())

    with pytest.raises(OSError, match="No space left"):
        stage.run(refused)

    assert stage.journal() == [("done", 1, 0)]
    assert (stage.runner.is_answered, stage.ends) == (True, 0)


def test_the_work_of_reading_a_long_result_grows_with_its_length(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joining what was read at each read took 19 s for 60 MB."""
    monkeypatch.setattr(unitlines, "_READ", 64)
    length = 15 << 16
    used_s: list[float] = []

    def send() -> None:
        executor = stage._executor
        assert executor is not None
        fcntl.fcntl(executor.results, fcntl.F_SETPIPE_SZ, 1 << 20)
        assert executor.report is not None
        executor.report.result({"text": length * "x"})
        used_s.append(time.thread_time())

    assert stage.run(send, "die", unit="000001-0") is Outcome.DIED

    assert time.thread_time() - used_s[0] < 1.0  # 0.05 s; 4 s if each read copies all before
    (line, *_) = read_lines(stage.toy.paths.journal("me"), 0, 2 * length)
    assert line.record["value"] == {"text": length * "x"}


def test_a_claim_is_the_one_name_that_a_further_pass_asks_for(stage: Stage) -> None:
    stage.run("done", "failed", "done", "failed", "end")
    stage.view.poll_journal("me")

    with CountedCalls() as counted:
        stage.run("done", "done", "end", generation=2)

    assert counted.calls == [("symlink", "000001-0.2.lock")]
    assert stage.requests[1]["positions"] == [1, 3]


def test_i9_a_permanent_failure_is_written_as_one(stage: Stage) -> None:
    stage.run("permanent", "done", "done", "done", "end")

    assert stage.journal()[0] == ("permanent", 1, 0)
    (row, *_) = stage.toy.rows()
    assert (row["state"], row["error"]) == ("failed", "no weights")


def test_i5_a_worker_that_was_overtaken_writes_nothing_more_once_it_looks(stage: Stage) -> None:
    def overtake() -> None:
        assert Claims(stage.toy.stage_paths).create("000001-0", 2, "other")
        stage.clock.advance(9.0)

    look = stage.passing(2.0)
    outcome = stage.run("done", overtake, "done", look, "done", "done", "end stopped")

    assert outcome is Outcome.OVERTAKEN
    assert stage.journal() == [("done", 1, 0), ("done", 1, 1)]
    assert stage.stops >= 1


@pytest.mark.parametrize("how", ["killed by SIGKILL", "killed by SIGKILL, out of memory"])
def test_an_executor_that_died_costs_a_death_line_and_a_release(stage: Stage, how: str) -> None:
    stage.how = how

    outcome = stage.run("done", "die")

    assert outcome is Outcome.DIED
    assert stage.journal() == [("done", 1, 0), ("death", 1, 1), ("release", 1, None)]
    assert stage.toy.states()[1, 1] == "pending"
    stage.view.poll_journals()
    (death,) = stage.view.stages["items"].state.suspects("000001-0")[1]
    assert (death.worker, death.host, death.alone) == ("me", "here", False)
    assert death.evidence == f"executor {how}"


def test_i3_the_death_of_the_last_owner_is_written_first_and_explained(stage: Stage) -> None:
    dead = stage.toy.worker("dead")
    dead.claim("000001-0", 1)
    dead.attempt(0)
    stage.poll()
    verdict = Verdict(alive=False, evidence="lease", explained="drain", host="there")

    stage.run("done", "done", "done", "end", generation=2, died=("dead", verdict))

    assert stage.journal()[0] == ("death", 1, 1)
    first = stage.records()[0]
    named = {key: first[key] for key in ("worker", "host", "evidence", "explained")}
    assert named == {"worker": "dead", "host": "there", "evidence": "lease", "explained": "drain"}
    assert all(row["attempts"] == 1 for row in stage.toy.rows())


def suspect(stage: Stage, item: int, deaths: int, **facts: Any) -> None:
    """Let item ``item`` have killed workers in generations 1, 2, ..."""
    other = stage.toy.worker("other")
    for generation in range(1, deaths + 1):
        other.claim("000001-0", generation)
        other.death(item, host=f"h{generation % 2}", **facts)
        other.release()
    stage.poll()


def test_a_killer_is_failed_for_good_and_the_rest_is_run(stage: Stage) -> None:
    suspect(stage, 1, 5)

    outcome = stage.run("done", "done", "done", "end", generation=6)

    assert outcome is Outcome.COMPLETE
    assert stage.requests[0]["positions"] == [0, 2, 3]
    assert stage.toy.states() == {(1, 0): "done", (1, 1): "failed", (1, 2): "done", (1, 3): "done"}
    last = "executor killed by SIGSEGV on h1"
    assert stage.toy.rows()[1]["error"] == f"killed its worker 5 times, last: {last}"
    assert stage.toy.rows()[1]["attempts"] == 1


def test_the_taker_suspects_the_item_that_its_owner_ran(stage: Stage) -> None:
    """Item 0 was suspected before, so the dead owner ran it last: item 1 was running."""
    suspect(stage, 0, 1)
    stage.toy.worker("dead").claim("000001-0", 2)
    stage.view.poll_claims()
    verdict = Verdict(alive=False, evidence="lease", host="there")

    stage.run("done", "done", "done", "done", "end", generation=3, died=("dead", verdict))

    assert stage.journal()[0] == ("death", 2, 1)


def test_i3_an_interruption_costs_the_running_item_no_attempt(stage: Stage) -> None:
    outcome = stage.run("done", lambda: stage.drain.request("asked", 0.0))

    assert outcome is Outcome.STOPPED
    assert stage.journal() == [("done", 1, 0), ("release", 1, None)]
    assert stage.ends == 1


def test_i9_an_item_beyond_its_time_fails_for_good_in_a_stage_without_retries_of_timeouts(
    make: Make,
) -> None:
    stage = make(timeout_s=10.0, no_retry="timeout")

    outcome = stage.run("failed", stage.passing(11.0), "done", "done", "end")

    assert outcome is Outcome.COMPLETE
    assert stage.journal()[:2] == [("failed", 1, 0), ("permanent", 1, 1)]


def test_the_time_of_a_suspended_job_is_not_an_items_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm stops worker and executor (SIGSTOP), and continues both (SIGCONT)."""
    stage = make(timeout_s=10.0)

    def suspended(*files: int, timeout_s: float) -> set[int]:
        stage.clock.advance(timeout_s + 1000.0)
        monkeypatch.setattr(unitruns, "readable", readable)
        return readable(*files, timeout_s=0.0)

    def suspend() -> None:
        stage.clock.advance(8.0)
        monkeypatch.setattr(unitruns, "readable", suspended)

    outcome = stage.run("done", suspend, lambda: None, "done", "done", "done", "end")

    assert outcome is Outcome.COMPLETE
    assert stage.ends == 0


def test_failures_in_a_row_are_looked_at_and_the_rest_runs_if_nothing_is_wrong(
    stage: Stage,
) -> None:
    stage.failures.check_at = 2

    outcome = stage.run("failed", "failed", "end failing", "failed", "done", "end")

    assert outcome is Outcome.COMPLETE
    assert [request["failures_left"] for request in stage.requests] == [2, CONSECUTIVE_FAILURES]
    assert stage.failures.looked == [2]
    assert (stage.failures.weight, stage.failures.check_at) == (0, CONSECUTIVE_FAILURES)


def test_a_hold_in_the_middle_of_a_pass_ends_it_before_the_next_item(stage: Stage) -> None:
    def hold() -> None:
        stage.failures.hold = True

    outcome = stage.run("done", hold, "done", "end stopped")

    assert outcome is Outcome.HELD
    assert stage.stops >= 1
    assert [kind for kind, _, _ in stage.journal()] == ["done", "done", "release"]


def test_deaths_are_failures_in_a_row_before_their_item_is_a_killer(stage: Stage) -> None:
    stage.failures.holds = True
    outcomes = [stage.run("die", generation=generation) for generation in range(1, 5)]

    assert outcomes == [Outcome.DIED] * 3 + [Outcome.HELD]
    assert stage.failures.looked == [CONSECUTIVE_FAILURES]


def test_an_items_last_attempt_is_looked_at_before_it_is_made(stage: Stage) -> None:
    other = stage.toy.worker("other")
    for generation in (1, 2):
        other.work("000001-0", generation, i1="failed")
    stage.poll()
    stage.failures.holds = True

    assert stage.run(generation=3) is Outcome.HELD

    assert not stage.requests
    assert [kind for kind, _, _ in stage.journal()] == ["release"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (DONE, b'{"type":"done","unit":"items/000001-0","generation":7,"item":1,"value":{}'),
        (DONE, b'{"type":"done","unit":"items/000001-0","generation":1,"item":0,"value":{}'),
        (b"?", b"printed into the pipe by a library"),
    ],
)
def test_executor_that_answers_another_request_is_ended_and_its_answer_is_not_journaled(
    stage: Stage, kind: bytes, text: bytes
) -> None:
    assert stage.run("done", lambda: stage.send(kind, text)) is Outcome.DIED

    assert [kind for kind, _, _ in stage.journal()] == ["done", "death", "release"]
    assert stage.ends == 1


def test_after_the_death_of_an_executor_nothing_is_prefetched(make: Make) -> None:
    stage = make(8)
    ahead = iter(['"b"', '"b"', '"c"'])
    stage.next_group = lambda: next(ahead)
    stage.run("failed", "done", "done", "done", "end")
    stage.view.poll_journals()
    stage.run("done", "end", generation=2)
    stage.run("done", "done", "die", unit="000001-4")
    stage.view.poll_journals()
    stage.run("done", "done", "end", unit="000001-4", generation=2)

    hints = [(one.get("next_group"), one.get("prefetch", True)) for one in stage.requests]
    assert hints == [('"b"', True), (None, True), ('"c"', True), (None, False)]


OOM = {"on": "oom", "memory": "x2", "up_to": 4}
LATE = {"on": "timeout", "time": "x2", "up_to": 35}


def test_an_item_that_the_kernel_killed_for_its_memory_is_an_attempt_and_not_a_death(
    make: Make,
) -> None:
    stage = make(needs={"memory": 1}, retry=OOM)
    stage.how = "killed by SIGKILL, out of memory"

    stage.run("done", "die", "oom", "done", "end")

    kinds = ["done", "failed", "failed", "done", "release"]
    assert [kind for kind, _, _ in stage.journal()] == kinds
    stage.view.poll()
    toy = stage.view.stages["items"].state
    assert toy.deaths == 0
    assert toy.growths("000001-0") == {1}
    line = stage.records()[1]
    assert (line["oom"], line["error"]) == (True, "executor killed by SIGKILL, out of memory")
    # The next results show nothing of the host's health.
    assert stage.failures.weight == 0


@pytest.mark.parametrize(("on", "name"), [("oom", "memory"), ("gpu_oom", "gpu_memory")])
def test_only_what_an_item_gets_more_of_says_nothing_of_the_host(
    make: Make, on: str, name: str
) -> None:
    stage = make(needs={name: 1}, retry={"on": on, name: "x2", "up_to": 4})

    stage.run("oom", "gpu_oom", "oom", "gpu_oom", "end")

    stage.view.poll_journal("me")
    ran_out = {0, 2} if on == "oom" else {1, 3}
    state = stage.view.stages["items"].state
    assert {item for item in range(4) if state.growth(state.units["000001-0"], item)} == ran_out
    assert stage.failures.weight == 2


def test_an_item_whose_worker_slurm_killed_for_its_memory_gets_more(make: Make) -> None:
    stage = make(needs={"memory": 1}, retry=OOM)
    verdict = Verdict(alive=False, evidence="slurm, out of memory", host="there")
    assert stage.view.stages["items"].claims.create("000001-0", 1, "gone")

    stage.run("done", "done", "done", "end", generation=2, died=("gone", verdict))

    assert stage.journal()[0] == ("failed", 2, 0)
    stage.view.poll_journal("me")
    state = stage.view.stages["items"].state
    assert (state.pending("000001-0"), state.growths("000001-0"), state.deaths) == ([0], {1}, 0)


def test_items_that_need_more_than_the_worker_has_are_left_pending(make: Make) -> None:
    stage = make(needs={"memory": 1}, retry=OOM)
    stage.run("oom", "done", "failed", "done", "end")
    stage.view.poll_journal("me")
    stage.runner.holds = lambda _stage, growth: growth < 1

    stage.run("done", "end", generation=2)

    assert stage.requests[-1]["positions"] == [2]
    stage.view.poll_journal("me")
    assert stage.view.stages["items"].state.pending("000001-0") == [0]


def test_an_item_has_more_time_after_each_timeout_up_to_the_limit(make: Make) -> None:
    stage = make(items=1, timeout_s=10.0, retry=LATE, max_attempts=2)

    for generation, limit in enumerate([10, 20, 35, 35], 1):
        assert stage.view.stages["items"].state.open
        stage.run(*[stage.passing(1.0)] * (limit + 1), generation=generation)
        stage.view.poll_journal("me")

    assert not stage.view.stages["items"].state.open
    errors = [one["error"] for one in stage.records() if one["type"] == "failed"]
    limits = [error.partition(" of ")[2] for error in errors]
    assert limits == ["10.0 s", "20.0 s", "35.0 s", "35.0 s"]
