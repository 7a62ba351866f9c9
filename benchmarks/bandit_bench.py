"""Policies on recorded scores: pulls, races, and 32 simulated GPUs.

    python benchmarks/bandit_bench.py [pulls] [races] [wall] [--table FILE] [--write]

All three without a word. FILE is a table of recorded scores (see scoretable.py), by
default what HPCTK_SCORES_CSV names; without either, made-up scores of the same shape. ``pulls``
compares all policies on the table and on parts of it, half the arms and 24 tasks; ``races`` plays
racing on parts of half the arms, and on made-up tables; ``wall`` plays the same 60
pulls on one and on 32 GPUs. ``--write`` puts the tables into benchmarks/results.md; they hold no
score of the table. Each row of ``pulls`` is shown on stderr as soon as it is known.

Takes ten minutes of one processor for ``pulls``, and one or two for each of the others.
The numbers depend on the seeds alone. Needs nothing; the extra ``optuna`` adds its policy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from arguments import number, parser
from comparison import Plan, entrants, reached_at, searches, spread
from replay import Asks, ScoreTable, score_table
from resultsfile import facts, table, write_section
from scoretable import read_score_table

from hpc_toolkit.bandit import TaskSet
from hpc_toolkit.bandit.arms import ArmTable

if TYPE_CHECKING:
    import argparse

    from comparison import Entrant
    from replay import Trace

GOAL = 0.99
SHARE = 0.05
SUBTABLES, TASKS = 100, 24
RACES, MADE_UP = 200, 24
PULLS, GPUS = 60, 32
CHOSEN = (
    "These defaults were chosen by searches on 175 layers of Pythia-410m and 32 tasks: gp-ucb as "
    "the default policy, its kernel and beta, c and first of racing, "
    "and the shape of the generated scores. So on that table these numbers do not test them."
)
"""A caveat for reading the numbers."""
WAYS = ("one", "window:8", "rounds:8", "window:16", "rounds:16", "window:24", "rounds:24")


def main() -> None:
    given = parser(__doc__)
    parts = {"pulls": pulls, "races": races, "wall": wall}
    # With choices, argparse would refuse the empty list that is the default.
    given.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    given.add_argument("--table", help="of recorded scores")
    given.add_argument("--policies", default="all", help="for pulls: names with commas")
    given.add_argument("--seeds", type=number, default=40, help="on the table")
    given.add_argument("--subtables", type=number, default=SUBTABLES, help="parts, for pulls")
    given.add_argument("--part-seeds", type=number, default=40, help="on each of those parts")
    given.add_argument("--races", type=number, default=RACES, help="parts of the table")
    given.add_argument("--made-up", type=number, default=MADE_UP, help="tables, for races")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    wrong = [part for part in options.parts if part not in parts]
    if wrong:
        given.error(f"there is no part {wrong[0]!r}")
    path = options.table or os.environ.get("HPCTK_SCORES_CSV")
    scores = read_score_table(Path(path)) if path else score_table(0)
    kind = "recorded" if path else "made-up"
    size = f"{kind} scores of {len(scores.arms.arms)} arms on {len(scores.tasks.names)} tasks"
    for part in options.parts or parts:
        lines = parts[part](scores, options)
        print("\n".join(lines), flush=True)
        if options.write:
            write_section(f"Policies: {part}, {size}", ["", facts(), "", *lines])


def pulls(scores: ScoreTable, options: argparse.Namespace) -> list[str]:
    """Pulls to 99 % of the best, for every policy, on the whole and on parts."""
    head = ["policy", "table: median", "p90", "never", "parts: median", "p90", "never"]
    specs = [(one, Asks.parse("one")) for one in entrants(options.policies)]
    specs += [(entrants("gp-ucb")[0], Asks.parse(way)) for way in ("rounds:8", "window:8")]
    tasks = min(TASKS, len(scores.tasks.names))
    parts = [drawn(scores, seed, tasks) for seed in range(options.subtables)]
    print(f"{head}", file=sys.stderr)
    found: dict[str, list[dict[str, Any]]] = {}
    for entrant, asks in specs:
        if entrant.in_parts:
            continue
        name = entrant.label if asks.size == 1 else f"{entrant.label}, {asks}"
        found[name] = [
            to_goal(entrant, [scores], options.seeds, asks),
            to_goal(entrant, parts, options.part_seeds, asks),
        ]
        print(_row(name, found[name]), file=sys.stderr, flush=True)
    about = (
        f"Number of arms evaluated, in the order of the requests, until an arm with {GOAL:.0%} of "
        f"the best score is known: {options.seeds} seeds on the table, and {options.part_seeds} "
        f"others on each of {options.subtables} random subsets with half the arms and {tasks} "
        "tasks."
    )
    rows = [_row(name, numbers) for name, numbers in found.items()]
    return [about, "", *table(head, rows), "", *_ratios(found), "", CHOSEN]


def _row(name: str, found: list[dict[str, Any]]) -> list[str]:
    cells = [name]
    for one in found:
        cells += [_cell(one["median"]), _cell(one["p90"]), f"{1 - one['reached']:.0%}"]
    return cells


def _ratios(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What one needs for each pull of another, on the table and on its parts."""
    lines = []
    for one, other in (
        ("gp-ucb", "random"),
        ("gp-ucb, rounds:8", "gp-ucb"),
        ("gp-ucb, window:8", "gp-ucb"),
    ):
        if one in found and other in found:
            ratios = [
                " and ".join(_ratio(ours[cost], theirs[cost]) for cost in ("median", "p90"))
                for ours, theirs in zip(found[one], found[other], strict=True)
            ]
            words = f"{ratios[0]} times the pulls (median and p90) on the table, {ratios[1]}"
            lines.append(f"- {one} against {other}: {words} on parts.")
    return lines


def _ratio(one: float | None, other: float | None) -> str:
    return f"{one / other:.2f}" if one is not None and other is not None else "never"


def to_goal(entrant: Entrant, tables: list[ScoreTable], seeds: int, asks: Asks) -> dict[str, Any]:
    """Median, ninth decile and share of the searches that reached 99 % of the best, in pulls."""
    spent: list[float] = []
    for place, one in enumerate(tables):
        plan = Plan(
            entrants=[], until=GOAL, pulls=None, seeds=seeds, first=place * seeds, asks=asks
        )
        spent += [reached_at(trace, GOAL) for trace in searches(entrant, one, plan)]
    return spread(spent)


def drawn(scores: ScoreTable, seed: int, tasks: int) -> ScoreTable:
    """A random part of a table: half of its arms, and some of its tasks, in their order."""
    rng = np.random.default_rng([seed, 7])
    every = len(scores.arms.arms)
    kept = np.sort(rng.permutation(every)[: every // 2]).tolist()
    columns = np.sort(rng.permutation(len(scores.tasks.names))[:tasks]).tolist()
    cut = np.ix_(kept, columns)
    return ScoreTable(
        arms=ArmTable(tuple(scores.arms.arms[i] for i in kept), scores.arms.feature_names),
        tasks=TaskSet(tuple(scores.tasks.names[i] for i in columns)),
        scores=scores.scores[cut],
        seconds=None if scores.seconds is None else scores.seconds[cut],
        stderrs=None if scores.stderrs is None else scores.stderrs[cut],
    )


def _cell(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"


def races(scores: ScoreTable, options: argparse.Namespace) -> list[str]:
    """How often racing finds the best arm, and for what share of the GPU time."""
    head = ["policy", "scores", "arms", "tasks", "best arm", "behind: mean", "most"]
    head += ["GPU time: median", "p90", f"above {SHARE:.0%}"]
    every = len(scores.tasks.names)
    kinds = [
        *(
            ("parts", [drawn(scores, seed, n) for seed in range(options.races)])
            for n in sorted({every, min(TASKS, every)})
        ),
        ("made up", [score_table(seed) for seed in range(options.made_up)]),
    ]
    rows = []
    for entrant in entrants("racing"):
        for kind, tables in kinds:
            plans = [Plan(entrants=[], seeds=1, first=seed) for seed in range(len(tables))]
            games = zip(tables, plans, strict=True)
            found = [trace for one, plan in games for trace in searches(entrant, one, plan)]
            size = [f"{len(tables[0].arms.arms)}", f"{len(tables[0].tasks.names)}"]
            rows.append([entrant.label, f"{len(tables)} {kind}", *size, *_raced(found)])
            print(rows[-1], file=sys.stderr, flush=True)
    about = (
        "On random subsets of half the arms of the table, and on generated tables: how often the "
        "arm that the search names is the best arm on all tasks, how far its score is below the "
        "best, and the GPU time as a share of evaluating everything; the last column is the share "
        f"of searches in which that time is above {SHARE:.0%}. The policy does not know the "
        "durations; the arm that shows them counts."
    )
    return [about, "", *table(head, rows), "", CHOSEN]


def _raced(found: list[Trace]) -> list[str]:
    """The cells of searches that played to their end."""
    best = np.array([trace.table.means.max() for trace in found])
    behind = best - np.array([np.nan_to_num(trace.known[-1]) for trace in found])
    exact = f"{np.mean(behind <= 1e-12 * best):.1%}"
    cells = [exact, f"{behind.mean():.5f}", f"{behind.max():.4f}"]
    spent = [t.gpu_s[-1] / t.table.seconds.sum() for t in found if t.table.seconds is not None]
    if not spent:
        return [*cells, *["not known"] * 3]
    shares = [np.median(spent), np.quantile(spent, 0.9, method="inverted_cdf")]
    return [*cells, *(f"{one:.1%}" for one in shares), f"{np.mean(np.array(spent) > SHARE):.0%}"]


def wall(scores: ScoreTable, options: argparse.Namespace) -> list[str]:
    """The same pulls on one and on many GPUs, by how many arms are asked for at once."""
    head = [
        *("asks", f"{PULLS} pulls, {GPUS} GPUs against 1: median", "lowest"),
        *(f"hours to {GOAL:.0%} on 1 GPU", f"on {GPUS} GPUs"),
    ]
    rows = []
    for spec, way in [*(("gp-ucb", way) for way in WAYS), ("racing", "one")]:
        plan = Plan(entrants=entrants(spec), pulls=PULLS, seeds=options.seeds, asks=Asks.parse(way))
        found = list(searches(plan.entrants[0], scores, plan))
        speeds = [float(t.gpu_s[-1] / t.wall_s(GPUS)[-1]) for t in found]
        hours = [np.median([_hours(trace, gpus) for trace in found]) for gpus in (1, GPUS)]
        rows.append(
            [
                f"{spec}, {'whole rungs' if plan.entrants[0].in_parts else way}",
                *(f"{np.median(speeds):.1f}", f"{min(speeds):.1f}"),
                *(f"{one:.2f}" for one in hours),
            ]
        )
    about = (
        f"Simulated from the table's durations, {options.seeds} seeds: the longest evaluation "
        "that can start goes first. Racing runs to its end. Only evaluations take time, so a real "
        "run is slower."
    )
    return [about, "", *table(head, rows)]


def _hours(trace: Trace, gpus: int) -> float:
    """Until an arm of 99 % of the best is known; infinity where it is not within these pulls."""
    place = reached_at(trace, GOAL)
    return float(trace.wall_s(gpus)[int(place) - 1]) / 3600 if np.isfinite(place) else np.inf


if __name__ == "__main__":
    main()
