"""Every interleaving of a few processes on stages that follow others: rule R17."""

from __future__ import annotations

import pytest

from hpc_toolkit.queue.following import Following
from hpc_toolkit.queue.followingitems import FollowingItems
from tests.model.following import PAIR, FollowingChecker, FollowingModel, World
from tests.model.memorydisk import memory_instead_of_files
from tests.model.mutation import Mistake, made
from tests.model.search import Found, ViolationError, explore
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


@pytest.mark.parametrize("name", SMALL)
def test_r17_holds_in_every_state_of_a_small_world(name: str) -> None:
    found = search(SMALL[name])
    print(f"{name}: {found.states} states, {found.steps} steps, {found.leaves} ends")
    assert found.leaves
    assert found.states > 20


@pytest.mark.soak
@pytest.mark.parametrize("name", LARGE)
def test_r17_holds_in_every_state_of_a_larger_world(name: str) -> None:
    found = search(LARGE[name])
    print(f"{name}: {found.states} states, {found.steps} steps, {found.leaves} ends")
    assert found.states > 1_000


FAILED, LIST = SMALL["an item fails and is retried"], SMALL["a join of items"]
MISTAKES = [
    (
        "R17: evaluate has two items of one origin",
        TWO,
        Mistake(
            "of several new segments one is looked at",
            Following,
            "if entry > self._taken:",
            "if entry == self._taken + 1:",
        ),
    ),
    (
        "R17: items has two items of one origin",
        LIST,
        Mistake(
            "the first segment is not looked at",
            FollowingItems,
            "range(self._taken + 1, log.length + 1)",
            "range(self._taken or 2, log.length + 1)",
        ),
    ),
    (
        "R17: sealed, and an item before is pending",
        TWO,
        Mistake(
            "a stage is over when the stages before are sealed",
            Following,
            "all(stage.complete for stage in self._before)",
            "all(stage.log.sealed for stage in self._before)",
        ),
    ),
    (
        "R17: sealed, and an item before is pending",
        LIST,
        Mistake(
            "a list is over when nothing can be added",
            FollowingItems,
            "return not self._free and not self._stage.state.open",
            "return not self._free",
        ),
    ),
    (
        "ends train 1/0: failed",
        FAILED,
        Mistake(
            "an item follows one that failed",
            Following,
            "and stage.state.item_state(state, position) is ItemState.DONE",
            "and stage.state.item_state(state, position) is not ItemState.PENDING",
        ),
    ),
    (
        "R17: ",
        FAILED,
        Mistake(
            "a seal is the end also after a retry",
            Following,
            "added |= log.add_segment(body, revived=True, again=left)",
            "added |= log.add_segment(body, again=left)",
        ),
    ),
    (
        "R17: .* lacks results",
        LIST,
        Mistake(
            "an item follows the first of those before it",
            FollowingItems,
            "for one in self.graph.edges.of(origin):",
            "for one in self.graph.edges.of(origin)[:1]:",
        ),
    ),
    (
        "R17: sealed",
        SMALL["a summary"],
        Mistake(
            "a stage is always over",
            Following,
            "return before and next(self._ready(), None) is None",
            "return True",
        ),
    ),
]


@pytest.mark.parametrize(
    ("says", "world", "mistake"), [pytest.param(*one, id=one[2].what) for one in MISTAKES]
)
def test_the_search_finds_a_mistake_in_what_follows(
    says: str, world: World, mistake: Mistake
) -> None:
    with made(mistake), pytest.raises(ViolationError, match=says):
        search(world)
