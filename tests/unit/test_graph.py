"""Items that follow single items, for processes with old views, failures and retries (rule R17)."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.queue.followingitems import FollowingItems, following
from hpc_toolkit.queue.view import StageView
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.worker.arguments import with_items
from tests.toyrun import spec_of
from tests.unit.test_following import IN_MEMORY, STEPS, World

GRAPHS = st.integers(1, 12).flatmap(
    lambda count: st.tuples(*(st.sets(st.integers(0, at - 1)) for at in range(1, count)))
)


class Graph(World):
    """One list, of which each item follows some of those before."""

    def __init__(self, root: Path, before: tuple[set[int], ...], seed: int) -> None:
        self.items: list[dict[str, Any]] = [{"id": 0}]
        self.items += [{"id": at, "after": sorted(one)} for at, one in enumerate(before, 1)]
        draw = random.Random(seed)
        draw.shuffle(self.items)
        for item in self.items:
            item.update({"needs": {"licence": n}} if (n := draw.randrange(3)) else {})
        spec, lines = with_items(spec_of(max_attempts=2), self.items)
        if not spec.after:
            spec, lines = with_items(spec_of(max_attempts=2), [{"id": 0, "after": []}])
        super().__init__(root, Manifest(run="run", stages=(spec,)), {"items": lines})

    def check(self) -> None:
        view = self.fresh()
        view.poll()
        stage, (made,) = view.stages["items"], following(view).values()
        wanted = {item["id"]: item.get("needs", {}) for item in self.items}
        added = []
        for segment in stage.log.segments.values():
            for unit in segment.units:
                needs = stage.specs.of(unit).needs or {}
                items = segment.read(unit)[1]
                assert len(self.items) == 1 or all(wanted[one["id"]] == needs for one in items)
                added += items
        assert len({item["id"] for item in added}) == len(added)
        assert isinstance(made, FollowingItems)
        made.coming({})  # it reads what was added
        assert made.wants.total() == (len(self.items) - len(added) if made.graph.wants else 1)
        self.check_results(added, stage)

    def check_results(self, added: list[dict[str, Any]], stage: StageView) -> None:
        numbers = {item["id"]: number for number, item in enumerate(self.items)}
        after = {item["id"]: item.get("after", []) for item in self.items}
        told = {
            stage.log.segments[entry].number(item): values
            for (_, entry, item), values in self.told.items()
        }
        for item in added:
            assert list(map(int, item["results"])) == after[item["id"]]
            for one, value in item["results"].items():
                assert value in told[numbers[int(one)]]


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.integers(0, 9), STEPS)
def test_r17_each_item_is_added_once_with_true_results_whatever_each_process_sees(
    before: tuple[set[int], ...], seed: int, steps: list[tuple[int, str, int, str, int]]
) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        world = Graph(Path(directory) / "run", before, seed)
        for step in steps:
            world.step(*step)
        world.finish()
        assert world.counts() == [len(world.items)]
