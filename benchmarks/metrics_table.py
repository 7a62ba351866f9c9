"""The metrics of layers: known answers, agreement with independent code, and time.

    python benchmarks/metrics_table.py [--prompts 128] [--shapes 200] [--rounds 3] [--write]

Three tables. Inputs whose answer is known by calculation. The worst difference from slow float64
loops over random shapes, and from scikit-learn, scipy and torch's own functions.
And the processor time of a layer beside the same in Python loops, one layer at a time, as published
code has it (benchmarks/metricloops.py), in turns, in one process of one thread: states of 7 layers
of 48 tokens and, unless told otherwise, 384 features, those of a small sentence encoder, with 16
views for LiDAR. Four metrics have no published loops; theirs follow the definition.

Takes a minute. Needs scikit-learn.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import metricloops as loops
import numpy as np
import torch
from arguments import number, parser
from metricanswers import agreement_rows, answer_rows
from resultsfile import facts, table, write_section

from hpc_toolkit.science.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYERS, TOKENS, VIEWS = 7, 48, 16

WIDE = (64, 1024)
"""Prompts and features of a layer of a larger model, timed in one round."""

REMARK = """\
Processor time is measured for this process only. A metric that needs one small matrix per layer
(InfoNCE) gains nothing, because its loops are matrix products, too."""

BY_DEFINITION = {"anisotropy", "effective_rank"}
"""Those whose loops are ours; they stay out of the sum."""


def main() -> None:
    given = parser(__doc__)
    given.add_argument(
        "--prompts", type=number, default=128, metavar="N", help="prompts of a layer"
    )
    given.add_argument("--features", type=number, default=384, metavar="N", help="of a token")
    given.add_argument("--shapes", type=number, default=200, metavar="N", help="random shapes")
    given.add_argument("--rounds", type=number, default=3, metavar="N", help="rounds of timing")
    given.add_argument("--write", action="store_true", help="write the section of results.md")
    options = given.parse_args()
    torch.set_num_threads(1)
    lines = [facts(), "", "Known answers:", ""]
    lines += table(["metric", "input", "answer", "found", "error"], answer_rows())
    lines += [
        "",
        f"Agreement, `--shapes {options.shapes}`: worst |difference| / max(1, |value|):",
        "",
    ]
    lines += table(["metric", "independent code", "cases", "worst"], agreement_rows(options.shapes))
    size = f"{options.prompts} prompts x {TOKENS} tokens x {options.features}"
    lines += ["", f"Processor time of a layer of {size}:", ""]
    head = ["metric", "loops", "ours, ms a layer", "loops, ms a layer", "ratio", "difference"]
    lines += table(head, timing_rows(options.prompts, options.features, options.rounds))
    lines += ["", wide(), REMARK]
    print("\n".join(lines))
    if options.write:
        write_section("Metrics", lines)


def ways(
    prompts: int, features: int
) -> Iterator[tuple[str, Callable[[int], float], Callable[[int], float]]]:
    """For each metric its value for a layer, ours and by loops."""
    draws = np.random.default_rng(1)
    shape = (LAYERS, prompts, TOKENS, features)
    states = torch.from_numpy(
        draws.normal(size=shape).cumsum(-2) + draws.normal(size=(*shape[:2], 1, features))
    )
    means = states.mean(-2)
    views = means[:, None] + 0.3 * torch.from_numpy(
        draws.normal(size=(LAYERS, VIEWS, prompts, features))
    )
    order = np.random.default_rng([0])
    orders = [torch.from_numpy(order.permutation(prompts)) for _ in range(10)]

    def registered(name: str, given: Any) -> Callable[[int], float]:
        return lambda layer: float(METRICS[name].function(given[layer]).mean())

    def by_loops(name: str, given: Any) -> Callable[[int], float]:
        return lambda layer: float(getattr(loops, name)(given[layer]))

    for name in ("prompt_entropy", "curvature", "token_angle"):
        yield name, registered(name, states), by_loops(name, states)
    tokens = states.flatten(1, 2)
    yield (
        "anisotropy",
        registered("anisotropy", tokens),
        lambda layer: loops.anisotropy(states[layer]),
    )
    for name in ("dataset_entropy", "effective_rank", "rankme", "alpha_req"):
        yield name, registered(name, means), by_loops(name, means)
    yield "lidar", registered("lidar", views), lambda layer: loops.lidar(views[layer].movedim(0, 1))
    yield (
        "dime",
        registered("dime", views),
        lambda layer: loops.dime(views[layer, 0], views[layer, 1], orders),
    )
    yield (
        "infonce",
        registered("infonce", views),
        lambda layer: loops.infonce(views[layer, 0], views[layer, 1]),
    )


def wide() -> str:
    """Timings for one layer of a larger model: all metrics together, and LiDAR."""
    rows = {row[0]: row for row in timing_rows(*WIDE, rounds=1)}
    (_, _, a, b, ratio, _), lidar = rows["together"], rows["lidar"]
    return (
        f"With {WIDE[0]} prompts and {WIDE[1]} features, one round: all metrics together take "
        f"{a} ms instead of {b} ms per layer, a ratio of {ratio}; LiDAR alone takes {lidar[2]} "
        f"instead of {lidar[3]} ms."
    )


def timed(way: Callable[[int], float]) -> tuple[float, list[float]]:
    started = time.process_time()
    values = [way(layer) for layer in range(LAYERS)]
    return (time.process_time() - started) / LAYERS, values


def timing_rows(prompts: int, features: int, rounds: int) -> list[list[str]]:
    rows = []
    together: dict[str, float] = {"ours": 0.0, "loops": 0.0}
    for name, mine, by_loops in ways(prompts, features):
        seconds: dict[str, list[float]] = {"ours": [], "loops": []}
        values: list[float] = []
        others: list[float] = []
        mine(0)
        for _ in range(rounds):
            took, values = timed(mine)
            seconds["ours"].append(took)
            took, others = timed(by_loops)
            seconds["loops"].append(took)
        a, b = (statistics.median(seconds[way]) for way in ("ours", "loops"))
        if name not in BY_DEFINITION:
            together["ours"] += a
            together["loops"] += b
        apart = max(abs(x - y) / max(1, abs(y)) for x, y in zip(values, others, strict=True))
        loops_are = "by definition" if name in BY_DEFINITION else "published"
        rows.append(
            [name, loops_are, f"{a * 1e3:.2f}", f"{b * 1e3:.2f}", f"{b / a:.1f}", f"{apart:.0e}"]
        )
    a, b = together["ours"], together["loops"]
    return [
        *rows,
        ["together", "published", f"{a * 1e3:.1f}", f"{b * 1e3:.1f}", f"{b / a:.1f}", ""],
    ]


if __name__ == "__main__":
    main()
