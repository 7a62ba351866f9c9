"""In which order a worker looks: what an interruption left first, at a price that is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.run import Run
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

NOTHING = ("", None)


class Choosing:
    """A worker of a job, on a shared filesystem."""

    def __init__(self, toy: ToyRun, *, restart: int, workers: int = 4) -> None:
        clock = ManualClock()
        self.pacing = Pacing(clock, local=False, workers=workers, lease_s=60.0, seed="me")
        liveness = Liveness(
            toy.paths, clock, host="h", boot="b", lease_s=60.0, job="7", restart=restart
        )
        self.worker = toy.worker("me", job="7", restart=restart)
        view = RunView(toy.paths, toy.run.manifest)
        self.picker = Picker(view, liveness, clock, "me", shared=True, restarted=restart > 0)
        self._view = view

    def next(self) -> tuple[str, int] | None:
        """Take a unit and finish it."""
        found: Assignment | None = self.picker.next(NOTHING, self.pacing)
        if found is None:
            return None
        self.worker.begin(found.unit.name, found.generation)
        for item in found.stage.state.pending(found.unit.name):
            self.worker.attempt(item)
        self.worker.release()
        self._view.poll_journal("me")
        return found.unit.name, found.generation


@pytest.fixture
def interrupted(fast_dir: Path) -> ToyRun:
    """Of 40 units ten were begun by a job of ten workers that was preempted."""
    toy = ToyRun(fast_dir / "r", 80, unit=2)
    for number in range(10):
        worker = toy.worker(f"w{number}", job="7")
        worker.claim(toy.unit_name(2 * number))
        worker.attempt(2 * number)
        worker.release()
        worker.finish()
    return toy


def test_a_worker_takes_what_needs_more_nodes_or_cpus_first(fast_dir: Path) -> None:
    needs = [{"cpus": 1}, {"cpus": 8}, {"nodes": 2, "cpus": 1}, {"gpus": 1}]
    items = [{"n": number, "needs": one} for number, one in enumerate(needs)]
    view = Run.create(fast_dir / "r", items, command="true").view
    clock = ManualClock()
    liveness = Liveness(view.paths, clock, host="h", boot="b", lease_s=60.0)
    picker = Picker(view, liveness, clock, "me", shared=True)
    pacing = Pacing(clock, local=True, workers=1, lease_s=60.0, seed="me")

    found = [picker.next(NOTHING, pacing) for _ in items]

    names = [one.unit.name if one is not None else "" for one in found]
    assert [view.stages["items"].state.pending(name)[0] for name in names] == [2, 3, 1, 0]


def begun(toy: ToyRun) -> set[tuple[str, int]]:
    return {(toy.unit_name(2 * number), 2) for number in range(10)}


def test_a_worker_of_a_job_that_started_again_goes_on_with_what_was_begun(
    interrupted: ToyRun,
) -> None:
    one = Choosing(interrupted, restart=1)

    found = {one.next() for _ in range(10)}

    assert found == begun(interrupted)
    after = one.next()
    assert after is not None
    assert after[1] == 1


def test_a_worker_of_a_job_that_started_once_takes_what_nobody_began(interrupted: ToyRun) -> None:
    found = Choosing(interrupted, restart=0).next()

    assert found is not None
    assert found[1] == 1


def test_a_death_nearby_is_cared_for_before_a_group_is_begun(interrupted: ToyRun) -> None:
    one = Choosing(interrupted, restart=0)
    assert one.next() not in begun(interrupted)
    one.picker.help_first = True

    found = {one.next() for _ in range(10)}

    assert found == begun(interrupted)
