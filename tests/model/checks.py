"""What must hold in every state: the invariants, from a second writing of the rules."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from hpc_toolkit.queue.presence import RUNNING
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.status import read_status
from hpc_toolkit.rundir.journal import decode_line
from tests.manualclock import ManualClock
from tests.model.machine import Model
from tests.model.memorydisk import Disk, mounted
from tests.model.values import Actor, Sees, State
from tests.oracle import Expected, Told, expect

Place = tuple[int, int]
RANK = {"pending": 0, "failed": 1, "done": 2}


class Facts(NamedTuple):
    """What the files say, by the second writing."""

    items: dict[Place, Expected]
    tables: dict[int, dict[Place, dict[str, Any]]]
    retried: dict[int, set[Place]]
    sealed: bool

    @property
    def complete(self) -> bool:
        return self.sealed and all(item.state != "pending" for item in self.items.values())


def facts(state: State, model: Model, *, log: int | None = None) -> Facts:
    """Read log and journals as plainly as possible."""
    payloads = dict(state.payloads)
    places: list[Place] = []
    floors: dict[Place, int] = {}
    tables: dict[int, dict[Place, dict[str, Any]]] = {}
    retried: dict[int, set[Place]] = {}
    sealed = False
    for number, target in enumerate(state.log[:log], 1):
        if target == "sealed":
            sealed = True
            continue
        lines = [json.loads(line) for line in payloads[target].splitlines()]
        if target.startswith("items/"):
            assert not sealed, "R2: a segment stands behind the seal"
            places += [(number, position) for position in range(len(lines) - 1)]
        elif target.startswith("results/"):
            tables[number] = {(r["at"][0], r["at"][1]): r for r in lines[1:]}
        else:
            found = {(e, p): floor for e, p, floor in lines[0]["floors"]}
            retried[number] = set(found)
            for place, floor in found.items():
                floors[place] = max(floor, floors.get(place, 0))
    told = _told(state, model.names)
    last = max(tables, default=0)
    items = {}
    for place in places:
        limits = {"max_attempts": model.config.max_attempts, "steps": model.config.steps}
        items[place] = expect(told.get(place, []), floor=floors.get(place, 0), **limits)
        row = tables[last].get(place) if last else None
        lifted = any(number > last and place in named for number, named in retried.items())
        if row is not None and (row["state"] == "done" or not lifted):
            items[place] = Expected(row["state"], row["attempts"], row["value"], row["worker"], 0)
    return Facts(items, tables, retried, sealed)


def _told(state: State, names: list[str]) -> dict[Place, list[Told]]:
    told: dict[Place, list[Told]] = {}
    for name, journal in zip(names, state.journals, strict=True):
        for place, line in _attempts(name, journal):
            told.setdefault(place, []).append(line)
    return told


@cache
def _attempts(name: str, journal: bytes) -> list[tuple[Place, Told]]:
    found = []
    for at, raw in enumerate(journal.split(b"\n")):
        line = decode_line(raw)
        if line is None or line["type"] not in ("done", "failed", "permanent"):
            continue
        entry = int(line["unit"].rpartition("/")[2].partition("-")[0])
        kind = "short" if line.get("oom") else line["type"]
        told = Told(line["generation"], name, at, kind, line.get("value"))
        found.append(((entry, line["item"]), told))
    return found


def _deaths(unit: str, journals: tuple[bytes, ...]) -> dict[int, set[int]]:
    """Generations whose unexplained death suspects an item."""
    found: dict[int, set[int]] = {}
    for journal in journals:
        for raw in journal.split(b"\n"):
            line = decode_line(raw)
            if line is None or line["type"] != "death" or line["unit"] != f"items/{unit}":
                continue
            if not line["explained"]:
                found.setdefault(line["item"], set()).add(line["generation"])
    return found


class Checker:
    """Checks states and steps of one model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._facts: dict[Any, Facts] = {}
        self._agreed: dict[Any, Facts] = {}
        config = model.config
        # It sees everything as it is, and whoever was there is gone.
        calm = replace(config, workers=config.workers + 1, kinds=("done",), stale=frozenset())
        by = "lock" if config.deaths_by == "lock" else "lease"  # nobody asks Slurm once more
        self._rescuer = Model(replace(calm, evils={}, deaths_by=by))

    def facts(self, state: State) -> Facts:
        key = (state.log, state.payloads, state.journals)
        if key not in self._agreed:
            found = facts(state, self._model)
            self._agree(state, found)
            self._agreed[key] = found
        return self._agreed[key]

    def state(self, state: State) -> None:
        """What holds in one state."""
        self.facts(state)
        numbers = {claim[:2] for claim in state.claims}
        assert len(numbers) == len(state.claims), "I6: a generation has two owners"
        for unit, generation in numbers:
            assert generation == 1 or (unit, generation - 1) in numbers, "R3: a gap"
        held = [actor.take[:2] for actor in state.actors if actor.phase == "pass" and actor.take]
        assert len(set(held)) == len(held), "I6: two workers work on one generation"

    def step(self, before: State, after: State) -> None:
        """What holds between two states."""
        kept = (
            before.log == after.log[: len(before.log)]
            and before.payloads <= after.payloads
            and before.claims <= after.claims
            and all(map(bytes.startswith, after.journals, before.journals))
        )
        assert kept, "R13: something was deleted or changed"
        old, new = self.facts(before), self.facts(after)
        for place, item in old.items.items():
            now = new.items[place]
            same_log = len(before.log) == len(after.log)
            if item.state == "done" or same_log:
                assert RANK[now.state] >= RANK[item.state] or new.tables.keys() - old.tables, (
                    f"I1: {place} was {item.state} and is {now.state}"
                )
        for number, rows in new.tables.items():
            for older, table in old.tables.items():
                if older < number:
                    self._table_stays(table, rows, new.retried, older, number)
        self._leavers(before, after)
        self._pass_begins(before, after)

    @staticmethod
    def _table_stays(
        table: dict[Place, Any],
        rows: dict[Place, Any],
        retried: dict[int, set[Place]],
        older: int,
        number: int,
    ) -> None:
        for place, row in table.items():
            lifted = any(older < at < number and place in named for at, named in retried.items())
            if not (row["state"] == "failed" and lifted):
                assert rows[place] == row, f"I2: the published row of {place} changed"

    def _leavers(self, before: State, after: State) -> None:
        for old, new, name in zip(before.actors, after.actors, self._model.names, strict=False):
            if new.phase == "gone" and new.code == 75 and old.code is None:
                asked = any(name.encode() in request for _, request in after.control)
                assert asked, "R16: a worker leaves that nobody asked"
            if new.code == 0 and old.code is None:
                seen = facts(after, self._model, log=new.sees.log)
                assert seen.complete, "R9: a worker leaves with 0 and items are pending"

    def _pass_begins(self, before: State, after: State) -> None:
        """No item is begun that is finished as far as its worker sees (I9)."""
        for number, (old, new) in enumerate(zip(before.actors, after.actors, strict=True)):
            if new.begun is None or old.begun is not None or new.take is None:
                continue
            lengths = new.begun.journals
            journals = tuple(d[:n] for d, n in zip(before.journals, lengths, strict=True))
            key = (before.log[: new.begun.log], before.payloads, journals)
            if key not in self._facts:
                seen = before._replace(log=key[0], journals=journals)
                self._facts[key] = facts(seen, self._model)
            known = self._facts[key]
            entry = int(new.take.unit.partition("-")[0])
            for position in new.positions:
                state = known.items[entry, position].state
                assert state == "pending", f"I9: item {position} is {state} and is run again"
            # The pass itself may have begun with the line of its owner's death.
            deaths = _deaths(new.take.unit, after.journals)
            order = sorted(new.positions, key=lambda one: (len(deaths.get(one, ())), one))
            own = _deaths(new.take.unit, (after.journals[number],))
            if own == deaths:
                assert list(new.positions) == order, "R15: a suspect does not run last"

    def _agree(self, state: State, found: Facts) -> None:
        """The real code says the same of the same files (I2), and looking writes nothing (I7)."""
        files = self._model.files(state)
        disk = Disk(files, dict(files), name="reader")
        with mounted(disk), pytest.MonkeyPatch.context() as patch:
            view = RunView(self._model.paths, self._model.manifest)
            counts = read_status(view, ManualClock(), given="r").stages["items"]
            assert not disk.changed, "I7: status wrote"

            def refuse(_chunks: object) -> bool:
                raise OSError(errno.EROFS, "read-only")

            patch.setattr(view.stages["items"].log, "add_table", refuse)
            rows = gather(view, "items", partial=True).rows
        states = [one.state for _, one in sorted(found.items.items())]
        assert (counts.total, counts.sealed) == (len(states), found.sealed), "R2: the items"
        ended = (states.count("done"), states.count("failed"))
        assert (counts.done, counts.failed) == ended, f"R8: {counts} and not {ended}"
        assert counts.left == states.count("pending"), f"R8: {counts}"
        wanted = [one for _, one in sorted(found.items.items()) if one.state != "pending"]
        assert len(rows) == len(wanted), "I2: not one row for each finished item"
        for row, one in zip(rows, wanted, strict=True):
            assert (row["state"], row["attempts"]) == (one.state, one.attempts), "I2: a row"
            if one.state == "done":
                assert (row["value"], row["worker"]) == (one.value, one.worker), "I2: the winner"

    def leaf(self, state: State) -> bool:
        """What holds where nothing can happen any more; whether the stage was complete there.

        A worker that stayed has left because it was. Otherwise one new worker completes it, and
        every command that waited comes to its end.
        """
        workers = self._model.config.workers
        for who, actor in enumerate(state.actors[:workers]):
            assert actor.phase in ("gone", "dead"), f"I3: {self._model.title(who)} waits for ever"
        complete = self.facts(state).complete
        if not complete or any(actor.phase == "idle" for actor in state.actors[workers:]):
            self._rescue(state)
        return complete

    def _rescue(self, state: State) -> None:
        workers = self._model.config.workers
        dead = [actor._replace(phase="dead") for actor in state.actors[:workers]]
        sees = Sees(0, frozenset(), (0,) * (workers + 1), 0)
        people = [actor._replace(sees=sees) for actor in state.actors[workers:]]
        state = State(
            log=state.log,
            payloads=state.payloads,
            claims=state.claims,
            journals=(*state.journals, b""),
            presence=(*state.presence, RUNNING),
            control=state.control,
            actors=(*dead, Actor("idle", sees), *people),
            told=state.told,
            left=(0,) * len(state.left),
        )
        way = []
        while (step := next(self._rescuer.steps(state), None)) is not None:
            way.append(step[0])
            state = step[1]
        found = facts(state, self._rescuer)
        everybody = all(actor.phase in ("gone", "dead") for actor in state.actors)
        done = found.complete and everybody
        assert done, "I3: a new worker does not complete it:\n  " + "\n  ".join(way)
