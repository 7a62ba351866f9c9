"""The pulls of a search on simulated workers, which take items by the queue's own code.

    python benchmarks/dispatch.py [--table FILE] [--policy gp-ucb] [--asks rounds:24] [--write]

FILE is a table of recorded scores with durations (see scoretable.py), by default what
HPCTK_SCORES_CSV names; without either, made-up scores of the same shape. A policy is asked for
the same arms as in a campaign; each of its rounds is one segment, cut and ordered as a campaign
does it, and drained by 1 and by 32 simulated workers on a virtual clock. ``replay.py`` says how
long the same pulls would take if the longest evaluation always went first, and claims, polls and
loading took nothing. ``--load`` is what loading a checkpoint takes, on top of recorded durations.

Takes some minutes of one processor with 10 seeds. Needs nothing; the numbers depend on seeds alone.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from arguments import number, parser
from comparison import Entrant
from replay import Asks, replay, score_table
from resultsfile import facts, table, write_section
from scoretable import read_score_table
from simulation.cluster import simulate
from simulation.scenario import Group, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replay import ScoreTable, Trace

PULLS, GPUS = 60, 32


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--table", help="of recorded scores")
    given.add_argument("--policy", default="gp-ucb", help="with its options")
    given.add_argument("--asks", default="rounds:24", help="rounds:N")
    given.add_argument("--seeds", type=number, default=10, help="of the search")
    given.add_argument("--load", type=float, default=0.0, help="seconds to load a checkpoint")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    asks = Asks.parse(options.asks)
    if asks.kind != "rounds":
        given.error("each round is one simulation; a window has none")
    path = options.table or os.environ.get("HPCTK_SCORES_CSV")
    scores = read_score_table(Path(path)) if path else score_table(0)
    lines = compare(scores, Entrant.parse(options.policy), asks, options.seeds, options.load)
    print("\n".join(lines))
    if options.write:
        kind = "recorded" if path else "made-up"
        write_section(f"Dispatch of a search's pulls, {kind} durations", ["", facts(), "", *lines])


def compare(
    scores: ScoreTable, entrant: Entrant, asks: Asks, seeds: int, load_s: float
) -> list[str]:
    """The table of results."""
    hours, ideal, speedups, loads = [], [], [], []
    for seed in range(seeds):
        trace = replay(scores, entrant.make(scores, seed, asks), asks, pulls=PULLS)
        many = [simulate(one) for one in rounds(trace, GPUS, load_s)]
        single = [simulate(one).makespan_s for one in rounds(trace, 1, load_s)]
        wall_s = sum(one.makespan_s for one in many)
        hours.append(wall_s / 3600)
        speedups.append(sum(single) / wall_s)
        ideal.append(trace.wall_s(1)[-1] / trace.wall_s(GPUS)[-1])
        loads.append(sum(one.loads for one in many))
        print(f"seed {seed}: {speedups[-1]:.1f}x, ideal {ideal[-1]:.1f}x", file=sys.stderr)
    about = (
        f"{PULLS} pulls of {entrant.label} in {asks} on {GPUS} workers compared with 1, {seeds} "
        f"seeds, {load_s:g} s to load a checkpoint."
    )
    head = ["", "median", "lowest", "highest"]
    rows = [
        ["speed-up, the queue's own code", *spread(speedups, "{:.1f}x")],
        ["speed-up, longest first and nothing else", *spread(ideal, "{:.1f}x")],
        [f"hours on {GPUS} workers", *spread(hours, "{:.2f}")],
        ["checkpoints loaded", *spread(loads, "{:.0f}")],
    ]
    return [about, "", *table(head, rows)]


def spread(values: list[float] | list[int], shown: str) -> list[str]:
    return [shown.format(one) for one in (statistics.median(values), min(values), max(values))]


def rounds(trace: Trace, workers: int, load_s: float) -> Iterator[Scenario]:
    """The segment of each round."""
    names = trace.table.tasks.names
    sums, counts = np.zeros(len(names)), 0
    told = sorted(set(trace.told_before))
    for begin, end in zip(told, [*told[1:], len(trace.arms)], strict=True):
        # Nothing is known of the first round's tasks; they go as they were given.
        means = sums / counts if counts else np.full(len(names), math.inf)
        order = sorted(range(len(names)), key=lambda task: -means[task])
        groups: dict[str, list[int]] = {}
        for arm in trace.arms[begin:end]:
            groups.setdefault(trace.table.arms.arms[arm].group, []).append(arm)
        yield Scenario(
            groups=tuple(group_of(trace, arms, order, load_s) for arms in groups.values()),
            workers=workers,
            unit_size=1,
        )
        assert trace.table.seconds is not None
        sums += trace.table.seconds[list(trace.arms[begin:end])].sum(axis=0)
        counts += end - begin


def group_of(trace: Trace, arms: list[int], order: list[int], load_s: float) -> Group:
    """The items of one checkpoint, as a campaign lists them."""
    seconds = trace.table.seconds
    assert seconds is not None
    names = trace.table.tasks.names
    items = [(arm, task) for arm in arms for task in order]
    return Group(
        items_s=tuple(float(seconds[arm, task]) for arm, task in items),
        load_s=load_s,
        kinds=tuple(names[task] for _, task in items),
    )


if __name__ == "__main__":
    main()
