"""The examples of trainings: what they cannot do, how they resume, and a GPU's precision."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from examples import mini_pythia, train_ddp, train_trees
from hpc_toolkit.errors import HpcToolkitError, PermanentError
from hpc_toolkit.science.workloads.text_tasks import training_stories
from hpc_toolkit.training.distributed import DistributedInfo
from tests.integration.realrun import REPOSITORY, Hpctk, wait_until
from tests.integration.startedranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = REPOSITORY / "examples" / "train_ddp.py"
STEPS = 20
QUICK = (
    *("--model", "plain", "--texts", "40", "--batch-size", "8", "--steps", str(STEPS)),
    *("--optimizer", "sgd", "--lr", "0.5", "--precision", "float32"),
)


def losses_of(output: Path) -> dict[int, float]:
    """The loss of each step."""
    lines = map(json.loads, (output / "loss.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process left: its losses, and tokens for others."""
    output = tmp_path_factory.mktemp("one")
    [printed] = run_ranks(1, PROGRAM, "--output", str(output), *QUICK)
    assert json.loads(printed)["world_size"] == 1
    losses = losses_of(output)
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1]
    return output


def test_what_the_ranks_or_the_device_cannot_do_is_named() -> None:
    args = train_ddp.arguments().parse_args(["--batch-size", "8", "--accumulate", "2"])

    assert train_ddp.batch_per_pass(args, DistributedInfo(world_size=2)) == 2
    with pytest.raises(HpcToolkitError, match="8 has no equal part for each of 6 passes") as caught:
        train_ddp.batch_per_pass(args, DistributedInfo(world_size=3))
    assert "3 ranks times --accumulate 2" in caught.value.hint
    args.texts = 0
    with pytest.raises(HpcToolkitError, match="--texts 0 leaves nothing"):
        train_ddp.batch_per_pass(args, DistributedInfo())
    args.texts = None
    args.accumulate = 0
    with pytest.raises(
        HpcToolkitError, match="--accumulate 0 is not a number of forward passes above 0"
    ):
        train_ddp.batch_per_pass(args, DistributedInfo())
    with pytest.raises(HpcToolkitError, match="--batch-size 9 is more than the 8 sequences"):
        train_ddp.check_texts(9, 8)
    train_ddp.check_texts(8, 8)
    with pytest.raises(HpcToolkitError, match="fp16 needs a GPU"):
        train_ddp.autocast_dtype("fp16", "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_a_gpu_trains_with_nccl_in_mixed_precision(
    precision: str, tmp_path: Path, alone: Path
) -> None:
    shutil.copytree(alone / "data", tmp_path / "data")
    options = ("--output", str(tmp_path), *QUICK, "--precision", precision)
    launch = ("launch", "--nproc-per-node", "1", "--backend", "nccl")
    ended = subprocess.run(
        [sys.executable, "-m", "hpc_toolkit", *launch, str(PROGRAM), *options],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )

    summary = json.loads(ended.stdout[ended.stdout.index("{") :])
    assert (summary["backend"], summary["device"]) == ("nccl", "cuda:0")
    assert summary["precision"] in ("bfloat16", "float16")
    assert summary["peak_gpu_bytes"] > 0
    one, found = losses_of(alone), losses_of(tmp_path)
    assert max(abs(found[step] - one[step]) for step in one) < 0.2


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


trees = pytest.mark.skipif(
    not all(map(find_spec, ("sklearn", "xgboost", "lightgbm"))), reason="needs their libraries"
)
FEW = ("--rows", "600", "--features", "8", "--checkpoint-every", "3")


def trained(*options: str, printed: Any) -> dict[str, Any]:
    assert train_trees.main([*FEW, *options]) == 0
    found: dict[str, Any] = json.loads(printed.readouterr().out)
    return found


@trees
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


@trees
def test_a_signal_saves_the_trees_and_asks_for_another_start(tmp_path: Path) -> None:
    many = ("--rounds", "100000", "--output", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "examples/train_trees.py"), *FEW, *many],
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


def train(root: Path, **options: Any) -> dict[str, Any]:
    item = {"size": "mini-s", "root": str(root), "steps": [0, 1, 3], "texts": 60, **options}
    return mini_pythia.train(item)


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("once")
    value = train(root)
    assert value["trained"]
    assert value["loss"] < value["first_loss"]
    json.dumps(value, allow_nan=False)
    return root


def test_training_again_elsewhere_gives_the_same_bytes(once: Path, tmp_path: Path) -> None:
    train(tmp_path)

    assert contents(tmp_path) == contents(once)


def test_training_cut_off_goes_on_to_the_same_bytes(once: Path, tmp_path: Path) -> None:
    shutil.copytree(once / "mini-s/step0", tmp_path / "mini-s/step0")
    (tmp_path / "mini-s/.step1.0badc0de").mkdir()
    (tmp_path / "mini-s/step3").mkdir()  # without its last file: not whole

    train(tmp_path)

    assert contents(tmp_path) == contents(once)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "mini-x"}, "no size 'mini-x'"),
        ({"steps": []}, r"steps must increase from 0, got \[\]"),
        ({"steps": [0, 4, 2]}, "steps must increase"),
        ({"steps": [1, 2]}, "steps must increase"),
    ],
)
def test_training_of_what_makes_no_sense_is_permanent(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PermanentError, match=message):
        train(tmp_path, **options)


def test_prompts_are_sentences_that_are_not_trained_on(tmp_path: Path) -> None:
    prompts = mini_pythia.write_prompts(tmp_path / "data/prompts.txt")

    stories = " ".join(" ".join(training_stories()).split())
    assert (tmp_path / "data/prompts.txt").read_text().splitlines() == prompts
    assert len(prompts) == len(set(prompts)) == mini_pythia.PROMPTS
    assert not [prompt for prompt in prompts if prompt in stories]
