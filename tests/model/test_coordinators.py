"""Every interleaving of a few coordinators of one campaign (rule R14), through the real decisions.

However their questions to the files interleave, whoever is frozen, killed or answered late, each
ask is made once, every coordinator that is started makes the same ones, and who meets a rival's ask
makes none.
"""

from __future__ import annotations

import pytest

from hpc_toolkit.campaign.coordinator import Coordinator
from hpc_toolkit.campaign.decisions import Decisions
from hpc_toolkit.campaign.search import CampaignSearch
from hpc_toolkit.campaign.tables import ROUNDS
from hpc_toolkit.rundir import files
from tests.model.coordinating import coordinators_at_hand
from tests.model.coordinators import Checks, Coordinators, World
from tests.model.memorydisk import memory_instead_of_files
from tests.model.mutation import Mistake, made, slow
from tests.model.search import Found, ViolationError, explore

SMALL = {
    "two coordinators": World(),
    "two asks wait at once": World(pending=2),
    "three coordinators": World(coordinators=3, budget=1),
    "a coordinator is killed and started again": World(budget=1, evils={"crash": 2}),
    "a reply to an ask is lost": World(budget=1, evils={"lost": 1, "crash": 1}),
    "an ask is seen before its payload": World(budget=1, evils={"late": 1}),
    "a retry is in the way": World(budget=1, evils={"retry": 1}),
    "an item has two results": World(coordinators=1, budget=1, evils={"twice": 1, "crash": 1}),
    "all other arms follow": World(
        checkpoints=1, coordinators=1, budget=1, exhaustive=True, evils={"crash": 1}
    ),
    "no other arm is left": World(
        checkpoints=1, coordinators=1, exhaustive=True, evils={"crash": 1}
    ),
    "rounds of two": World(coordinators=1, pending=2, budget=3, asks=ROUNDS, evils={"crash": 1}),
    "two coordinators in rounds": World(pending=2, asks=ROUNDS),
}

LONG = (
    "rounds of two",
    "a restart takes the results and not what was told",
    "a table without its journals is a result",
    "results of a search that another has ended are looked for",
)
"""Small worlds and mistakes that take several seconds, and differ little from others."""

LARGE = {
    "two coordinators, killed twice": World(evils={"crash": 2}),
    "two coordinators and two results, one killed": World(evils={"twice": 1, "crash": 1}),
    "two coordinators, a retry, a lost reply, a late payload": World(
        evils={"lost": 1, "late": 1, "retry": 1}
    ),
    "two coordinators, each ask of two items": World(tasks=2),
    "two coordinators from the first metrics on": World(known=False, budget=1),
    "two coordinators and all other arms": World(budget=1, exhaustive=True),
    "two coordinators, three asks, two at once": World(policy="gp-ucb", budget=3, pending=2),
    "two coordinators, three asks, one after the other": World(policy="gp-ucb", budget=3),
    "three coordinators, two asks": World(coordinators=3),
    "two coordinators, rounds of two, then what is left": World(
        policy="gp-ucb", budget=3, pending=2, asks=ROUNDS, exhaustive=True
    ),
    "three coordinators, one killed": World(
        coordinators=3, budget=1, evils={"crash": 1, "lost": 1}
    ),
}


def visit(world: World, *, limit: int = 10_000_000) -> Found:
    with memory_instead_of_files(), coordinators_at_hand():
        model = Coordinators(world)
        return explore(model, Checks(model), limit=limit)


def check(world: World, name: str) -> int:
    found = visit(world)
    print(
        f"{name}: {found.states} states, {found.steps} steps, {found.leaves} ends, "
        f"{found.complete} of them complete, {found.seconds:.1f} s"
    )
    assert found.complete > 0
    return found.states


@pytest.mark.parametrize("name", [slow(name, name in LONG) for name in SMALL])
def test_r14_in_every_state_of_a_small_campaign_each_ask_is_made_once(name: str) -> None:
    assert check(SMALL[name], name) > 20


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LARGE)
def test_r14_in_every_state_of_a_larger_campaign_each_ask_is_made_once(name: str) -> None:
    assert check(LARGE[name], name) > 3_000


TWO = SMALL["two coordinators"]
AGAIN = World(coordinators=1, evils={"twice": 1, "crash": 1})
FROM_RESULTS = """self._follower.look(self._stage, [])
        for tell in decision.tells:
            rows = [
                row
                for entry in self._stage.log.segments
                for names in [set(self._stage.state.units)]
                for _, row in unit_rows(self._view, self._stage, entry, names)
                if arm_of(row["item"]) == tell.arm
            ]
            self._search.tell([observe(tell.arm, rows)] if rows else [tell])"""
MISTAKES = [
    (
        "asked twice|is called another|rival's ask",
        TWO,
        Mistake(
            "who loses the race asks again",
            Coordinator,
            "            break\n        self._refuse_rival()",
            "            break",
        ),
    ),
    (
        "rival's ask",
        TWO,
        Mistake(
            "an ask that was read while waiting is no rival's",
            Coordinator,
            "> self._search.decisions.entries:",
            "> self._stage.log.length:",
        ),
    ),
    (
        "neither scores",
        TWO,
        Mistake(
            "a table without its journals is a result",
            Coordinator,
            "    self._refuse_rival()\n    if self._stage.log.sealed:\n        return None\n",
            "",
        ),
    ),
    (
        "neither scores",
        TWO,
        Mistake(
            "results of a search that another has ended are looked for",
            Coordinator,
            "if self._stage.log.sealed:\n        return None",
            "if False:\n        return None",
        ),
    ),
    (
        "comes before the end of a round",
        SMALL["rounds of two"],
        Mistake(
            "a round begins when the last one's oldest arm is told",
            CampaignSearch,
            "if self._together:\n        return waiting",
            "if self._together:\n        return waiting[:1]",
        ),
    ),
    (
        "is told where",
        World(coordinators=1, budget=3),
        Mistake(
            "a tell is taken twice",
            Decisions,
            "return self.asked[len(self.told) :]",
            "return self.asked[max(0, len(self.told) - 1) :]",
        ),
    ),
    (
        "its tells say",
        AGAIN,
        Mistake(
            "an ask is decided before its tells are taken in",
            CampaignSearch,
            "self.tell(found)\n        waiting = self.decisions.waiting",
            "early = self._pulls(bandit.ask_within(self._policy, 1, self.decisions.waiting))\n"
            "        self.tell(found)\n"
            "        waiting = self.decisions.waiting\n"
            "        if early:\n"
            "            return early",
        ),
    ),
    (
        "too many asks",
        World(coordinators=1),
        Mistake(
            "tells are not written", Coordinator, "tells=tuple(self._search.fresh),", "tells=(),"
        ),
    ),
    (
        "its tells say|met a rival's ask",
        AGAIN,
        Mistake(
            "a restart takes the results and not what was told",
            Coordinator,
            "self._search.tell(decision.tells)",
            FROM_RESULTS,
        ),
    ),
    (
        "told before all|neither scores",
        World(coordinators=1, tasks=2),
        Mistake(
            "an arm is told once one of its items is back",
            Coordinator,
            "stage.state.open.isdisjoint(units)",
            "not stage.state.open.issuperset(units)",
        ),
    ),
    (
        "is told where|is called another",
        World(coordinators=1, pending=2, budget=3),
        Mistake(
            "whoever is back first is told",
            CampaignSearch,
            "return waiting[:1] if len(waiting) >= self._search.most_pending else []",
            "return waiting[-1:] if len(waiting) >= self._search.most_pending else []",
        ),
    ),
    (
        "met no rival",
        SMALL["a reply to an ask is lost"],
        Mistake(
            "who is told that a name exists did not create it",
            files,
            "with contextlib.suppress(FileNotFoundError):\n                return read_name(path)",
            'return ""',
        ),
    ),
    (
        "rival's ask|asked twice|goes on from",
        TWO,
        Mistake(
            "a name that exists is ours",
            files,
            "with contextlib.suppress(FileNotFoundError):\n                return read_name(path)",
            "return target",
        ),
    ),
]


@pytest.mark.parametrize(
    ("says", "world", "mistake"), [slow(one[2].what, one[2].what in LONG, *one) for one in MISTAKES]
)
def test_the_search_finds_a_mistake(says: str, world: World, mistake: Mistake) -> None:
    with made(mistake), pytest.raises(ViolationError, match=says):
        visit(world, limit=50_000)
