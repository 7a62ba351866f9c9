"""Every interleaving of a few workers on a few items, through the real decisions.

Each configuration is a small world in which some evils may happen; the search visits all of its
states and checks the invariants in each, and that what is left completes at every end.
"""

from __future__ import annotations

from dataclasses import replace

from hpc_toolkit.queue import state
from hpc_toolkit.queue.assignment import Picker
from hpc_toolkit.queue.control import SILENT_NODE, ControlReader
from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.state import History, StageState
from hpc_toolkit.queue.units import Claims
from hpc_toolkit.queue.view import StageView
from hpc_toolkit.results import gather
from hpc_toolkit.rundir import files
from hpc_toolkit.worker import unitlines
from tests.model.search import Mistake, made, mistakes, search, worlds
from tests.model.values import Config

JOURNALS = frozenset({"journals"})
NOTHING = frozenset[str]()
FAILING = ("done", "failed")

SMALL = {
    "a worker is killed": Config(evils={"crash": 2}),
    "one that lives is held for dead": Config(evils={"crash": 1, "false": 1}),
    "an item fails": Config(kinds=FAILING, evils={"error": 2}),
    "a failure is permanent": Config(
        kinds=("done", "permanent"),
        evils={"error": 1},
        people=(("gather", "retry"),),
        stale=JOURNALS,
    ),
    "an item runs out of memory": Config(
        kinds=("done", "failed", "short"),
        steps=1,
        max_attempts=1,
        evils={"error": 3, "crash": 1},
        stale=JOURNALS,
    ),
    "workers spare a filesystem that others share": Config(
        shared=True, kinds=FAILING, evils={"crash": 1, "error": 1}
    ),
    "an executor dies": Config(evils={"die": 2, "crash": 1}),
    "an item kills every executor": Config(kinds=(), evils={"die": 5}, stale=NOTHING),
    "a reply is lost": Config(evils={"lost": 1, "crash": 1}),
    "a reply is lost on a filesystem that others share": Config(
        shared=True, evils={"lost": 1, "crash": 1}
    ),
    "a reply to a further claim is lost": Config(units=(1, 1), evils={"lost": 1}, stale=NOTHING),
    "a worker is drained": Config(
        evils={"abort": 1, "crash": 1}, people=(("drain-0",),), stale=frozenset({"control"})
    ),
    "items are added while others seal": Config(
        workers=1, sealed=False, evils={"lost": 1}, people=(("add",), ("seal",))
    ),
    "two gather and one retries": Config(
        workers=1,
        max_attempts=1,
        kinds=FAILING,
        evils={"error": 1},
        people=(("gather", "gather"), ("retry", "gather")),
        stale=JOURNALS,
    ),
    "two units": Config(units=(1, 1), evils={"crash": 1}),
    "locks show deaths": Config(evils={"crash": 1, "false": 1}, stale=NOTHING, deaths_by="lock"),
    "Slurm tells of deaths": Config(
        evils={"crash": 1},
        people=(("rumour", "slurm"),),
        stale=frozenset({"control"}),
        deaths_by="slurm",
    ),
    "a node is silent": Config(
        units=(2,),
        evils={"crash": 1},
        people=(("slurm",),),
        stale=NOTHING,
        deaths_by="slurm",
        explained=SILENT_NODE,
    ),
}

LONG = ("an executor dies", "two units", "a table after a retry changes rows that stood")
"""Small worlds and mistakes that take several seconds, and differ little from others."""

LARGE = {
    "a permanent failure and old files": Config(
        kinds=("done", "permanent"), evils={"error": 1}, people=(("gather", "retry"),)
    ),
    "a shared filesystem and false verdicts": Config(
        shared=True, kinds=FAILING, evils={"error": 1, "false": 1, "crash": 1}
    ),
    "a shared filesystem and a retry": Config(
        shared=True,
        max_attempts=1,
        kinds=FAILING,
        evils={"error": 1},
        people=(("retry", "gather"),),
        stale=frozenset({"journals", "log", "head"}),
    ),
    "errors and false verdicts": Config(kinds=FAILING, evils={"error": 2, "false": 1, "crash": 1}),
    "a late line and a table": Config(
        kinds=FAILING,
        max_attempts=1,
        evils={"error": 1, "false": 1},
        people=(("gather", "retry", "gather"),),
        stale=JOURNALS,
    ),
    "three workers": Config(workers=3, evils={"false": 1}, stale=frozenset({"claims"})),
    "a killer whose deaths are seen late": Config(kinds=(), evils={"die": 10}),
    "two items and their killer": Config(units=(2,), evils={"die": 6}, stale=NOTHING),
    "two units, one false verdict": Config(
        units=(1, 1), evils={"crash": 1, "false": 1}, stale=JOURNALS
    ),
    "a drain within a unit": Config(
        units=(2,), evils={"abort": 1, "crash": 1}, people=(("drain-0",),)
    ),
    "lost replies everywhere": Config(
        evils={"lost": 2, "crash": 1},
        people=(("gather",),),
        stale=frozenset({"claims", "journals"}),
    ),
    "locks, errors and false verdicts": Config(
        kinds=FAILING,
        evils={"error": 1, "false": 1, "crash": 1},
        deaths_by="lock",
    ),
    "Slurm tells of deaths within a unit": Config(
        units=(2,),
        evils={"crash": 1, "die": 1},
        people=(("slurm",),),
        stale=frozenset({"control"}),
        deaths_by="slurm",
    ),
    "add, seal and work": Config(
        sealed=False, evils={"lost": 1}, people=(("add", "seal"),), stale=frozenset({"log"})
    ),
}


@worlds(SMALL | LARGE, {*LONG, *LARGE})
def test_every_state_of_a_world_keeps_the_invariants(world: Config) -> None:
    search(world).check(5_000 if world in LARGE.values() else 20)


RETRIED = Config(
    max_attempts=1,
    kinds=FAILING,
    evils={"error": 1, "false": 1},
    people=(("gather", "retry", "gather"),),
    stale=NOTHING,
)
MISTAKES = [
    Mistake(
        "only the newest generation's results count",
        "I2: the winner",
        RETRIED,
        StageState,
        "history.done = ref if history.done is None else min(history.done, ref)",
        "history.done = ref if ref.generation >= max(state.released, default=0) else None",
    ),
    Mistake(
        "the highest generation wins",
        "I2: the winner",
        SMALL["one that lives is held for dead"],
        StageState,
        "min(history.done, ref)",
        "max(history.done, ref)",
    ),
    Mistake(
        "a table after a retry changes rows that stood",
        "I2: the winner",
        replace(RETRIED, units=(2,)),
        gather,
        "return kept.has(entry, position) and not (lifted",
        "return False and not (lifted",
    ),
    Mistake(
        "a late line changes a published row",
        "R8: ",
        RETRIED,
        StageState,
        "if failed is not None and not self._retried(entry, item):",
        "if False:",
    ),
    Mistake(
        "the unit of a dead owner is never free",
        "I3: a new worker does not complete",
        SMALL["a worker is killed"],
        Picker,
        "if verdict is not None and verdict.alive:",
        "if verdict is not None and not verdict.finished:",
    ),
    Mistake(
        "a worker waits for itself",
        "I3: w0 waits for ever",
        SMALL["a reply is lost"],
        Picker,
        "return Assignment(stage, unit, generation)",
        "return None",
    ),
    Mistake(
        "attempts are generations",
        "R8: ",
        Config(kinds=FAILING, evils={"error": 1, "crash": 1}),
        History,
        "sum(generation > floor for generation in self.failures)",
        "max((*self.failures, floor)) - floor",
    ),
    Mistake(
        "the owner's clock is compared with mine",
        "I[34]: ",
        SMALL["a worker is killed"],
        Liveness,
        "return now - seen.since < self._lease_of(presence)",
        "return now - (presence.at if presence else seen.since) < self._lease_of(presence)",
    ),
    Mistake(
        "a lock of another host proves a death",
        "I4: ",
        SMALL["a worker is killed"],
        Liveness,
        "near = self._is_near(presence)",
        "near = True",
    ),
    Mistake(
        "nobody asks for locks",
        "I3: w1 waits",
        SMALL["locks show deaths"],
        Liveness,
        "if near and self._lock_is_free(worker):",
        "if near and False:",
    ),
    Mistake(
        "Slurm's word is believed of who beats on",
        "I4: ",
        SMALL["Slurm tells of deaths"],
        Liveness,
        "return None if beats_on else notice",
        "return notice",
    ),
    Mistake(
        "Slurm's word explains nothing",
        "R15: what Slurm",
        SMALL["Slurm tells of deaths"],
        Liveness,
        "return told",
        'return ""',
    ),
    Mistake(
        "a takeover leaves a generation out",
        "R3: a gap",
        SMALL["a worker is killed"],
        Picker,
        "if not stage.claims.create(name, generation + 1, self.worker):",
        "if not stage.claims.create(name, generation + 2, self.worker):",
    ),
    Mistake(
        "a claim is won by looking",
        "I6: two workers",
        SMALL["a worker is killed"],
        Claims,
        "return owner == worker",
        "return True",
    ),
    Mistake(
        "a further name of a claim is taken for made where it exists",
        "I6: two workers",
        SMALL["two units"],
        files,
        "except FileExistsError:\n        raise",
        "except FileExistsError:\n        pass",
    ),
    Mistake(
        "a further name of a claim that was refused is taken for made",
        "I6: two workers",
        SMALL["a reply to a further claim is lost"],
        files,
        "        return False\n    return True",
        "        return True\n    return True",
    ),
    Mistake(
        "a permanent failure is one attempt of many",
        "R8: ",
        SMALL["a failure is permanent"],
        History,
        "any(generation > floor for generation in self.permanent)",
        "False",
    ),
    Mistake(
        "a log entry counts as ours whoever made it",
        "R2: add says",
        SMALL["items are added while others seal"],
        StageLog,
        "won = files.create_name(self.paths.entry(number), target) == target",
        "won = bool(files.create_name(self.paths.entry(number), target))",
    ),
    Mistake(
        "what is not sealed may be complete",
        "R9: ",
        Config(workers=2, people=(("add", "seal"),), sealed=False, stale=frozenset({"log"})),
        StageView,
        "return self.log.sealed and not self.state.open",
        "return not self.state.open",
    ),
    Mistake(
        "what was complete before a retry is so behind it",
        "R9: ",
        replace(SMALL["a failure is permanent"], people=(("retry",),)),
        StageLog,
        "self._complete_at == self.length != self._old_word",
        "self._complete_at != self._old_word",
    ),
    Mistake(
        "no item is ever a killer",
        "I3: w0 waits",
        SMALL["an item kills every executor"],
        unitlines,
        "return len(deaths) >= MAX_DEATHS and spread",
        "return False",
    ),
    Mistake(
        "suspects run in their order",
        "R15: a suspect",
        Config(units=(2,), workers=1, evils={"die": 1}),
        StageState,
        "sorted(self.pending(unit), key=lambda item: len(suspects.get(item, ())))",
        "self.pending(unit) if suspects is not None else []",
    ),
    Mistake(
        "the silence of its node suspects an item",
        "R15: a suspect",
        SMALL["a node is silent"],
        state,
        'if len({*silent}) > 1 or len(silent) >= MAX_DEATHS else ("",)',
        "",
    ),
    Mistake(
        "everybody follows a drain",
        "R16: ",
        SMALL["a worker is drained"],
        ControlReader,
        'frozenset(record["workers"])',
        'frozenset(["w0", "w1"])',
    ),
]


@mistakes(MISTAKES, LONG)
def test_the_search_finds_a_mistake(mistake: Mistake) -> None:
    with made(mistake):
        search(mistake.world, limit=50_000)
