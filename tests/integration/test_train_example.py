"""The training to copy resumes in the middle of an epoch as if nothing had happened."""

from __future__ import annotations

import re
import signal

import pytest

pytest.importorskip("torch")

from pathlib import Path

from tests.integration.realrun import REPOSITORY, Hpctk, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.slow]

# 10 steps an epoch, and a checkpoint after steps 7, 14, 21 and 28. "hold" stops after step 16.
SMALL = """
import sys, time
from examples.new.training import train

def shown(line):
    print(line, flush=True)
    while "hold" in sys.argv and " step 16 " in line:
        time.sleep(0.1)

train.print = shown
raise SystemExit(train.main(epochs=3, batch=100, log_every=1, save_every=7))
"""


LAUNCH = ("launch", "--nproc-per-node", 2, "--backend", "gloo", "--run-dir", "run", "small.py")


def losses(printed: str) -> dict[int, str]:
    """The loss of each step, with all digits of float32."""
    return {int(step): loss for step, loss in re.findall(r" step (\d+) loss (\S+) ", printed)}


def test_a_killed_training_resumes_within_an_epoch_with_the_same_losses(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    (tmp_path / "small.py").write_text(SMALL)

    started = hpctk.start(*LAUNCH, "hold")
    wait_until(lambda: 16 in losses(started.printed()), "step 16")
    started.send(signal.SIGKILL)
    killed = losses(started.ended().out)
    again = hpctk(*LAUNCH)
    resumed = losses(again.out)

    assert again.code == 0, again.err
    assert list(killed) == list(range(1, 17))
    # It goes on after the checkpoint of step 14, and makes steps 15 and 16 again.
    assert list(resumed) == list(range(15, 31))
    assert [resumed[step] for step in (15, 16)] == [killed[step] for step in (15, 16)]


def test_the_tutorial_quotes_the_script_as_it_is() -> None:
    script = (REPOSITORY / "examples/new/training/train.py").read_text()
    tutorial = (REPOSITORY / "docs" / "how-to" / "launch.md").read_text()
    [section] = re.findall(r"^## A training to copy$(.*?)^## ", tutorial, re.MULTILINE | re.DOTALL)
    [table] = re.findall(r"^\| in the script \|(.*?)\n\n", section, re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)

    assert quoted
    assert [text for text in quoted if text not in script] == []
    assert f"has {len(script.splitlines())} lines" in section
