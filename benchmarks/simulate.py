"""Simulated clusters on a virtual clock, driven by the queue's own code.

    python benchmarks/simulate.py [--large] [--write]

The list is one of language models: 4 sizes of 6, 6, 12 and 24 layers at 108 steps of training are
432 checkpoints with 5,184 layers, one item each; 15 s to load a checkpoint, 25 s for its forward
pass, 5 s a layer. On more than 32 workers there are as many more steps. ``--write`` puts the table
into benchmarks/results.md. Exits 1 if the undisturbed campaign misses its target.

Takes about half a minute of one processor, with ``--large`` some minutes. Needs nothing.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from arguments import parser
from resultsfile import facts, table, write_section
from simulation.cluster import simulate
from simulation.scenario import Group, Kill, Preemption, Scenario

if TYPE_CHECKING:
    from simulation.scenario import Outcome

LAYERS = (6, 6, 12, 24)
STEPS = 108
WORKERS = 32
MOST_RATIO = 1.08
MOST_LOADS = 1.05
KILL_EVERY_S = 120.0
REQUEUE_S = 120.0


def campaign(workers: int = WORKERS) -> Scenario:
    """The undisturbed campaign, 13.5 checkpoints a worker."""
    steps = STEPS * workers // WORKERS
    groups = tuple(Group((5.0,) * layers, 15.0, 25.0) for layers in LAYERS for _ in range(steps))
    return Scenario(groups=groups, workers=workers)


def killed(calm: Scenario, back_s: float | None = None) -> Scenario:
    """One worker killed every two minutes."""
    chance = random.Random(1)
    times = range(1, int(3 * calm.bound_s / KILL_EVERY_S))
    kills = [Kill(n * KILL_EVERY_S, chance.randrange(calm.workers), back_s) for n in times]
    return replace(calm, kills=tuple(kills))


def preempted(calm: Scenario) -> Scenario:
    """The whole job preempted at 1/3 and 2/3 of the lower bound."""
    cuts = [Preemption(calm.bound_s * n / 3, REQUEUE_S) for n in (1, 2)]
    return replace(calm, preemptions=tuple(cuts))


def cases(*, large: bool) -> dict[str, Scenario]:
    calm = campaign()
    sizes = (256,) if large else ()
    return {
        "undisturbed": calm,
        "killed every 2 min, preempted twice": killed(preempted(calm)),
        "the same, killed ones back after 2 s": killed(preempted(calm), 2.0),
        "killed every 2 min alone, back after 2 s": killed(calm, 2.0),
        "preempted twice alone": preempted(calm),
        **{f"undisturbed, {n // WORKERS} times as much": campaign(n) for n in sizes},
    }


HEAD = ["case", "workers", "items", "makespan", "/ bound", "loads", "takeover, median"]


def row(name: str, outcome: Outcome) -> list[str]:
    scenario, takeovers = outcome.scenario, outcome.takeovers_s
    return [
        name,
        f"{scenario.workers:,}",
        f"{len(scenario.places):,}",
        f"{outcome.makespan_s:,.0f} s",
        f"{outcome.ratio:.3f}",
        f"{outcome.loads:,} / {len(scenario.groups):,}",
        f"{statistics.median(takeovers):.0f} s of {len(takeovers)}" if takeovers else "",
        *(f"{share:.1%}" for share in outcome.shares.values()),
    ]


def is_near(calm: Outcome) -> bool:
    """Whether an undisturbed run keeps what is promised of it."""
    return calm.ratio <= MOST_RATIO and calm.loads <= MOST_LOADS * len(calm.scenario.groups)


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--large", action="store_true", help="256 workers as well: long")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # three of each simulated worker
    rows: list[list[str]] = []
    calm: Outcome | None = None
    wastes: list[str] = []
    for name, scenario in cases(large=options.large).items():
        began = time.perf_counter()
        outcome = simulate(scenario)
        assert not outcome.left
        assert outcome.executions == len(scenario.places)
        calm, wastes = calm or outcome, list(outcome.shares)
        rows.append(row(name, outcome))
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    assert calm is not None
    near = is_near(calm)
    lines = [
        facts(),
        "",
        "The lower bound is (one load and one forward pass per checkpoint + all layers) /",
        "workers; lost time and repeated work are not subtracted. The last five columns are",
        f"shares of all worker seconds. A preempted job starts again {REQUEUE_S:.0f} s after its",
        "last worker has exited; killed workers return with it unless the row states another",
        "time. Four workers per host, default heartbeat and lease.",
        "",
        *table(HEAD + wastes, rows),
        "",
        f"Target without disturbances: {MOST_RATIO} of the bound, {MOST_LOADS} loads per "
        "checkpoint; " + ("met." if near else "MISSED."),
    ]
    print("\n".join(lines))
    if options.write:
        write_section("Simulated clusters", lines)
    sys.exit(0 if near else 1)


if __name__ == "__main__":
    main()
