"""Every step that processes can take on stages that follow others (rule R17), on one small run.

A process reads the log and the journals, now or as it read them before, and then writes the result
of an item or adds what follows, both by the real code. It adds only while its own lines are synced,
as workers do. A host may lose its power, which takes the lines that are not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.graph import GraphLines, following
from hpc_toolkit.queue.items import ItemLines, encode_segment
from hpc_toolkit.queue.log import SEALED, StageLog
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.queue.wants import Arrows
from hpc_toolkit.results.explain import retry_failed
from hpc_toolkit.rundir.journal import decode_line, encode_line
from hpc_toolkit.rundir.layout import Manifest, StageSpec
from tests.model.memorydisk import ROOT, Content, Disk, mounted, run_paths
from tests.model.values import Choices, every, pay, put, replies, spend
from tests.oracle import Told, expect
from tests.toyrun import plain_items, spec_of, units_of

if TYPE_CHECKING:
    from collections.abc import Iterator

EVILS = ("fail", "again", "lost", "cut", "retry")
"""An item fails for good; one that has a line runs once more; the reply to a creation is lost; a
host loses its power; a person retries what failed."""
PAIR = (spec_of("train", max_attempts=1), spec_of("evaluate", after=("train",), max_attempts=1))


@dataclass(frozen=True, kw_only=True)
class World:
    """One small run, and what may happen to it."""

    stages: tuple[StageSpec, ...] = PAIR
    items: int = 1
    edges: tuple[tuple[int, ...], ...] = ()
    """The items that each item of the only stage follows."""
    workers: int = 2
    evils: dict[str, int] = field(default_factory=dict)


class Sees(NamedTuple):
    """What one process has read."""

    logs: tuple[int, ...]
    """Entries of each stage."""
    journals: tuple[bytes, ...]


class State(NamedTuple):
    logs: tuple[tuple[str, ...], ...]
    payloads: frozenset[tuple[str, Content]]
    journals: tuple[bytes, ...]
    synced: tuple[int, ...]
    """Bytes of each journal that are on disk; -1: its host has no power."""
    sees: tuple[Sees, ...]
    told: frozenset[tuple[str, int, int, int]]
    """Stage, entry, position and value of each result that was ever written."""
    left: tuple[int, ...]
    """How much evil may still happen, in the order of :data:`EVILS`."""


class Item(NamedTuple):
    """What the files say of one item."""

    item: dict[str, Any]
    origin: Any
    state: str
    lines: int


class Facts(NamedTuple):
    """What the files say, read as plainly as possible."""

    sealed: tuple[bool, ...]
    items: tuple[dict[tuple[int, int], Item], ...]


class FollowingModel:
    """The steps of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.manifest = Manifest(run="run", stages=world.stages)
        self.paths = run_paths()
        self.names = [one.name for one in world.stages]
        self._memo: dict[Any, Any] = {}

    def initial(self) -> State:
        disk = Disk({}, {}, name="init")
        disk.world = disk.image
        first = self.world.stages[0]
        with mounted(disk), units_of(1):
            log = StageLog(self.paths.stage(first.name))
            if self.world.edges:
                arrows = Arrows()
                given = [{"id": n, "after": [*of]} for n, of in enumerate(self.world.edges)]
                lines = ItemLines(arrows.taken(given), group_by=None)
                edges = arrows.edges(lines.lines, results=True)
                GraphLines(lines, *edges, results=True).publish(log, first)
            else:
                log.add_segment(encode_segment(plain_items(self.world.items), group_by=None))
                log.seal()
        count = self.world.workers
        logs, payloads = self._written(disk.world)
        nothing = Sees((0,) * len(logs), (b"",) * count)
        left = tuple(self.world.evils.get(one, 0) for one in EVILS)
        no = (b"",) * count
        return State(logs, payloads, no, (0,) * count, (nothing,) * count, frozenset(), left)

    def _written(self, files: dict[str, Content]) -> tuple[Any, Any]:
        """The logs and the payloads of files."""
        logs = []
        for name in self.names:
            start = f"{ROOT}/stages/{name}/log/"
            logs.append(tuple(str(files[one]) for one in sorted(files) if one.startswith(start)))
        kinds = ("items", "retries", "graph.jsonl")
        payloads = {
            (path, data)
            for path, data in files.items()
            if path.count("/") > 3 and path.split("/")[4] in kinds
        }
        return tuple(logs), frozenset(payloads)

    def files(self, state: State, sees: Sees | None = None) -> dict[str, Content]:
        """The files, all of them or as one process sees them."""
        found = dict(state.payloads)
        for at, (name, log) in enumerate(zip(self.names, state.logs, strict=True)):
            seen = log if sees is None else log[: sees.logs[at]]
            found[f"{ROOT}/stages/{name}/head"] = b".\n" * len(seen)
            for number, target in enumerate(seen, 1):
                found[f"{ROOT}/stages/{name}/log/{number:06d}"] = target
        journals = state.journals if sees is None else sees.journals
        for number, data in enumerate(journals):
            found[f"{ROOT}/journals/w{number}.jsonl"] = data
        return found

    def facts(self, files: dict[str, Content]) -> Facts:
        """A second reading of the log and the journals."""
        key = ("facts", frozenset(files.items()))
        if key not in self._memo:
            self._memo[key] = self._facts(files)
        found: Facts = self._memo[key]
        return found

    def _facts(self, files: dict[str, Content]) -> Facts:
        sealed, items = [], []
        lines = self._lines(files)
        logs, _ = self._written(files)
        for name, log in zip(self.names, logs, strict=True):
            found: dict[tuple[int, int], Any] = {}
            floors: dict[tuple[int, int], int] = {}
            for number, target in enumerate(log, 1):
                if target == SEALED:
                    continue
                data = files[f"{ROOT}/stages/{name}/{target}"]
                assert isinstance(data, bytes)
                read = [json.loads(one) for one in data.splitlines()]
                if target.startswith("retries/"):
                    for entry, position, floor in read[0]["floors"]:
                        floors[entry, position] = max(floor, floors.get((entry, position), 0))
                    continue
                made = read[0].get("origins") or read[0].get("numbers") or [None] * len(read)
                for position, item in enumerate(read[1:]):
                    origin = made[position] if len(made) >= len(read) - 1 else made[0]
                    found[number, position] = item, json.dumps(origin)
            of = {}
            for ref, (item, origin) in found.items():
                told = lines.get((name, *ref), [])
                state = expect(told, floor=floors.get(ref, 0), max_attempts=1).state
                of[ref] = Item(item, origin, state, len(told))
            sealed.append(SEALED in log)
            items.append(of)
        return Facts(tuple(sealed), tuple(items))

    @staticmethod
    def _lines(files: dict[str, Content]) -> dict[tuple[str, int, int], list[Told]]:
        found: dict[tuple[str, int, int], list[Told]] = {}
        for path, data in files.items():
            if not path.startswith(f"{ROOT}/journals/"):
                continue
            assert isinstance(data, bytes)
            for at, raw in enumerate(data.split(b"\n")):
                line = decode_line(raw)
                if line is not None:
                    name, _, unit = line["unit"].partition("/")
                    told = Told(line["generation"], path, at, line["type"], line.get("value"))
                    key = (name, int(unit.partition("-")[0]), line["item"])
                    found.setdefault(key, []).append(told)
        return found

    def to_come(self, facts: Facts) -> set[tuple[str, str]]:
        """Stage and origin of what must follow, and is not there."""
        left = set()
        if self.world.edges:
            of = {json.loads(one.origin): one.state for one in facts.items[0].values()}
            for number, edges in enumerate(self.world.edges):
                if all(of.get(one) == "done" for one in edges) and number not in of:
                    left.add((self.names[0], str(number)))
            return left
        whole = True
        """Whether each item of the stages before will be done."""
        for at, spec in enumerate(self.world.stages[1:], 1):
            before, made = facts.items[at - 1], {one.origin for one in facts.items[at].values()}
            whole &= all(one.state == "done" for one in before.values())
            due = {json.dumps([*ref]) for ref, one in before.items() if one.state == "done"}
            if spec.by is not None:
                due = {json.dumps("{}")} if whole and all(facts.sealed[:at]) else set()
                due = set() if self.to_come_before(facts, at) else due
            left |= {(spec.name, origin) for origin in due - made}
        return left

    def to_come_before(self, facts: Facts, at: int) -> bool:
        """Whether an item of a stage before lacks one that follows it."""
        pairs = zip(facts.items[: at - 1], facts.items[1:at], strict=True)
        return any(len(first) > len(second) for first, second in pairs)

    def is_over(self, facts: Facts) -> bool:
        states = [one.state for items in facts.items for one in items.values()]
        return all(facts.sealed) and "pending" not in states and not self.to_come(facts)

    # Steps.

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for who in range(self.world.workers):
            if state.synced[who] < 0:
                continue
            for sees in self._looks(state, who):
                seen = state._replace(sees=put(state.sees, who, sees))
                for what, after in (*self._runs(seen, who), *self._adds(seen, who)):
                    if after != state:
                        yield f"w{who} {what}", after
            size = len(state.journals[who])
            if state.synced[who] < size:
                yield f"w{who} syncs", state._replace(synced=put(state.synced, who, size))
                cut = pay(state, EVILS, "cut")
                if cut is not None:
                    kept = state.journals[who][: state.synced[who]]
                    journals = put(state.journals, who, kept)
                    cut = cut._replace(journals=journals, synced=put(state.synced, who, -1))
                    yield f"the host of w{who} loses its power", cut
        retried = pay(state, EVILS, "retry")
        if retried is not None:
            after = self._retry(retried)
            if after.logs != state.logs:
                yield "somebody retries", after

    def _looks(self, state: State, who: int) -> Iterator[Sees]:
        """What a process may have read: of each file the newest, or what it read before."""
        old = state.sees[who]
        logs = [{len(log), seen} for log, seen in zip(state.logs, old.logs, strict=True)]
        journals = [
            {data} if number == who else {data, old.journals[number]}
            for number, data in enumerate(state.journals)
        ]
        for log in product(*map(sorted, logs)):
            yield from (Sees(log, seen) for seen in product(*map(sorted, journals)))

    def _runs(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        """It writes the result of an item that is pending as far as it sees."""
        files = self.files(state, state.sees[who])
        now = self.facts(self.files(state)).items
        for at, items in enumerate(self.facts(files).items):
            for (entry, position), one in items.items():
                if one.state != "pending":
                    continue
                name = self.names[at]
                over = now[at][entry, position].state != "pending"
                paid = pay(state, EVILS, "again") if over else state
                for kind in ("done", "failed") if paid is not None else ():
                    assert paid is not None
                    after = pay(paid, EVILS, "fail") if kind == "failed" else paid
                    if after is not None:
                        ref = (name, entry, position)
                        what = f"ends {name} {entry}/{position}: {kind}"
                        generation = now[at][entry, position].lines + 1
                        yield what, self._line(after, who, ref, generation, kind)

    def _line(
        self, state: State, who: int, ref: tuple[str, int, int], generation: int, kind: str
    ) -> State:
        name, entry, position = ref
        value = 10 * generation + who
        record: dict[str, Any] = {
            "type": kind,
            "unit": f"{name}/{entry:06d}-{position}",
            "generation": generation,
            "item": position,
            "at": 0.0,
            "seconds": 1.0,
        }
        record |= {"value": value} if kind == "done" else {"error": "no"}
        data = state.journals[who] + encode_line(record)
        told = state.told | {(*ref, value)} if kind == "done" else state.told
        sees = state.sees[who]
        sees = sees._replace(journals=put(sees.journals, who, data))
        return state._replace(
            journals=put(state.journals, who, data), told=told, sees=put(state.sees, who, sees)
        )

    def _adds(self, state: State, who: int) -> Iterator[tuple[str, State]]:
        """It adds what follows, as far as it sees, and looks whether all is over."""
        if state.synced[who] < len(state.journals[who]):
            return
        lost = state.left[EVILS.index("lost")]
        key = ("adds", who, state.logs, state.sees[who], state.payloads, lost > 0)
        if key not in self._memo:
            self._memo[key] = list(dict.fromkeys(every(partial(self._add, state, who))))
        for logs, payloads, seen, lost, over in self._memo[key]:
            left = spend(state.left, EVILS.index("lost"), lost)
            sees = state.sees[who]._replace(logs=seen)
            after = state._replace(logs=logs, payloads=payloads, left=left)
            what = "adds what follows" if logs != state.logs else "looks"
            yield f"{what}{' and leaves' * over}", after._replace(sees=put(after.sees, who, sees))

    def _add(self, state: State, who: int, choices: Choices) -> tuple[Any, ...]:
        lost: list[str] = []
        reply = replies(choices, state.left[EVILS.index("lost")], lost)
        image = self.files(state, state.sees[who])
        disk = Disk({**image}, self.files(state), name=f"w{who}", reply=reply, lost=lost)
        over = False
        with mounted(disk), units_of(1):
            view = RunView(self.paths, self.manifest)
            view.poll()
            made = following(view)
            try:
                for one in made.values():
                    one.publish(0.0)
                over = view.complete and all(one.is_over for one in made.values())
            except OSError:
                assert lost, "an error without a lost reply"
            except HpcToolkitError as error:
                raise AssertionError(f"R17: {error.message}") from error
        seen, _ = self._written(disk.image)
        # The entries that it sees name payloads of the server.
        facts = self.facts({**disk.image, **dict(self._written(disk.world)[1])})
        if over:
            assert self.is_over(facts), "R9: a worker leaves, and more is to come"
        logs, payloads = self._written(disk.world)
        for at, (old, new) in enumerate(zip(state.logs, logs, strict=True)):
            if SEALED in new and SEALED not in old and not lost:
                ended = self._ended(facts, at) or self._ended(self.facts(image), at)
                assert ended, "R17: sealed, and an item before is pending"
        return logs, payloads, tuple(map(len, seen)), len(lost), over

    def _ended(self, facts: Facts, at: int) -> bool:
        """Whether no item that a stage follows is pending."""
        before = facts.items[: at + bool(self.world.edges)]
        return "pending" not in [one.state for items in before for one in items.values()]

    def _retry(self, state: State) -> State:
        files = self.files(state)
        disk = Disk(files, files, name="person")
        with mounted(disk):
            view = RunView(self.paths, self.manifest)
            view.poll()
            for stage in view.stages.values():
                retry_failed(view, stage)
        logs, payloads = self._written(disk.world)
        return state._replace(logs=logs, payloads=payloads)


class FollowingChecker:
    """What must hold in every state, and at every end."""

    def __init__(self, model: FollowingModel) -> None:
        self._model = model

    def state(self, state: State) -> None:
        facts = self._model.facts(self._model.files(state))
        told = {(name, value) for name, _, _, value in state.told}
        for at, items in enumerate(facts.items):
            name = self._model.names[at]
            origins = [one.origin for one in items.values() if one.origin != "null"]
            assert len(set(origins)) == len(origins), f"R17: {name} has two items of one origin"
            before = name if self._model.world.edges else self._model.names[at - 1]
            for one in items.values():
                for value in _results(one.item, before):
                    assert (before, value) in told, f"R17: {one.item} has a result of nobody"
                wanted = 1 if at else 0
                if self._model.world.edges:
                    wanted = len(self._model.world.edges[json.loads(one.origin)])
                elif self._model.world.stages[at].by is not None:
                    wanted = len(facts.items[at - 1])
                assert len(_results(one.item, before)) == wanted, f"R17: {one.item} lacks results"

    def step(self, before: State, after: State) -> None:
        for old, new in zip(before.logs, after.logs, strict=True):
            assert old == new[: len(old)], "R13: the log was changed"
        assert before.payloads <= after.payloads, "R13: a payload was changed"

    def leaf(self, state: State) -> bool:
        """One more process that sees everything brings the run to its end, with nothing missing."""
        model, who = self._model, self._model.world.workers
        more = FollowingModel(World(stages=model.world.stages, edges=model.world.edges, workers=1))
        journals, no = (*state.journals, b""), (0,) * len(EVILS)
        rest = state._replace(journals=journals, synced=(*state.synced, 0), left=no)
        for _ in range(30):
            logs = tuple(map(len, rest.logs))
            rest = rest._replace(sees=(*state.sees, Sees(logs, rest.journals)))
            runs = [(what, after) for what, after in more._runs(rest, who) if "done" in what]
            if not runs:
                rest = rest._replace(synced=put(rest.synced, who, len(rest.journals[who])))
                ((what, after),) = more._adds(rest, who)
                rest = after
                if "leaves" in what:
                    break
                continue
            rest = runs[0][1]
        else:
            raise AssertionError("I3: one more worker does not end the run")
        self.state(rest)
        facts = more.facts(more.files(rest))
        assert more.is_over(facts), "R17: an item is missing at the end"
        return True


def _results(item: dict[str, Any], before: str) -> list[int]:
    """The results of items before that an item has."""
    if "results" in item:
        return [*item["results"].values()]
    value = item.get(before, [])
    return [row["value"] for row in value] if isinstance(value, list) else [value]
