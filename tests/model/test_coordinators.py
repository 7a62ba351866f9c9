"""Every interleaving of a few coordinators of one campaign (rule R14), through the real decisions.

However their questions to the files interleave, whoever is frozen, killed or answered late, each
ask is made once, every coordinator that is started makes the same ones, and who meets a rival's ask
makes none.
"""

from __future__ import annotations

from hpc_toolkit.campaign.coordinator import Coordinator
from hpc_toolkit.campaign.decisions import Decisions
from hpc_toolkit.campaign.search import CampaignSearch
from hpc_toolkit.campaign.tables import ROUNDS
from hpc_toolkit.rundir import files
from tests.model.coordinating import coordinators_at_hand
from tests.model.coordinators import Checks, Coordinators, World
from tests.model.memorydisk import memory_instead_of_files
from tests.model.search import Found, Mistake, explore, made, mistakes, worlds

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


@worlds(SMALL | LARGE, {*LONG, *LARGE})
def test_r14_in_every_state_of_a_campaign_each_ask_is_made_once(world: World) -> None:
    visit(world).check(3_000 if world in LARGE.values() else 20)


TWO = SMALL["two coordinators"]
AGAIN = World(coordinators=1, evils={"twice": 1, "crash": 1})
FROM_RESULTS = """self._follower.look(self._stage, [])
        for tell in decision.tells:
            rows = [
                row
                for state in self._stage.state.units.values()
                for _, row in rows_of_unit(self._view, self._stage, state)
                if arm_of(row["item"]) == tell.arm
            ]
            self._search.tell([observe(tell.arm, rows)] if rows else [tell])"""
MISTAKES = [
    Mistake(
        "who loses the race asks again",
        "asked twice|is called another|rival's ask",
        TWO,
        Coordinator,
        "            break\n        self._refuse_rival()",
        "            break",
    ),
    Mistake(
        "an ask that was read while waiting is no rival's",
        "rival's ask",
        TWO,
        Coordinator,
        "> self._search.decisions.entries:",
        "> self._stage.log.length:",
    ),
    Mistake(
        "a table without its journals is a result",
        "neither scores",
        TWO,
        Coordinator,
        "    self._refuse_rival()\n    if self._stage.log.sealed:\n        return None\n",
        "",
    ),
    Mistake(
        "results of a search that another has ended are looked for",
        "neither scores",
        TWO,
        Coordinator,
        "if self._stage.log.sealed:\n        return None",
        "if False:\n        return None",
    ),
    Mistake(
        "a round begins when the last one's oldest arm is told",
        "comes before the end of a round",
        SMALL["rounds of two"],
        CampaignSearch,
        "if self._together:\n        return waiting",
        "if self._together:\n        return waiting[:1]",
    ),
    Mistake(
        "a tell is taken twice",
        "is told where",
        World(coordinators=1, budget=3),
        Decisions,
        "return self.asked[len(self.told) :]",
        "return self.asked[max(0, len(self.told) - 1) :]",
    ),
    Mistake(
        "an ask is decided before its tells are taken in",
        "its tells say",
        AGAIN,
        CampaignSearch,
        "self.tell(found)\n        waiting = self.decisions.waiting",
        "early = self._pulls(bandit.ask_within(self._policy, 1, self.decisions.waiting))\n"
        "        self.tell(found)\n"
        "        waiting = self.decisions.waiting\n"
        "        if early:\n"
        "            return early",
    ),
    Mistake(
        "tells are not written",
        "too many asks",
        World(coordinators=1),
        Coordinator,
        "tells=tuple(self._search.fresh),",
        "tells=(),",
    ),
    Mistake(
        "a restart takes the results and not what was told",
        "its tells say|met a rival's ask",
        AGAIN,
        Coordinator,
        "self._search.tell(decision.tells)",
        FROM_RESULTS,
    ),
    Mistake(
        "an arm is told once one of its items is back",
        "told before all|neither scores",
        World(coordinators=1, tasks=2),
        Coordinator,
        "stage.state.open.isdisjoint(units)",
        "not stage.state.open.issuperset(units)",
    ),
    Mistake(
        "whoever is back first is told",
        "is told where|is called another",
        World(coordinators=1, pending=2, budget=3),
        CampaignSearch,
        "return waiting[:1] if len(waiting) >= self._search.most_pending else []",
        "return waiting[-1:] if len(waiting) >= self._search.most_pending else []",
    ),
    Mistake(
        "who is told that a name exists did not create it",
        "met no rival",
        SMALL["a reply to an ask is lost"],
        files,
        "with contextlib.suppress(FileNotFoundError):\n                return read_name(path)",
        'return ""',
    ),
    Mistake(
        "a name that exists is ours",
        "rival's ask|asked twice|goes on from",
        TWO,
        files,
        "with contextlib.suppress(FileNotFoundError):\n                return read_name(path)",
        "return target",
    ),
]


@mistakes(MISTAKES, LONG)
def test_the_search_finds_a_mistake(mistake: Mistake) -> None:
    with made(mistake):
        visit(mistake.world, limit=50_000)
