"""``hpctk doctor`` as a user starts it: alone, killed, as two tasks of a step, beside a run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace as fake  # noqa: N813 - it is called as a function

import pytest

from hpc_toolkit.doctor import node
from tests.integration.realrun import Ended, Hpctk, wait_until
from tests.toyrun import ToyRun

STEP = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with nothing in it."""
    place = tmp_path / "place"
    place.mkdir()
    return place


def test_an_examination_that_is_asked_to_end_cleans_up_itself(hpctk: Hpctk, place: Path) -> None:
    started = hpctk.start("doctor", place)
    wait_until(lambda: [*place.glob(".hpctk-doctor-*/said-other")], "both sides")

    started.send(signal.SIGTERM)

    assert started.ended().code == 128 + signal.SIGTERM
    assert os.listdir(place) == []


def test_two_tasks_of_a_step_examine_together_and_one_reports(hpctk: Hpctk, place: Path) -> None:
    env = [{**STEP, "SLURM_PROCID": f"{rank}", "HPCTK_HOST": f"n{rank}"} for rank in (1, 0)]
    tasks = [hpctk.start("doctor", place, "--json", env=one) for one in env]

    other, found = (task.ended() for task in tasks)

    assert other == Ended(0, "", "")
    assert (found.code, found.err) == (0, "")
    assert [side["host"] for side in found.json["sides"]] == ["n0", "n1"]
    assert found.json["apart"] is False, "two names of one kernel prove nothing"
    assert os.listdir(place) == []


def test_an_unsafe_run_exits_with_1_and_is_found_as_by_every_command_that_reads(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    toy = ToyRun(tmp_path / "run")
    env = {"HPCTK_RUN": str(toy.root)}
    assert hpctk("doctor", "--json", env=env).json["directory"] == str(toy.root)
    toy.stage_paths.entry(1).unlink()

    found = hpctk("doctor", env=env)

    assert (found.code, found.err) == (1, "")
    assert found.out.splitlines()[0] == f"{toy.root}: unsafe"
    assert "log (items)" in found.out


def test_a_gpu_that_computes_is_told_apart_from_one_that_errs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ones(_: int, device: int) -> fake:
        if device == 1:
            message = "CUDA error: out of memory\nCUDA kernel errors might be reported later"
            raise RuntimeError(message)
        return fake(sum=lambda: fake(item=lambda: 1.0))

    gpus = fake(init=lambda: None, device_count=lambda: 2)
    facts = {"__version__": "2.9", "version": fake(cuda="12.4"), "cuda": gpus}
    torch = fake(**facts, device=lambda _, index: index, ones=ones)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(node, "_be_quiet", lambda: None)

    found = node.look_by_torch()

    assert found["cuda"] == "12.4"
    assert found["gpus"] == ["", "CUDA error: out of memory"]
