"""The protocol as a whole: workers that crash, freeze, misjudge each other and see old files.

The machine plays the executors, the disk's delays and fate; every decision is made by the real
code: claims, log, state, picker, retry, gather, status. After each step all that the rules say of
each item, written down a second time in ``tests.oracle``, is compared with what the code says.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.control import ControlReader, ask_to_drain
from hpc_toolkit.queue.leases import Verdict
from hpc_toolkit.queue.state import MAX_DEATHS, is_killer
from hpc_toolkit.queue.units import claim_name
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import NotCompleteError, gather
from hpc_toolkit.results.status import read_status
from tests.manualclock import ManualClock
from tests.oracle import Expected, Told, expect
from tests.toyrun import ToyRun

Place = tuple[int, int]
Row = dict[str, Any]

MAX_ATTEMPTS = 2
UNIT = 2
RANK = {"pending": 0, "failed": 1, "done": 2}
WHO = st.integers(0, 3)
SO_FAR = ["begun", "frozen", "sealed", "swept", "published", "retried", "killed"]
KINDS = st.sampled_from(["done", "done", "failed", "permanent"])

WORK: dict[str, Any] = {
    "who": WHO,
    "hidden": st.sets(WHO, max_size=2),
    "old": st.tuples(st.booleans(), st.booleans()),
    "certain": st.booleans(),
    "kinds": st.lists(KINDS, min_size=1, max_size=UNIT),
    "end": st.sampled_from(["go on", "go on", "release", "executor dies", "crash", "torn"]),
}


class StaleView(RunView):
    """A view to which the files of others arrive late."""

    hidden: frozenset[str] = frozenset()
    """Journals that cannot be read now."""
    listing_is_old = False
    log_is_old = False

    def poll_journal(self, worker: str) -> None:
        if worker not in self.hidden:
            super().poll_journal(worker)

    def poll_claims(self) -> None:
        if not self.listing_is_old:
            super().poll_claims()

    def poll_logs(self) -> None:
        if not self.log_is_old:
            super().poll_logs()


def rows_without_publishing(view: RunView) -> list[Row]:
    """What a reader without write access gets."""

    def refuse(_chunks: object) -> bool:
        raise OSError(errno.EROFS, "read-only")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view.stages["items"].log, "add_table", refuse)
        return gather(view, "items", partial=True).rows


class Actor:
    """One worker: the real decisions, played hands."""

    def __init__(self, toy: ToyRun, name: str, finished: set[str]) -> None:
        self.name = name
        self.hands = toy.worker(name)
        self.view = StaleView(toy.paths, toy.run.manifest)
        self.believed_dead: set[str] = set()
        self._finished = finished
        self.control = ControlReader(toy.paths)
        self.picker = Picker(self.view, self, ManualClock(), name)  # type: ignore[arg-type]
        self.alive = True
        self.assignment: Assignment | None = None
        self.todo: list[int] = []
        self.lines = 0

    def verdict(self, worker: str) -> Verdict:
        """As liveness gives it; may be wrong."""
        if worker in self._finished:
            return Verdict(alive=False, finished=True)
        dead = worker in self.believed_dead
        return Verdict(alive=not dead, evidence="lease" if dead else "", host=worker)

    def is_behind(self, _worker: str, _size: int) -> bool:
        return False  # any view may be old here, and nobody waits for a newer one

    def names(self) -> list[str]:
        return []


class Protocol(RuleBasedStateMachine):
    """One stage of a run and everybody who touches it."""

    def __init__(self) -> None:
        super().__init__()
        shared = Path("/dev/shm")
        self.dir = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
        self.toy = ToyRun(self.dir / "run", 0, unit=UNIT, sealed=False, max_attempts=MAX_ATTEMPTS)
        self.actors: list[Actor] = []
        self.finished: set[str] = set()
        self.unaware: set[str] = set()
        """Those who lost the reply to a claim."""
        self.told: dict[Place, list[Told]] = {}
        self.owners: dict[tuple[str, int], str] = {}
        self.deaths: dict[tuple[str, int], list[int]] = {}
        """Suspects that were named, by unit and generation."""
        self.drained: set[str] = set()
        """Those who were asked to leave."""
        self.tables: dict[int, dict[Place, Row]] = {}
        self.before: tuple[int, dict[int, dict[Place, Row]], dict[Place, str]] = (0, {}, {})
        self.items = 0

    @initialize(
        count=st.integers(2, 4),
        kinds=st.lists(KINDS, min_size=1, max_size=3),
        so_far=st.sampled_from(SO_FAR),
    )
    def begin(self, count: int, kinds: list[str], so_far: str) -> None:
        """Chance alone seldom comes as far as a table beside a worker that is frozen."""
        self._add(count)
        self.start()
        if so_far != "begun":
            self._begin(self.actors[0], self.actors[0].picker.fresh(("", None)))
        self.start()
        if so_far not in ("begun", "frozen"):
            self.seal()
        if so_far == "killed":
            self._kill_executors(self.actors[1])
        if so_far in ("swept", "published", "retried"):
            self.sweep(kinds, count * MAX_ATTEMPTS)
        if so_far in ("published", "retried"):
            self.ask(set(), so_far == "retried")

    def _kill_executors(self, actor: Actor) -> None:
        """Five executors die of one item, or each of another one, as its unit is large or small."""
        self._begin(actor, actor.picker.fresh(("", None)))
        while actor.assignment is not None and actor.todo and len(self.deaths) < 2 * MAX_DEATHS:
            self._end(actor, "executor dies")

    def _add(self, count: int) -> None:
        entry = self.toy.log().length + 1
        assert self.toy.add([{"id": self.items + index} for index in range(count)])
        self.items += count
        self.told.update({(entry, position): [] for position in range(count)})

    def _pick(self, number: int, eligible: Iterable[Actor]) -> Actor | None:
        found = list(eligible)
        return found[number % len(found)] if found else None

    def _idle(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive and actor.assignment is None]

    def _busy(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive and actor.assignment is not None]

    def start(self) -> None:
        self.actors.append(Actor(self.toy, f"w{len(self.actors):02d}", self.finished))

    @rule(who=WHO, what=st.integers(0, 5))
    def something_else(self, who: int, what: int) -> None:
        alive = sum(actor.alive for actor in self.actors)
        if alive < 2 or (alive < 4 and what == 0):
            self.start()
        elif what == 1:
            self._leave(who)
        elif what > 3:
            self._lose_the_reply_to_a_claim(who, what - 4)
        else:
            self.actors[who % len(self.actors)].believed_dead.clear()

    @rule(count=st.integers(0, 2))
    @precondition(lambda self: not self.toy.log().sealed)
    def add_or_seal(self, count: int) -> None:
        if count and self.items < 8:
            self._add(count)
        else:
            self.seal()

    def seal(self) -> None:
        self.toy.reopen().seal()

    @rule(who=st.sets(WHO, min_size=1, max_size=2))
    @precondition(lambda self: sum(actor.alive for actor in self.actors) > 1)
    def drain(self, who: set[int]) -> None:
        """A request names some of those who are there, and is never withdrawn (R16)."""
        names = {self.actors[number % len(self.actors)].name for number in who}
        ask_to_drain(self.toy.paths, sorted(names))
        self.drained |= names

    def _heeds_a_drain(self, actor: Actor) -> bool:
        """Whoever is named leaves, and nobody else."""
        asked = any(actor.name in one.workers for one in actor.control.poll()[0])
        assert asked == (actor.name in self.drained)
        if asked:
            if actor.assignment is not None:
                actor.hands.release()
                actor.assignment = None
            self._finish(actor)
        return asked

    @rule(**WORK)
    @precondition(lambda self: any(actor.alive for actor in self.actors))
    def work_on(self, **how: Any) -> None:
        """Twice, so that half of all steps are work."""
        self._work(**how)

    @rule(**WORK)
    @precondition(lambda self: any(actor.alive for actor in self.actors))
    def work(self, **how: Any) -> None:
        self._work(**how)

    def _work(
        self,
        who: int,
        hidden: set[int],
        old: tuple[bool, bool],
        certain: bool,
        kinds: list[str],
        end: str,
    ) -> None:
        """Take a unit if there is none at hand, try some items, and go on, give back or die.

        The view may be behind, and right or wrong about who lives.
        """
        actor = self._pick(who, (actor for actor in self.actors if actor.alive))
        assert actor is not None
        if self._heeds_a_drain(actor):
            return
        if actor.assignment is None:
            if certain:
                self._hold_all_others_for_dead(actor)
            view = actor.view
            others = {self.actors[number % len(self.actors)].name for number in hidden}
            view.hidden, (view.listing_is_old, view.log_is_old) = frozenset(others), old
            self._begin(actor, actor.picker.fresh(("", None)) or actor.picker.takeover())
            view.hidden, view.listing_is_old, view.log_is_old = frozenset(), False, False
        if actor.assignment is not None:
            for kind in kinds[: len(actor.todo)]:
                self._write(actor, actor.todo.pop(0), kind)
            self._end(actor, end)

    def _hold_all_others_for_dead(self, actor: Actor) -> None:
        actor.believed_dead.update(one.name for one in self.actors if one is not actor)

    def _end(self, actor: Actor, how: str) -> None:
        found = actor.assignment
        assert found is not None
        if how == "release":
            actor.hands.release()
            actor.assignment = None
        elif how == "executor dies" and actor.todo:
            self._write_death(actor, found, actor.name, found.generation)
            actor.hands.release()
            actor.assignment = None
            self._begin(actor, actor.picker.again(found))
        elif how in ("crash", "torn"):
            actor.alive = False
            if how == "torn":
                actor.hands.journal.append(b'{"type":"done","unit":"items/000001-0","gen')

    @rule(who=WHO)
    @precondition(lambda self: self._busy())
    def look(self, who: int) -> None:
        """Whether somebody took the next generation; then leave the unit alone."""
        actor = self._pick(who, self._busy())
        assert actor is not None
        found = actor.assignment
        assert found is not None
        if found.stage.claims.overtaken(found.unit.name, found.generation):
            actor.assignment = None

    def _begin(self, actor: Actor, found: Assignment | None) -> None:
        """What a pass does first (R15), and that nobody else has this generation (I6)."""
        if found is None:
            return
        key = (found.unit.name, found.generation)
        assert self.owners.setdefault(key, actor.name) == actor.name
        assert found.generation == 1 or (found.unit.name, found.generation - 1) in self.owners
        actor.assignment = found
        actor.hands.begin(*key)
        state = found.stage.state
        actor.todo = state.running_order(found.unit.name)
        if found.died is not None and actor.todo:
            self._write_death(actor, found, found.died[0], found.generation - 1)
            actor.view.poll_journal(actor.name)
            actor.todo = state.running_order(found.unit.name)
        for item, deaths in state.suspects(found.unit.name).items():
            if item in actor.todo and is_killer(deaths):
                named = [self.deaths[key] for key in self.deaths if key[0] == found.unit.name]
                assert sum(item in suspects for suspects in named) >= MAX_DEATHS
                self._write(actor, item, "permanent")
                actor.todo.remove(item)

    def _write_death(self, actor: Actor, found: Assignment, worker: str, generation: int) -> None:
        """Its own executor's, or that of the owner before."""
        item, *others = actor.todo
        suspects = found.stage.state.suspects(found.unit.name)
        alone = not others or all(one in suspects for one in actor.todo)
        own = generation == found.generation
        which = {} if own else {"generation": generation}
        actor.hands.death(item, worker=worker, host=worker, alone=alone, **which)
        self.deaths.setdefault((found.unit.name, generation), []).append(item)

    def _lose_the_reply_to_a_claim(self, who: int, first: int) -> None:
        """The claim is made, and its maker does not know."""
        actor = self._pick(who, self._idle())
        if actor is None:
            return
        name = self.toy.unit_name(first * UNIT)
        exists = any(unit.unit.name == name for unit in self.toy.stage().state.units.values())
        if exists and (name, 1) not in self.owners:
            (self.toy.stage_paths.claims / claim_name(name, 1)).symlink_to(actor.name)
            self.owners[name, 1] = actor.name
            self.unaware.add(actor.name)

    def _write(self, actor: Actor, item: int, kind: str) -> None:
        found = actor.assignment
        assert found is not None
        actor.lines += 1
        value = {"by": actor.name, "n": actor.lines}
        actor.hands.attempt(item, kind, **({"value": value} if kind == "done" else {}))
        told = Told(found.generation, actor.name, actor.lines, kind, value)
        self.told[found.unit.entry, item].append(told)

    def _leave(self, who: int) -> None:
        actor = self._pick(who, self._idle())
        if actor is not None:
            self._finish(actor)

    def _finish(self, actor: Actor) -> None:
        actor.alive = False
        actor.hands.finish()
        self.finished.add(actor.name)

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=3), passes=st.integers(1, 8))
    @precondition(lambda self: self._idle())
    def sweep(self, kinds: list[str], passes: int) -> None:
        """One worker holds all others for dead, and does one unit after the other."""
        actor = self._idle()[-1]
        self._hold_all_others_for_dead(actor)
        for number in range(passes):
            self._begin(actor, actor.picker.fresh(("", None)) or actor.picker.takeover())
            if actor.assignment is None:
                return
            for item in actor.todo:
                self._write(actor, item, kinds[(item + number) % len(kinds)])
            self._end(actor, "release")

    @rule(hidden=st.sets(WHO, max_size=1), retry=st.booleans())
    def ask(self, hidden: set[int], retry: bool) -> None:
        """Somebody gathers, and retries what failed."""
        self.gather(hidden)
        if retry:
            self.toy.reopen().retry()

    def gather(self, hidden: set[int]) -> None:
        view = StaleView(self.toy.paths, self.toy.run.manifest)
        view.hidden = frozenset(self.actors[number % len(self.actors)].name for number in hidden)
        try:
            table = gather(view, "items")
        except NotCompleteError:
            return
        assert table.published
        assert [row["item"]["id"] for row in table.rows] == list(range(self.items))
        self._check_table(table.rows)

    def _check_table(self, rows: list[Row]) -> None:
        """Rows that were published stay, but failed ones that a retry names (R12)."""
        log = self.toy.log()
        assert log.table is not None
        number = log.table[0]
        found = dict(zip(sorted(self.told), rows, strict=True))
        assert self.tables.setdefault(number, found) == found
        for older, table in self.tables.items():
            for place, row in table.items():
                lifted = log.retried_at.get(place, 0) > older
                if older < number and not (row["state"] == "failed" and lifted):
                    assert found[place] == row

    @invariant()
    def everything_agrees(self) -> None:
        view = self.toy.view()
        log = view.stages["items"].log
        wanted = {
            place: self._expect(place, log.floors, log.retried_at, log.table) for place in self.told
        }
        self._agree_on_rows(view, wanted)
        self._agree_on_counts(view, wanted)
        self._never_regress(log.length, {place: one.state for place, one in wanted.items()})
        for actor in self.actors:
            self._a_view_that_is_complete_stays_right(actor, wanted, log.last_retry)

    def _expect(
        self,
        place: Place,
        floors: dict[Place, int],
        retried_at: dict[Place, int],
        table: tuple[int, str] | None,
    ) -> Expected:
        if table is not None:
            row = self.tables.get(table[0], {}).get(place)
            assert row is not None, "a table was published that nobody asked for, or lacks a row"
            if row["state"] == "done" or retried_at.get(place, 0) < table[0]:
                return Expected(row["state"], row["attempts"], row["value"], row["worker"], 0)
        return expect(self.told[place], floor=floors.get(place, 0), max_attempts=MAX_ATTEMPTS)

    def _agree_on_rows(self, view: RunView, wanted: dict[Place, Expected]) -> None:
        """One row for each finished item, and the one that the rules say (I2)."""
        rows = rows_without_publishing(view)
        finished = [one for _, one in sorted(wanted.items()) if one.state != "pending"]
        assert len(rows) == len(finished)
        for row, one in zip(rows, finished, strict=True):
            assert (row["state"], row["attempts"]) == (one.state, one.attempts)
            if one.state == "done":
                assert (row["value"], row["worker"]) == (one.value, one.worker)
        assert rows_without_publishing(self.toy.view()) == rows

    def _agree_on_counts(self, view: RunView, wanted: dict[Place, Expected]) -> None:
        status = read_status(view, ManualClock(), given="r")
        counts = status.stages["items"]
        # Lines of one generation count once (R15).
        assert status.deaths == len(self.deaths)
        states = [one.state for one in wanted.values()]
        assert counts.total == len(states)
        assert counts.done == states.count("done")
        assert counts.failed == states.count("failed")
        assert counts.left == states.count("pending")

    def _never_regress(self, length: int, states: dict[Place, str]) -> None:
        """Within a log prefix a state only moves on, and done stays done (I1).

        A table alone may say otherwise: whoever made it did not see the line yet.
        """
        before_length, tables, before = self.before
        for place, state in before.items():
            if length == before_length or (state == "done" and tables == self.tables):
                assert RANK[states[place]] >= RANK[state]
        self.before = (length, dict(self.tables), states)

    def _a_view_that_is_complete_stays_right(
        self, actor: Actor, wanted: dict[Place, Expected], last_retry: int
    ) -> None:
        stage = actor.view.stages["items"]
        if stage.complete and last_retry <= stage.log.length:
            assert all(one.state != "pending" for one in wanted.values())

    def teardown(self) -> None:
        try:
            if self.actors:
                self._one_worker_completes_the_stage()
                self._late_lines_change_nothing()
        finally:
            shutil.rmtree(self.dir)

    def _one_worker_completes_the_stage(self) -> None:
        self.seal()
        if not self._idle():
            self.start()
        last = max(self._idle(), key=lambda actor: actor.name in self.unaware)
        self._hold_all_others_for_dead(last)
        for _ in range(self.items * (MAX_ATTEMPTS + 1) + 1):
            found = last.picker.fresh(("", None)) or last.picker.takeover()
            if found is None:
                break
            self._begin(last, found)
            for item in last.todo:
                self._write(last, item, "failed" if item % 2 else "done")
            last.hands.release()
            last.assignment = None
        assert last.view.complete
        self.gather(set())
        self.everything_agrees()

    def _late_lines_change_nothing(self) -> None:
        published = self.toy.reopen().table().rows
        for actor in self.actors:
            if actor.alive and actor.assignment is not None:
                for item in actor.todo:
                    self._write(actor, item, "done")
                actor.hands.release()
        assert self.toy.reopen().table().rows == published
        self.everything_agrees()


@pytest.mark.parametrize(
    "examples", [20, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_the_protocol_keeps_its_invariants(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Shrinking takes minutes, beyond every test's time: HYPOTHESIS_PROFILE=search asks for it.
    shrinks = os.environ.get("HYPOTHESIS_PROFILE") == "search"
    phases = [phase for phase in Phase if shrinks or phase is not Phase.shrink]
    # What a view does not show here does not come by waiting.
    monkeypatch.setattr("hpc_toolkit.results.gather._CATCH_UP_S", 0.0)
    run_state_machine_as_test(
        Protocol, settings=settings(max_examples=examples, stateful_step_count=60, phases=phases)
    )


def test_the_oracle_knows_the_rules() -> None:
    """Known answers of the second writing itself."""

    def of(*lines: Told, floor: int = 0) -> Iterable[Any]:
        found = expect(lines, floor=floor, max_attempts=2)
        return (found.state, found.attempts, found.value, found.duplicates)

    first, second = Told(2, "b", 0, "done", 1), Told(2, "a", 9, "done", 2)
    assert of() == ("pending", 0, None, 0)
    assert of(first, second, Told(1, "a", 0, "failed")) == ("done", 2, 2, 1)
    assert of(Told(1, "a", 0, "failed"), Told(1, "a", 1, "failed")) == ("pending", 1, None, 0)
    assert of(Told(1, "a", 0, "failed"), Told(3, "a", 1, "failed")) == ("failed", 2, None, 0)
    assert of(Told(1, "a", 0, "permanent")) == ("failed", 1, None, 0)
    assert of(Told(1, "a", 0, "permanent"), floor=1) == ("pending", 0, None, 0)
