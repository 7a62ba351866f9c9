"""Items that follow single items, for processes with old views, failures and retries (rule R17)."""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.queue.followingitems import FollowingItems, following
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.explain import retry_failed
from hpc_toolkit.run import create_run
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.worker.arguments import with_items
from tests.toyrun import ToyWorker, spec_of, units_of

ACTIONS = ["logs", "journals", "publish", "publish", "run", "run", "run", "retry"]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(ACTIONS),
        st.integers(0, 30),
        st.sampled_from(["done", "done", "done", "failed", "permanent"]),
        st.integers(1, 3),
    ),
    max_size=60,
)
GRAPHS = st.integers(1, 12).flatmap(
    lambda count: st.tuples(*(st.sets(st.integers(0, at - 1)) for at in range(1, count)))
)


class World:
    """Three processes that read and work on one list."""

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
        self.manifest = Manifest(run="run", stages=(spec,))
        with units_of(2):
            self.run = create_run(root, self.manifest, {"items": lines}, sealed=True)
        self.views = [RunView(self.run.paths, self.manifest) for _ in range(3)]
        self.made = [following(view)["items"] for view in self.views]
        self.workers = [ToyWorker(self.run.paths, f"w{number}") for number in range(3)]
        self.values = itertools.count()
        self.told: dict[int, list[int]] = {}
        for view in self.views:
            view.poll()

    def attempt(self, who: int, unit: str, item: int, kind: str, generation: int) -> None:
        stage = self.views[who].stages["items"]
        number = stage.log.segments[stage.unit(unit).entry].number(item)
        if kind != "done" and number in self.told:
            return  # of a done item no more attempts are expected
        worker, value = self.workers[who], next(self.values)
        worker.begin(unit, generation)
        if kind == "done":
            self.told.setdefault(number, []).append(value)
            worker.attempt(item, value=value)
        else:
            worker.attempt(item, kind)
        worker.journal.sync()

    def step(self, who: int, action: str, which: int, kind: str, generation: int) -> None:
        view = self.views[who]
        if action == "logs":
            view.poll_logs()
        elif action == "journals":
            view.poll_journals()
        elif action == "publish":
            self.made[who].publish(0.0)
            self.check()
        elif action == "retry":
            self.retry()
        else:
            units = view.stages["items"].state.units
            every = [(unit, item) for unit, one in units.items() for item in one.unit.items]
            self.attempt(who, *every[which % len(every)], kind, generation)

    def retry(self) -> None:
        view = RunView(self.run.paths, self.manifest)
        retry_failed(view, view.stages["items"])

    def finish(self) -> None:
        for generation in range(4, 40):
            self.retry()
            view = self.views[0]
            view.poll()
            state = view.stages["items"].state
            for unit in sorted(state.open):
                for item in state.pending(unit):
                    self.attempt(0, unit, item, "done", generation)
            view.poll()
            if not self.made[0].publish(0.0) and view.complete:
                return
        raise AssertionError("the run does not end")

    def added(self) -> list[dict[str, Any]]:
        view = RunView(self.run.paths, self.manifest)
        view.poll()
        segments = view.stages["items"].log.segments.values()
        return [item for one in segments for unit in one.units for item in one.read(unit)[1]]

    def check(self) -> None:
        added = self.added()
        ids = [item["id"] for item in added]
        assert len(set(ids)) == len(ids)
        numbers = {item["id"]: number for number, item in enumerate(self.items)}
        after = {item["id"]: item.get("after", []) for item in self.items}
        wanted = {item["id"]: item.get("needs", {}) for item in self.items}
        view = RunView(self.run.paths, self.manifest)
        view.poll()
        stage, (made,) = view.stages["items"], following(view).values()
        for segment in stage.log.segments.values():
            for unit in segment.units:
                needs = stage.specs.of(unit).needs or {}
                items = segment.read(unit)[1]
                assert len(self.items) == 1 or all(wanted[one["id"]] == needs for one in items)
        assert isinstance(made, FollowingItems)
        made.coming({})  # it reads what was added
        assert made.wants.total() == (len(self.items) - len(added) if made.graph.wants else 1)
        for item in added:
            assert list(map(int, item["results"])) == after[item["id"]]
            for one, value in item["results"].items():
                assert value in self.told[numbers[int(one)]]


@settings(max_examples=60, deadline=None)
@given(GRAPHS, st.integers(0, 9), STEPS)
def test_r17_each_item_is_added_once_with_true_results_whatever_each_process_sees(
    before: tuple[set[int], ...], seed: int, steps: list[tuple[int, str, int, str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory) / "run", before, seed)
        for step in steps:
            world.step(*step)
        world.finish()
        world.check()

        assert len(world.added()) == len(world.items)
        view = RunView(world.run.paths, world.manifest)
        view.poll()
        assert following(view)["items"].is_over
        assert view.complete
