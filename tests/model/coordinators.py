"""Every step that some coordinators of one campaign, its workers and a person can take (rule R14).

A coordinator takes one step for each question that it asks the files, so all orders of their
questions are there, and one that is not chosen is frozen. Workers are results that come in any
order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.bandit import Observation, Pull, TaskSet
from hpc_toolkit.campaign.arms import Model
from hpc_toolkit.campaign.decisions import SEARCH
from hpc_toolkit.campaign.search import make_arms
from hpc_toolkit.campaign.settings import METRICS, TASKS, Campaign
from hpc_toolkit.campaign.tables import ROUNDS, WINDOW, Search, Work
from hpc_toolkit.queue.items import encode_segment
from hpc_toolkit.queue.log import SEALED
from hpc_toolkit.rundir.layout import Manifest
from tests.model.coordinating import SCORES, Answer, Halt, Result, decisions_in, made_policy, play
from tests.model.memorydisk import ROOT, Content
from tests.model.values import pay

if TYPE_CHECKING:
    from collections.abc import Iterator

Entry = tuple[str, bytes]
"""What an entry of a log names, and its payload."""
Logs = tuple[tuple[Entry, ...], ...]
"""In the order of :data:`STAGES`."""
STAGES = (METRICS, TASKS)
EVILS = ("crash", "lost", "late", "twice", "retry")
"""A coordinator is killed and started again; a reply is lost; a payload is seen after its entry;
an item is done in two generations; a person adds an entry that is no ask."""
ENDLESS = 10_000


class State(NamedTuple):
    """Everything. Coordinators are alike, so which is which is no part of it."""

    logs: Logs
    results: frozenset[Result]
    coordinators: tuple[int, ...]
    """What each was answered, as a number; sorted."""
    left: tuple[int, ...]
    """How much evil may still happen, in the order of :data:`EVILS`."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One small campaign."""

    coordinators: int = 2
    policy: str = "steered"
    budget: int = 2
    pending: int = 1
    asks: str = WINDOW
    tasks: int = 1
    """Items of each ask."""
    exhaustive: bool = False
    checkpoints: int = 2
    """Of two arms each."""
    known: bool = True
    """Whether the metrics are published before any coordinator begins."""
    evils: dict[str, int] = field(default_factory=dict)

    def campaign(self) -> Campaign:
        """Its settings."""
        work = Work(workload="hpc_toolkit.science.workloads.synthetic:Noop")
        names = tuple("abc"[: self.tasks])
        return Campaign(
            name="toy",
            seed=3,
            models=(Model(name="m", layers=1, size=1000, steps=tuple(range(self.checkpoints))),),
            metrics=work,
            tasks=Work(workload=work.workload, names=names),
            search=Search(
                policy=self.policy,
                budget=self.budget,
                pending=self.pending,
                asks=self.asks,
                exhaustive=self.exhaustive,
            ),
        )


class Coordinators:
    """The steps of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.campaign = world.campaign()
        self.manifest = Manifest(run="toy", stages=self.campaign.stages(()))
        self._base: dict[str, Content] = {}
        self._stories: list[tuple[Answer, ...]] = []
        self.halts: list[Halt] = []
        self._numbers: dict[tuple[Answer, ...], int] = {}
        self._alike: dict[Any, int] = {}
        self._after: dict[tuple[int, Answer], int] = {}
        self._items: dict[tuple[str, int, bytes], list[tuple[str, int]]] = {}
        self._empty = (0,) * len(EVILS)
        self.start = State(((), ()), frozenset(), (), self._empty)
        if world.known:
            self._publish_metrics()
        self.root = self._number(())

    def _publish_metrics(self) -> None:
        arms = [arm.item() for arm in self.campaign.arms()]
        items = b"".join(encode_segment(arms, group_by="checkpoint"))
        header = {"format": 1, "segments": [1], "rows": 0, "failed": []}
        entries = [
            ("items/000001.jsonl", items),
            (SEALED, b""),
            ("results/000003.jsonl", json.dumps(header).encode() + b"\n"),
        ]
        root = f"{ROOT}/stages/{METRICS}"
        for number, (target, data) in enumerate(entries, 1):
            self._base[f"{root}/log/{number:06d}"] = target
            self._base[f"{root}/{target}"] = data
        for unit, item in self.items(METRICS, 1, items):
            name, line = Result(METRICS, 1, item, 1, unit).journal
            self._base[name] = line

    def initial(self) -> State:
        left = tuple(self.world.evils.get(evil, 0) for evil in EVILS)
        return self.start._replace(coordinators=(self.root,) * self.world.coordinators, left=left)

    # What coordinators do of themselves.

    def _number(self, story: tuple[Answer, ...]) -> int:
        if story not in self._numbers:
            known = self.world.known
            halt, alike = play(self.campaign, self.manifest, self._base, story, known=known)
            if alike not in self._alike:
                self._alike[alike] = len(self.halts)
                self.halts.append(halt)
                self._stories.append(story)
            self._numbers[story] = self._alike[alike]
        return self._numbers[story]

    def after(self, coordinator: int, answer: Answer) -> int:
        """What a coordinator is once it was answered."""
        key = (coordinator, answer)
        if key not in self._after:
            self._after[key] = self._number((*self._stories[coordinator], answer))
        return self._after[key]

    # Steps.

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Every (what happens, state after it) but those that change nothing."""
        for place, coordinator in enumerate(state.coordinators):
            if place and coordinator == state.coordinators[place - 1]:
                continue
            halt = self.halts[coordinator]
            for answer, evil, logs in self._answers(state, coordinator, halt):
                after = pay(state._replace(logs=logs), EVILS, evil)
                if after is not None:
                    now = self._with(after, place, self.after(coordinator, answer))
                    if now != state:
                        yield f"coordinator {coordinator}, {_title(halt)}: {_said(answer)}", now
            if coordinator != self.root and (halt.at != "end" or halt.code == 75):
                again = pay(self._with(state, place, self.root), EVILS, "crash")
                if again is not None:
                    yield f"coordinator {coordinator} is killed and started again", again
        yield from self._work(state)
        tasks = state.logs[1]
        again = pay(state, EVILS, "retry")
        if again is not None and tasks:
            record = {"format": 1, "floors": [[1, 0, 1]]}
            entry = (f"retries/{len(tasks) + 1:06d}.json", json.dumps(record).encode())
            yield "a person retries", again._replace(logs=(state.logs[0], (*tasks, entry)))

    def _with(self, state: State, place: int, coordinator: int) -> State:
        others = state.coordinators[:place] + state.coordinators[place + 1 :]
        return state._replace(coordinators=tuple(sorted((*others, coordinator))))

    def _answers(
        self, state: State, coordinator: int, halt: Halt
    ) -> Iterator[tuple[Answer, str, Logs]]:
        """Each (answer, evil of it, logs after it)."""
        if halt.at == "sleep":
            yield Answer("woke"), "", state.logs
        elif halt.at == "results":
            for some in _some(sorted(self.unseen(state.results, halt))):
                yield Answer("results", results=some), "", state.logs
        elif halt.at == "log":
            yield Answer("still" if halt.excuse == "late" else "miss"), "", state.logs
            for answer, evil in self._shown(state.logs, halt, "entry"):
                yield answer, evil, state.logs
        elif halt.at == "create":
            taken = list(self._shown(state.logs, halt, "taken"))
            for answer, evil in taken:
                yield answer, evil, state.logs
            if not taken:
                logs = self.created(state.logs, halt)
                yield Answer("won"), "", logs
                yield Answer("repeated"), "lost", logs
                yield Answer("lost"), "lost", logs

    @staticmethod
    def _shown(logs: Logs, halt: Halt, what: str) -> Iterator[tuple[Answer, str]]:
        log = logs[STAGES.index(halt.stage)]
        if halt.entry <= len(log):
            target, data = log[halt.entry - 1]
            yield Answer(what, target, data), ""
            if data and halt.excuse != "late":
                yield Answer(what, target, None), "late"

    @staticmethod
    def unseen(results: frozenset[Result], halt: Halt) -> set[Result]:
        """Results that a coordinator did not see."""
        return set(results.difference(halt.seen))

    @staticmethod
    def created(logs: Logs, halt: Halt) -> Logs:
        """The logs once a coordinator created the entry that it is about to create."""
        at = STAGES.index(halt.stage)
        assert len(logs[at]) == halt.entry - 1, "R2: a gap in the log"
        kind, slash, _ = halt.target.partition("/")
        target = f"{kind}/{halt.entry:06d}.jsonl" if slash else kind
        grown = (*logs[at], (target, halt.data))
        return (*logs[:at], grown, *logs[at + 1 :])

    # Workers.

    def items(self, stage: str, entry: int, data: bytes) -> list[tuple[str, int]]:
        """(unit, position) of each item of a segment."""
        key = (stage, entry, data)
        if key not in self._items:
            units = json.loads(data.partition(b"\n")[0])["units"]
            self._items[key] = [
                (f"{entry:06d}-{first}", item)
                for first, count, *_ in units
                for item in range(first, first + count)
            ]
        return self._items[key]

    def undone(self, state: State) -> list[Result]:
        """A result of the first generation for every item that has none at all."""
        found = {result[:3] for result in state.results}
        return [
            Result(stage, entry, item, 1, unit)
            for stage, log in zip(STAGES, state.logs, strict=True)
            for entry, (target, data) in enumerate(log, 1)
            if target.startswith("items/")
            for unit, item in self.items(stage, entry, data)
            if (stage, entry, item) not in found
        ]

    def _work(self, state: State) -> Iterator[tuple[str, State]]:
        undone = self.undone(state)
        metrics = {result for result in undone if result.stage == METRICS}
        if metrics:
            yield "the metrics are done", state._replace(results=state.results | metrics)
        for result in undone:
            if result.stage == TASKS:
                yield from self._do(state, result, "")
                yield from self._do(state, result._replace(generation=2), "twice")
        for result in state.results:
            if result.stage == TASKS:
                other = 3 - result.generation
                yield from self._do(
                    state, result._replace(generation=other), "twice" if other == 2 else ""
                )

    def _do(self, state: State, result: Result, evil: str) -> Iterator[tuple[str, State]]:
        after = pay(state, EVILS, evil)
        if after is not None and result not in state.results:
            what = f"item {result.entry}-{result.item} is done in generation {result.generation}"
            yield what, after._replace(results=state.results | {result})


def _some(news: list[Result]) -> Iterator[tuple[Result, ...]]:
    """Each part of what is new; the metrics at once, because nothing rests on their order."""
    metrics = tuple(result for result in news if result.stage == METRICS)
    tasks = [result for result in news if result.stage == TASKS]
    for count in range(len(tasks) + 1):
        for some in combinations(tasks, count):
            for more in [(), metrics] if metrics else [()]:
                yield (*more, *some)


def _title(halt: Halt) -> str:
    return f"at {halt.at} {halt.stage}/{halt.entry}" if halt.entry else f"at {halt.at}"


def _said(answer: Answer) -> str:
    late = " without its payload" if answer.data is None else ""
    seen = [f"{one.entry}-{one.item}.{one.generation}" for one in answer.results]
    return " ".join([answer.what + late, answer.target, *seen]).strip()


class Checks:
    """What R14 says of each state."""

    def __init__(self, model: Coordinators) -> None:
        self._model = model
        self._arms = make_arms(model.campaign)
        self._asks: dict[tuple[Entry, ...], list[str]] = {}
        self._local: set[int] = set()
        self._rescued: set[tuple[Logs, frozenset[Result]]] = set()

    def asks(self, log: tuple[Entry, ...]) -> list[str]:
        """The arms that a log asks, checked against the tells before them."""
        if log not in self._asks:
            self._asks[log] = self._checked(log)
        return self._asks[log]

    def _checked(self, log: tuple[Entry, ...]) -> list[str]:
        campaign, search = self._model.campaign, self._model.campaign.search
        tasks = TaskSet(campaign.tasks.names)
        policy = made_policy(search.policy, self._arms, campaign.seed, tasks=tasks)
        asked: list[str] = []
        told: list[str] = []
        decisions = decisions_in([data for target, data in log if target.startswith("items/")])
        for number, decision in enumerate(decisions, 1):
            new = [tell["arm"] for tell in decision["tells"]]
            told += new
            assert told == asked[: len(told)], f"R14: {told} is told where {asked} was asked"
            for tell in decision["tells"]:
                policy.tell(Observation.from_json(tell))
            if decision["why"] == SEARCH:
                early = search.asks == ROUNDS and told != asked
                assert not early, f"R14: ask {number} comes before the end of a round"
                count = len(decision["arms"])
                pending = [Pull(arm) for arm in asked[len(told) :]]
                again = [one.arm for one in policy.ask(count, pending=pending)]
                assert decision["arms"] == again, (
                    f"R14: ask {number} is {decision['arms']}, its tells say {again}"
                )
            assert not set(decision["arms"]) & set(asked), f"R14: {decision['arms']} asked twice"
            assert decision["number"] == number, f"R14: ask {number} is called another"
            asked += decision["arms"]
            waiting = len(asked) - len(told)
            assert waiting <= search.most_pending or decision["why"] != SEARCH, "R14: too many asks"
        searched = [arm for one in decisions if one["why"] == SEARCH for arm in one["arms"]]
        assert len(searched) <= self._model.world.budget, "R14: more asks than the budget"
        return asked

    def state(self, state: State) -> None:
        """What holds in one state."""
        asked = self.asks(state.logs[1])
        for coordinator in state.coordinators:
            halt = self._model.halts[coordinator]
            if coordinator not in self._local:
                self._local.add(coordinator)
                self._coordinator(coordinator, halt)
            mine = list(halt.asked)
            assert mine == asked[: len(mine)], f"R14: one goes on from {mine}, the log has {asked}"
            if halt.at == "end" and halt.code == 0:
                assert self._whole(state.logs[1]), "R14: one ends with 0 and asks are missing"
        key = (state.logs, state.results)
        if key not in self._rescued:
            self._rescued.add(key)
            self._rescue(state, asked)

    def step(self, before: State, after: State) -> None:
        """What holds between two states."""
        grown = zip(before.logs, after.logs, strict=True)
        assert all(old == new[: len(old)] for old, new in grown), "R13: an entry is gone"

    def leaf(self, state: State) -> bool:
        """Where nothing can happen any more; whether the campaign was whole there."""
        for coordinator in state.coordinators:
            assert self._model.halts[coordinator].at == "end", "R14: a coordinator waits for ever"
        return self._whole(state.logs[1])

    def _whole(self, log: tuple[Entry, ...]) -> bool:
        kinds = [target.partition("/")[0] for target, _ in log]
        wanted = len(self._arms.ids) if self._model.world.exhaustive else self._model.world.budget
        return SEALED in kinds and "results" in kinds and len(self.asks(log)) == wanted

    def _coordinator(self, coordinator: int, halt: Halt) -> None:
        """What holds of one coordinator, whatever the others do."""
        rival = halt.met > halt.mine
        if halt.at == "end" and halt.code == 0:
            assert not rival, "R14: one ends with 0 that met a rival's ask"
        elif halt.at == "end":
            assert halt.code == 75, f"R14: a coordinator ends with {halt.code}: {halt.error}"
            excused = bool(halt.excuse)
            assert rival or excused, f"R14: a coordinator ends and met no rival: {halt.error}"
        if halt.at == "create" and halt.stage == TASKS and halt.target.startswith("items/"):
            assert not rival, "R14: one asks on that met a rival's ask"
            self._tells_are_seen(halt)

    def _tells_are_seen(self, halt: Halt) -> None:
        """What it is about to write as told is what it read of the results."""
        best: dict[tuple[int, int], int] = {}
        for result in halt.seen:
            at = (result.entry, result.item)
            best[at] = min(result.generation, best.get(at, result.generation))
        scores: dict[str, dict[str, float]] = {}
        for entry, data in halt.segments:
            for position, line in enumerate(data.splitlines()[1:]):
                item = json.loads(line)
                if (entry, position) in best:
                    arm = f"{item['checkpoint']}/layer{item['layer']}"
                    score = SCORES[best[entry, position]]
                    scores.setdefault(arm, {})[item["task"]] = score
        for decision in decisions_in([halt.data]):
            for tell in decision["tells"]:
                seen = scores.get(tell["arm"], {})
                assert tell["scores"] == seen, f"R14: told {tell['scores']}, and {seen} was read"
                assert len(seen) == self._model.world.tasks, "R14: told before all is back"

    def _rescue(self, state: State, asked: list[str]) -> None:
        """A coordinator that is started now, alone, gives each ask again and makes those left."""
        model, coordinator, way = self._model, self._model.root, []
        for _ in range(ENDLESS):
            halt = model.halts[coordinator]
            if halt.at == "end":
                break
            if halt.at == "sleep":
                state = state._replace(results=state.results | set(model.undone(state)))
            coordinator, state = self._on(state, coordinator, halt)
            way.append(_title(halt))
        halt = model.halts[coordinator]
        told = f"{halt.code} {halt.error}\n  " + "\n  ".join(way[-20:])
        assert halt.at == "end", f"R14: a new coordinator waits for ever: {told}"
        assert halt.code == 0, f"R14: a new coordinator ends with {told}"
        assert self._whole(state.logs[1]), "R14: a new coordinator leaves asks undone"
        after = self.asks(state.logs[1])
        assert after[: len(asked)] == asked, f"R14: a new coordinator makes {after} of {asked}"

    def _on(self, state: State, coordinator: int, halt: Halt) -> tuple[int, State]:
        """Answer it with what there is."""
        model = self._model
        log = state.logs[STAGES.index(halt.stage)] if halt.stage else ()
        there = halt.stage and halt.entry <= len(log)
        if halt.at == "sleep":
            answer = Answer("woke")
        elif halt.at == "results":
            news = sorted(model.unseen(state.results, halt))
            answer = Answer("results", results=tuple(news))
        elif there:
            answer = Answer("entry" if halt.at == "log" else "taken", *log[halt.entry - 1])
        elif halt.at == "log":
            answer = Answer("miss")
        else:
            answer = Answer("won")
            state = state._replace(logs=model.created(state.logs, halt))
        return model.after(coordinator, answer), state
