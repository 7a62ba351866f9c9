"""Every interleaving of a few processes on stages that follow others: rule R17."""

from __future__ import annotations

from hpc_toolkit.queue.following import Following
from hpc_toolkit.queue.graph import FollowingItems
from tests.model.following import PAIR, FollowingChecker, FollowingModel, World
from tests.model.memorydisk import memory_instead_of_files
from tests.model.search import Found, Mistake, explore, made, mistakes, worlds
from tests.toyrun import spec_of

THREE = (*PAIR, spec_of("summary", after=("evaluate",), by=(), max_attempts=1))
ALONE = (spec_of("items", after=("items",), max_attempts=1),)

TWO = World(items=2)
SMALL = {
    "one item": World(),
    "an item fails and is retried": World(evils={"fail": 1, "retry": 1}),
    "an item runs twice": World(evils={"again": 1}),
    "a reply is lost": World(evils={"lost": 1}),
    "a power loss takes a result": World(evils={"cut": 1}),
    "a power loss takes a failure": World(evils={"fail": 1, "cut": 1}),
    "a summary": World(stages=THREE),
    "a chain of items": World(stages=ALONE, edges=((), (0,), (1,))),
    "a join of items": World(stages=ALONE, edges=((), (), (0, 1))),
    "an item of a list fails": World(stages=ALONE, edges=((), (0,)), evils={"fail": 1, "retry": 1}),
    "a power loss takes a result of a list": World(
        stages=ALONE, edges=((), (0,)), evils={"cut": 1}
    ),
}

LARGE = {
    "two items": TWO,
    "a failure, a power loss and a retry": World(evils={"fail": 1, "cut": 1, "retry": 1}),
    "an item runs twice, and a reply is lost": World(evils={"again": 1, "lost": 1}),
    "three processes": World(workers=3),
    "a summary after a failure": World(stages=THREE, evils={"fail": 1, "retry": 1}),
    "a summary after a power loss": World(stages=THREE, evils={"again": 1, "cut": 1}),
    "a diamond": World(stages=ALONE, edges=((), (0,), (0,), (1, 2))),
    "a join after a power loss": World(
        stages=ALONE, edges=((), (), (0, 1)), evils={"again": 1, "cut": 1}
    ),
}


def search(world: World) -> Found:
    with memory_instead_of_files():
        model = FollowingModel(world)
        return explore(model, FollowingChecker(model))


@worlds(SMALL | LARGE, LARGE)
def test_r17_holds_in_every_state_of_a_world(world: World) -> None:
    search(world).check(1_000 if world in LARGE.values() else 20)


FAILED, LIST = SMALL["an item fails and is retried"], SMALL["a join of items"]
MISTAKES = [
    Mistake(
        "of several new segments one is looked at",
        "R17: evaluate has two items of one origin",
        TWO,
        Following,
        "if entry > self._taken:",
        "if entry == self._taken + 1:",
    ),
    Mistake(
        "the first segment is not looked at",
        "R17: items has two items of one origin",
        LIST,
        FollowingItems,
        "range(self._taken + 1, log.length + 1)",
        "range(self._taken or 2, log.length + 1)",
    ),
    Mistake(
        "a stage is over when the stages before are sealed",
        "R17: sealed, and an item before is pending",
        TWO,
        Following,
        "all(stage.complete for stage in self._before)",
        "all(stage.log.sealed for stage in self._before)",
    ),
    Mistake(
        "a list is over when nothing can be added",
        "R17: sealed, and an item before is pending",
        LIST,
        FollowingItems,
        "return not self._free and not self._stage.state.open",
        "return not self._free",
    ),
    Mistake(
        "an item follows one that failed",
        "ends train 1/0: failed",
        FAILED,
        Following,
        "and stage.state.item_state(state, position) is ItemState.DONE",
        "and stage.state.item_state(state, position) is not ItemState.PENDING",
    ),
    Mistake(
        "a seal is the end also after a retry",
        "R17: ",
        FAILED,
        Following,
        "added |= log.add_segment(body, revived=True, again=left)",
        "added |= log.add_segment(body, again=left)",
    ),
    Mistake(
        "an item follows the first of those before it",
        "R17: .* lacks results",
        LIST,
        FollowingItems,
        "for one in self.graph.edges.of(origin):",
        "for one in self.graph.edges.of(origin)[:1]:",
    ),
    Mistake(
        "a stage is always over",
        "R17: sealed",
        SMALL["a summary"],
        Following,
        "return before and next(self._ready(), None) is None",
        "return True",
    ),
]


@mistakes(MISTAKES)
def test_the_search_finds_a_mistake_in_what_follows(mistake: Mistake) -> None:
    with made(mistake):
        search(mistake.world)
