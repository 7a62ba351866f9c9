"""The metrics stage grouped by checkpoint against the same items one by one.

    python -m benchmarks.grouped_metrics [ROOT]

ROOT holds the demo's checkpoints; without it, ten checkpoints of the same sizes are made first, of
their first steps, which take the same time to measure. Both ways run the same code in one process
on the demo's prompts and metrics, checkpoint by checkpoint in turn, so that a busy machine slows
both. One by one means: no context outlives its item, so each item loads its checkpoint and runs the
model over the prompts. Start-up of Python and imports, which one process per item would pay each
time too, is left out.

Takes a quarter of a minute, and without ROOT somewhat longer. Needs the extra ``demo``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from examples import mini_pythia
from hpc_toolkit.science.workloads.layer_metrics import LayerMetrics

Item = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, metavar="ROOT", help="of the demo")
    given = parser.parse_args().root
    names = [f"step{n}" for n in mini_pythia.STEPS]
    if given is not None and not any((given / "mini-s" / name).is_dir() for name in names):
        parser.error(f"{given}: there is no checkpoint of mini-s in it")
    with tempfile.TemporaryDirectory() as scratch:
        root = given or Path(scratch)
        if given is None:
            for item in mini_pythia.train_items(scratch):
                mini_pythia.train({**item, "steps": [0, 1, 2, 4, 8]})
        steps = [n for n in mini_pythia.STEPS if (root / f"mini-s/step{n}").is_dir()]
        items = mini_pythia.metric_items(steps=steps)
        prompts = mini_pythia.write_prompts(Path(scratch) / "prompts.txt")
        compare(str(root), prompts, items)


def run_items(workload: LayerMetrics, items: list[Item]) -> list[Item]:
    """What an executor does with the items of one claim."""
    return list(workload.run(workload.load(items[0]["checkpoint"]), items))


def compare(root: str, prompts: list[str], items: list[Item]) -> None:
    grouped, single = (LayerMetrics(root=root, prompts=prompts) for _ in range(2))
    # The first load imports transformers and wakes the allocator; neither way is charged for it.
    run_items(LayerMetrics(root=root, prompts=prompts), items[:2])

    together: list[Item] = []
    alone: list[Item] = []
    grouped_s = single_s = 0.0
    for _, group in groupby(items, key=lambda item: item["checkpoint"]):
        members = list(group)
        started = time.perf_counter()
        together += run_items(grouped, members)
        middle = time.perf_counter()
        alone += [value for item in members for value in run_items(single, [item])]
        grouped_s += middle - started
        single_s += time.perf_counter() - middle

    difference = max(
        abs(a[name] - b[name]) for a, b in zip(together, alone, strict=True) for name in a
    )
    assert difference <= 1e-6, f"values differ by {difference}"
    checkpoints = len({item["checkpoint"] for item in items})
    print(f"{len(items)} items of {checkpoints} checkpoints, {len(prompts)} prompts")
    for name, workload, seconds in (
        ("grouped", grouped, grouped_s),
        ("one by one", single, single_s),
    ):
        print(f"{name:>10}: {seconds:7.2f} s, {workload.loads} loads, {workload.forwards} forwards")
    print(f"     ratio: {single_s / grouped_s:7.2f}")
    print(f"largest difference of a value: {difference:.1e}")


if __name__ == "__main__":
    main()
