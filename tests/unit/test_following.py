"""Items that follow a stage or single items, whatever each process sees (rule R17)."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.queue.graph import FollowingItems, following
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.view import RunView, StageView
from hpc_toolkit.results.explain import retry_failed
from hpc_toolkit.run import create_run
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.worker.stages import with_items
from tests.toyrun import ToyWorker, spec_of, units_of

ITEMS = [{"lr": lr, "seed": seed} for lr in (1, 2) for seed in (0, 1)]
STAGES = (
    spec_of("train", max_attempts=2),
    spec_of("evaluate", after=("train",), max_attempts=2),
    spec_of("rank", after=("evaluate",), by=("lr",), max_attempts=2),
    spec_of("summary", after=("rank", "train"), by=(), max_attempts=2),
)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["logs", "journals", "publish", "publish", "run", "run", "run", "retry"]),
        st.integers(0, 30),
        st.sampled_from(["done", "done", "done", "failed", "permanent"]),
        st.integers(1, 3),
    ),
    max_size=60,
)

MOST_ENTRIES = 60
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def ends(log: StageLog) -> None:
    """Fail when segments are added without an end, which a test cannot wait for."""
    add = log.add_segment

    def added(*given: Any, **more: Any) -> bool:
        assert log.length < MOST_ENTRIES
        return add(*given, **more)

    log.add_segment = added  # type: ignore[method-assign]


class World:
    """Three processes that read and work on one run."""

    def __init__(self, root: Path, manifest: Manifest, items: dict[str, Any]) -> None:
        with units_of(2):
            self.run = create_run(root, manifest, items, sealed=True)
        self.views = [self.fresh() for _ in range(3)]
        self.made = [following(view) for view in self.views]
        self.workers = [ToyWorker(self.run.paths, f"w{number}") for number in range(3)]
        self.values = itertools.count()
        self.told: dict[tuple[str, int, int], list[Any]] = {}
        for view in self.views:
            view.poll()
            for stage in view.stages.values():
                ends(stage.log)

    def fresh(self) -> RunView:
        return RunView(self.run.paths, self.run.manifest)

    def step(self, who: int, action: str, which: int, kind: str, generation: int) -> None:
        view = self.views[who]
        if action == "logs":
            view.poll_logs()
        elif action == "journals":
            view.poll_journals()
        elif action == "publish":
            self.publish(who)
            self.check()
        elif action == "retry":
            self.retry()
        else:
            every = [
                (name, unit, item)
                for name, stage in view.stages.items()
                for unit, state in stage.state.units.items()
                for item in state.unit.items
            ]
            self.attempt(who, *every[which % len(every)], kind, generation)

    def attempt(
        self, who: int, name: str, unit: str, item: int, kind: str, generation: int
    ) -> None:
        ref = name, self.views[who].stages[name].unit(unit).entry, item
        if kind != "done" and ref in self.told:
            return  # of a done item no more attempts are expected
        worker = self.workers[who]
        worker.begin(unit, generation)
        worker.unit = f"{name}/{unit}"
        if kind == "done":
            value = next(self.values)
            self.told.setdefault(ref, []).append(value)
            worker.attempt(item, value=value)
        else:
            worker.attempt(item, kind)
        worker.journal.sync()

    def run_pending(self, generation: int) -> None:
        """Let the first process finish what it knows of, and read the results."""
        self.views[0].poll()
        for name, stage in self.views[0].stages.items():
            for unit in sorted(stage.state.open):
                for item in stage.state.pending(unit):
                    self.attempt(0, name, unit, item, "done", generation)
        self.views[0].poll()

    def publish(self, who: int) -> bool:
        published = [one.publish(0.0) for one in self.made[who].values()]
        return any(published)

    def counts(self) -> list[int]:
        """How many items each stage has."""
        view = self.fresh()
        view.poll()
        return [sum(s.count for s in one.log.segments.values()) for one in view.stages.values()]

    def retry(self) -> int:
        view = self.fresh()
        return sum(retry_failed(view, stage) for stage in view.stages.values())

    def finish(self) -> None:
        """What one living worker does in the end."""
        for generation in range(4, 40):
            self.retry()
            self.run_pending(generation)
            self.check()
            if not self.publish(0) and self.views[0].complete:
                break
        else:
            raise AssertionError("the run does not end")
        self.check()
        view = self.fresh()
        view.poll()
        assert view.complete
        assert all(one.is_over for one in following(view).values())

    def check(self) -> None:
        raise NotImplementedError


class Stages(World):
    """Stages of which each takes the results of one before."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, Manifest(run="run", stages=STAGES), {"train": ITEMS})

    def check(self) -> None:
        view = self.fresh()
        view.poll()
        items = {
            (name, entry, position): item
            for name, stage in view.stages.items()
            for entry, segment in stage.log.segments.items()
            for unit in segment.units
            for position, item in zip(unit.items, segment.read(unit)[1], strict=True)
        }
        for stage in view.stages.values():
            origins = [
                str(one) for segment in stage.log.segments.values() for one in segment.origins
            ]
            assert len(set(origins)) == len(origins), stage.spec.name
        for (name, _, _), item in items.items():
            for before in ("train", "evaluate", "rank"):
                value = item.get(before, [])
                results = [value] if isinstance(value, int) else [row["value"] for row in value]
                known = {
                    one for ref, values in self.told.items() if ref[0] == before for one in values
                }
                assert set(results) <= known, (name, item)
                assert len(set(results)) == len(results)
            if name == "rank":
                assert [row["item"]["lr"] for row in item["evaluate"]] == [item["lr"]] * 2
            if name == "summary":
                assert (len(item["rank"]), len(item["train"])) == (2, 4)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_r17_everything_is_made_once_of_true_results_whatever_each_process_sees(
    steps: list[tuple[int, str, int, str, int]],
) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        world = Stages(Path(directory) / "run")
        for step in steps:
            world.step(*step)
        world.finish()
        assert world.counts() == [4, 4, 2, 1]


def test_r17_a_retry_revives_what_was_skipped_also_after_the_seal(tmp_path: Path) -> None:
    world = Stages(tmp_path / "run")
    view = world.views[0]

    world.attempt(0, "train", "000001-2", 3, "permanent", 1)
    for _ in range(5):
        world.run_pending(1)
        world.publish(0)
    assert (world.counts(), view.complete) == ([4, 3, 1, 0], True)

    assert world.retry() == 1
    view.poll()
    world.attempt(0, "train", "000001-2", 3, "done", 2)
    view.poll()
    # Another worker may make the evaluation, so this one waits, and makes nothing of the others.
    assert not any([one.publish(0.0, patience_s=1.0) for one in world.made[0].values()])  # noqa: C419
    assert world.counts() == [4, 3, 1, 0]

    world.finish()
    assert world.counts() == [4, 4, 2, 1]


@pytest.mark.parametrize("same", [True, False])
def test_r17_a_worker_that_loses_a_race_adds_its_segment_behind_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, same: bool
) -> None:
    world = Stages(tmp_path / "run")
    for who, unit in enumerate(("000001-0", "000001-2")):
        world.attempt(who, "train", unit, 2 * who, "done", 1)
        world.views[who].poll_journal("w0" if same else f"w{who}")
    mine, other = (world.made[who]["evaluate"] for who in range(2))
    log = world.views[0].stages["evaluate"].log
    append, write = log.append, log.write_payload
    written: list[str] = []

    def append_late(target: str) -> bool:
        if world.views[1].stages["evaluate"].log.length == 0:
            assert other.publish(0.0)
        return append(target)

    def write_noted(kind: str, suffix: str, chunks: Iterable[bytes]) -> str:
        written.append(write(kind, suffix, chunks))
        return written[-1]

    monkeypatch.setattr(log, "append", append_late)
    monkeypatch.setattr(log, "write_payload", write_noted)
    assert mine.publish(0.0) is not same

    world.check()
    world.views[2].poll()
    segments = world.views[2].stages["evaluate"].log.segments
    assert [one.count for one in segments.values()] == ([1] if same else [1, 1])
    # The file of the loser is used as it is, or not left behind.
    assert len(written) == 1
    assert len([*log.paths.items.iterdir()]) == len(segments)


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


@settings(max_examples=40, deadline=None)
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
