"""Policies on recorded scores: pulls, races, group pulls, and 32 simulated GPUs.

    python benchmarks/bandit_bench.py [pulls] [races] [groups] [wall] [--table FILE] [--write]

All four without a word. FILE is a table of recorded scores (docs/how-to/bandit-bench.md), by
default what HPCTK_SCORES_CSV names; without either, made-up scores of the same shape. ``pulls``
compares all policies on the table and on parts of it, half the arms and 24 tasks; ``races`` plays
racing and halving on parts of half the arms; ``groups`` compares the GPU time of asking for a whole
checkpoint with that of single layers, if a checkpoint's forward passes are shared; ``wall`` plays
the same 60 pulls on one and on 32 GPUs. ``--write`` puts the tables into benchmarks/results.md;
they hold no score of the table.

Takes some minutes of one processor for ``pulls``, and one or two for each of the others.
The numbers depend on the seeds alone. Needs nothing; the extra ``optuna`` adds its policy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from arguments import number, parser
from resultsfile import facts, table, write_section

from hpc_toolkit.bandit.bench.comparison import Plan, run_bench, searches
from hpc_toolkit.bandit.bench.entrants import entrants
from hpc_toolkit.bandit.bench.outcome import reached_at
from hpc_toolkit.bandit.bench.replay import Asks
from hpc_toolkit.bandit.bench.synthetic import score_table
from hpc_toolkit.scoretable import read_score_table

if TYPE_CHECKING:
    import argparse

    from hpc_toolkit.bandit.bench.entrants import Entrant
    from hpc_toolkit.bandit.bench.recorded import ScoreTable
    from hpc_toolkit.bandit.bench.replay import Trace

GOAL = 0.99
SUBTABLES, TASKS = 100, 24
RACES = 200
PULLS, GPUS = 60, 32
WAYS = ("one", "window:8", "rounds:8", "window:16", "rounds:16", "window:24", "rounds:24")


def main() -> None:
    given = parser(__doc__)
    parts = {"pulls": pulls, "races": races, "groups": groups, "wall": wall}
    # With choices, argparse would refuse the empty list that is the default.
    given.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    given.add_argument("--table", help="of recorded scores")
    given.add_argument("--policies", default="all", help="for pulls: names with commas")
    given.add_argument("--seeds", type=number, default=40, help="on the table")
    given.add_argument("--subtables", type=number, default=SUBTABLES, help="parts, for pulls")
    given.add_argument("--part-seeds", type=number, default=4, help="on each of those parts")
    given.add_argument("--races", type=number, default=RACES, help="parts of the table")
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
    # A row is shown as soon as it is known.
    print(f"{head}", file=sys.stderr)
    rows = []
    for entrant, asks in specs:
        if entrant.in_parts:
            continue
        cells = [entrant.label if asks.size == 1 else f"{entrant.label}, {asks}"]
        tasks = min(TASKS, len(scores.tasks.names))
        for some in (
            {"seeds": options.seeds},
            {"seeds": options.part_seeds, "subtables": options.subtables, "tasks": tasks},
        ):
            found = to_goal(entrant, scores, asks=asks, **some)
            cells += [_cell(found["median"]), _cell(found["p90"]), f"{1 - found['reached']:.0%}"]
        print(cells, file=sys.stderr, flush=True)
        rows.append(cells)
    about = (
        f"Arms evaluated until one of {GOAL:.0%} of the best is known, in the order of asks, "
        f"{options.seeds} seeds on the table, and {options.part_seeds} others on each of "
        f"{options.subtables} random parts with half the arms and {TASKS} tasks."
    )
    return [about, "", *table(head, rows)]


def to_goal(entrant: Entrant, scores: ScoreTable, **more: Any) -> dict[str, Any]:
    """Pulls to 99 % of the best, as a report has them."""
    plan = Plan(entrants=[entrant], until=GOAL, pulls=None, gpus=(1,), **more)
    found: dict[str, Any] = run_bench(scores, plan)["policies"][0]["to_goal"][f"{GOAL:g}"]["pulls"]
    return found


def _cell(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"


def races(scores: ScoreTable, options: argparse.Namespace) -> list[str]:
    """How often racing and halving find the best arm, and for what share of the GPU time."""
    head = ["policy", "arms", "tasks", "best arm", "behind, mean", "GPU time: median", "p90"]
    rows = []
    for entrant in entrants("racing,halving"):
        for tasks in (len(scores.tasks.names), min(TASKS, len(scores.tasks.names))):
            plan = Plan(
                entrants=[entrant], seeds=1, subtables=options.races, tasks=tasks, gpus=(1,)
            )
            tables = plan.tables(scores)
            ended = run_bench(scores, plan)["policies"][0]["ended"]
            rows.append(
                [
                    *(entrant.label, f"{len(tables[0].arms.arms)}", f"{tasks}"),
                    *(f"{ended['exact']:.1%}", f"{ended['regret']:.5f}"),
                    *(f"{ended['gpu_s'][name]:.1%}" for name in ("median", "p90")),
                ]
            )
    about = (
        f"On {options.races} random parts of half the arms: how often the arm named at the end is "
        "the best one by all tasks, by how much it is behind, and the GPU time as a share of "
        "evaluating everything."
    )
    return [about, "", *table(head, rows)]


def groups(scores: ScoreTable, options: argparse.Namespace) -> list[str]:
    """GPU time to 99 % of the best: single arms, and all arms of a checkpoint at once."""
    head = ["asks for", "GPU hours: median", "p90", "checkpoints begun: median"]
    rows = []
    for words, spec, shared in (
        ("single arms, gp-ucb", "gp-ucb", False),
        ("whole checkpoints, gp-ucb", "gp-ucb:group_pulls=true", True),
        ("whole checkpoints, random", "random:group_pulls=true", True),
    ):
        plan = Plan(entrants=entrants(spec), until=GOAL, pulls=None, seeds=options.seeds)
        hours, begun = [], []
        for _, trace in searches(plan.entrants[0], [scores], plan):
            number = int(reached_at(trace, GOAL)) - 1
            spent = shared_s(trace, number) if shared else float(trace.gpu_s[number])
            hours.append(spent / 3600)
            begun.append(len(_begun(trace, number)))
        cells = [np.median(hours), np.quantile(hours, 0.9, method="inverted_cdf")]
        rows.append([words, *(f"{cell:.1f}" for cell in cells), f"{np.median(begun):g}"])
    about = (
        "A checkpoint whose layers are evaluated together is taken to cost the time of its last "
        "layer, and for each other layer that of the embeddings, which is nearly all classifier: "
        "a model of the cost, since the recorded times are of models cut to one layer. "
        f"{options.seeds} seeds."
    )
    return [about, "", *table(head, rows)]


def _begun(trace: Trace, last: int) -> list[str]:
    """The groups of the first pulls, in their order."""
    return list(dict.fromkeys(trace.table.arms.groups[arm] for arm in trace.arms[: last + 1]))


def shared_s(trace: Trace, last: int) -> float:
    """GPU seconds of the groups of the first pulls, each evaluated whole in one go."""
    assert trace.table.seconds is not None
    total = trace.table.seconds.sum(axis=1)
    spent = 0.0
    for group in _begun(trace, last):
        members = sorted(trace.table.arms.members[group], key=lambda arm: float(total[arm]))
        spent += float(total[members[-1]]) + (len(members) - 1) * float(total[members[0]])
    return spent


def wall(scores: ScoreTable, options: argparse.Namespace) -> list[str]:
    """The same pulls on one and on many GPUs, by how many arms are asked for at once."""
    head = [
        *("asks", f"{PULLS} pulls, {GPUS} GPUs against 1: median", "lowest", "by pull: median"),
        *(f"hours to {GOAL:.0%} on 1 GPU", f"on {GPUS} GPUs"),
    ]
    rows = []
    for spec, way in [*(("gp-ucb", way) for way in WAYS), ("racing", "one")]:
        plan = Plan(entrants=entrants(spec), pulls=PULLS, seeds=options.seeds, asks=Asks.parse(way))
        found = [trace for _, trace in searches(plan.entrants[0], [scores], plan)]
        speeds = [float(t.gpu_s[-1] / t.wall_s(GPUS)[-1]) for t in found]
        by_pull = [float(t.gpu_s[-1] / t.wall_s(GPUS, "pull")[-1]) for t in found]
        hours = [np.median([_hours(trace, gpus) for trace in found]) for gpus in (1, GPUS)]
        rows.append(
            [
                f"{spec}, {'whole rungs' if plan.entrants[0].in_parts else way}",
                *(f"{np.median(speeds):.1f}", f"{min(speeds):.1f}", f"{np.median(by_pull):.1f}"),
                *(f"{one:.2f}" for one in hours),
            ]
        )
    about = (
        f"Simulated from the table's durations, {options.seeds} seeds: the longest evaluation "
        "that may begin goes first; 'by pull': those of the earlier arm first. Racing "
        "plays to its end."
    )
    return [about, "", *table(head, rows)]


def _hours(trace: Trace, gpus: int) -> float:
    """Until an arm of 99 % of the best is known; infinity where it is not within these pulls."""
    place = reached_at(trace, GOAL)
    return float(trace.wall_s(gpus)[int(place) - 1]) / 3600 if np.isfinite(place) else np.inf


if __name__ == "__main__":
    main()
