"""The tree example: all granted cores, and trees that grow on where they were left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for needed in ("sklearn", "xgboost", "lightgbm"):
    pytest.importorskip(needed)

from examples import train_trees  # noqa: E402 - only where its libraries are
from tests.integration.realrun import REPOSITORY, wait_until  # noqa: E402

SMALL = ("--rows", "600", "--features", "8", "--checkpoint-every", "3")


def trained(*options: str, printed: Any) -> dict[str, Any]:
    assert train_trees.main([*SMALL, *options]) == 0
    found: dict[str, Any] = json.loads(printed.readouterr().out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_trees_that_grew_on_are_those_that_were_never_left(
    library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def model(name: str, rounds: int) -> dict[str, Any]:
        options = ("--library", library, "--output", str(tmp_path / name))
        return trained(*options, "--rounds", str(rounds), printed=capsys)

    whole = model("whole", 7)
    assert model("parts", 3)["rounds"] == 3
    parts = model("parts", 7)

    assert (whole["resumed_from"], parts["resumed_from"]) == (0, 3)
    assert whole["test_error"] < 0.3
    assert whole["threads"] == train_trees.granted_cores()
    [file] = os.listdir(tmp_path / "whole")
    assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


@pytest.mark.slow
def test_a_signal_saves_the_trees_and_asks_for_another_start(tmp_path: Path) -> None:
    many = ("--rounds", "100000", "--output", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "examples/train_trees.py"), *SMALL, *many],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        wait_until((tmp_path / "xgboost.json").exists, "a saved model")
        process.send_signal(signal.SIGUSR1)
        assert process.wait() == 75
    finally:
        process.kill()
        process.wait()

    left = (tmp_path / "xgboost.json").read_bytes()
    saved = train_trees.XGBoostTrees(1, train_trees.made_data(600, 8)[0], left)
    assert 0 < saved.rounds() < 100_000
    assert saved.rounds() % 3 == 0
