"""Stages that follow others, for processes with old views, failures and retries (rule R17)."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.queue.followingitems import following
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.explain import retry_failed
from hpc_toolkit.run import create_run
from hpc_toolkit.rundir.layout import Manifest
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


class World:
    """Three processes that read and work on one run."""

    def __init__(self, root: Path) -> None:
        manifest = Manifest(run="run", stages=STAGES)
        with units_of(2):
            self.run = create_run(root, manifest, {"train": ITEMS}, sealed=True)
        self.views = [RunView(self.run.paths, manifest) for _ in range(3)]
        self.made = [list(following(view).values()) for view in self.views]
        self.workers = [ToyWorker(self.run.paths, f"w{number}") for number in range(3)]
        self.values = itertools.count()
        self.told: dict[tuple[str, int, int], list[Any]] = {}
        for view in self.views:
            view.poll()

    def run_item(self, who: int, which: int, kind: str, generation: int) -> None:
        view = self.views[who]
        every = [
            (name, unit, item)
            for name, stage in view.stages.items()
            for unit, state in stage.state.units.items()
            for item in state.unit.items
        ]
        name, unit, item = every[which % len(every)]
        if kind != "done" and (name, view.stages[name].unit(unit).entry, item) in self.told:
            return  # of a done item no more attempts are expected
        self.attempt(who, name, unit, item, kind, generation)

    def attempt(
        self, who: int, name: str, unit: str, item: int, kind: str, generation: int
    ) -> None:
        worker = self.workers[who]
        worker.begin(unit, generation)
        worker.unit = f"{name}/{unit}"
        if kind == "done":
            value = next(self.values)
            entry = int(unit.partition("-")[0])
            self.told.setdefault((name, entry, item), []).append(value)
            worker.attempt(item, value=value)
        else:
            worker.attempt(item, kind)
        worker.journal.sync()

    def publish(self, who: int) -> bool:
        published = [one.publish(0.0) for one in self.made[who]]
        return any(published)

    def retry(self) -> int:
        view = RunView(self.run.paths, self.run.manifest)
        return sum(retry_failed(view, stage) for stage in view.stages.values())

    def finish(self) -> None:
        """What one living worker does in the end."""
        for generation in range(4, 20):
            self.retry()
            self.views[0].poll()
            for name, stage in self.views[0].stages.items():
                for unit in sorted(stage.state.open):
                    for item in stage.state.pending(unit):
                        self.attempt(0, name, unit, item, "done", generation)
            self.views[0].poll()
            if not self.publish(0) and self.views[0].complete:
                return
        raise AssertionError("the run does not end")

    def check(self) -> None:
        view = RunView(self.run.paths, self.run.manifest)
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
            for key, before in (("train", "train"), ("evaluate", "evaluate"), ("rank", "rank")):
                value = item.get(key, [])
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

    def check_end(self) -> None:
        view = RunView(self.run.paths, self.run.manifest)
        view.poll()
        assert view.complete
        assert [
            sum(s.count for s in one.log.segments.values()) for one in view.stages.values()
        ] == [*(4, 4, 2, 1)]
        assert all(one.is_over for one in following(view).values())


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_r17_everything_is_made_once_of_true_results_whatever_each_process_sees(
    steps: list[tuple[int, str, int, str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory) / "run")
        for who, action, which, kind, generation in steps:
            view = world.views[who]
            if action == "logs":
                view.poll_logs()
            elif action == "journals":
                view.poll_journals()
            elif action == "publish":
                world.publish(who)
                world.check()
            elif action == "run":
                world.run_item(who, which, kind, generation)
            else:
                world.retry()
        world.finish()
        world.check()
        world.check_end()


def test_r17_a_retry_revives_what_was_skipped_also_after_the_seal(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    view = world.views[0]

    def counts() -> list[int]:
        view.poll()
        return [sum(s.count for s in one.log.segments.values()) for one in view.stages.values()]

    def run_all(generation: int) -> None:
        for _ in range(20):
            view.poll()
            for name, stage in view.stages.items():
                for unit in sorted(stage.state.open):
                    for item in stage.state.pending(unit):
                        world.attempt(0, name, unit, item, "done", generation)
            view.poll()
            if not world.publish(0):
                return

    world.attempt(0, "train", "000001-2", 3, "permanent", 1)
    run_all(1)
    assert (counts(), view.complete) == ([4, 3, 1, 0], True)

    assert world.retry() == 1
    view.poll()
    world.attempt(0, "train", "000001-2", 3, "done", 2)
    view.poll()
    # Another worker may make the evaluation, so this one waits, and makes nothing of the others.
    assert not any([one.publish(0.0, patience_s=1.0) for one in world.made[0]])  # noqa: C419
    assert counts() == [4, 3, 1, 0]
    run_all(3)

    world.check()
    world.check_end()


@pytest.mark.parametrize("same", [True, False])
def test_r17_a_worker_that_loses_a_race_adds_its_segment_behind_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, same: bool
) -> None:
    world = World(tmp_path / "run")
    for who, unit in enumerate(("000001-0", "000001-2")):
        world.attempt(who, "train", unit, 2 * who, "done", 1)
        world.views[who].poll_journal("w0" if same else f"w{who}")
    mine, other = world.made[0][0], world.made[1][0]
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
