"""'hpctk scaling run -- train.py' measures a user's own training."""

from __future__ import annotations

import json

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling.recorder import Recorder

pytest.importorskip("torch", reason="the extra torch is not installed")
from tests.integration.realrun import Hpctk

RECORDED = """
import time
from hpc_toolkit.training.scaling.recorder import Recorder

recorder = Recorder(batch_per_rank=4, warmup=1)
for step in range(6):
    time.sleep(0.02)
    recorder.step(loss=1 / (step + 1))
recorder.finish()
"""


def test_training_that_records_its_steps_is_compared(hpctk: Hpctk) -> None:
    (hpctk.cwd / "train.py").write_text(RECORDED)
    own = ("--world-sizes", "1,2", "--repeats", "2", "--", "train.py")
    done = hpctk("scaling", "run", "-o", "out", *own)
    assert done.code == 0, done
    again = hpctk("scaling", "run", "-o", "out", *own)
    assert (again.code, again.out) == (0, done.out), again
    assert "world size" not in again.err
    other = hpctk("scaling", "run", "-o", "out", *own, "--lr", "9")
    assert "out has measurements of another command" in other.err

    found = hpctk("scaling", "analyze", "out", "--json")

    assert '"law": "weak"' in found.out
    lines = (hpctk.cwd / "out/records/world-2.jsonl").read_text().splitlines()
    assert [json.loads(line)["repeat"] for line in lines] == [0, 1]
    # Two ranks of 4 samples each, in at least 20 ms.
    assert all(0 < json.loads(line)["samples_per_s"] <= 2 * 4 / 0.02 for line in lines)
    assert json.loads(lines[0])["loss"] == pytest.approx(1 / 6)


def test_training_that_records_nothing_is_refused(hpctk: Hpctk) -> None:
    (hpctk.cwd / "train.py").write_text("print('no numbers')")
    asked = ("run", "--world-sizes", "1", "--repeats", "1")

    silent = hpctk("scaling", *asked, "-o", "c", "--", "train.py")
    assert "train.py recorded no speed on 1 rank" in silent.err


def test_batch_of_a_step_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({}, {"batch_per_rank": 1, "batch_global": 1}, {"batch_global": 0}):
        with pytest.raises(ConfigError, match="batch_per_rank="):
            Recorder(**given)

    monkeypatch.setenv("WORLD_SIZE", "4")
    recorder = Recorder(batch_global=8, warmup=5)
    recorder.step(loss=float("nan"))
    with pytest.raises(ConfigError, match="1 steps were recorded, and 5 are warm-up"):
        recorder.finish()
