"""The training example on one rank: what it cannot do, and mixed precision on a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from examples import train_ddp
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.training.distributed import DistributedInfo
from tests.integration.realrun import REPOSITORY
from tests.integration.startedranks import run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = REPOSITORY / "examples" / "train_ddp.py"
HPCTK = (sys.executable, "-m", "hpc_toolkit")
STEPS = 20
QUICK = (
    *("--model", "plain", "--texts", "40", "--batch-size", "8", "--steps", str(STEPS)),
    *("--optimizer", "sgd", "--lr", "0.5", "--precision", "float32"),
)


def lines(output: Path) -> list[dict[str, Any]]:
    path = output / "loss.jsonl"
    if not path.exists():
        return []
    # The last line may be in the making.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def losses(output: Path) -> dict[int, float]:
    """The loss of each step, the last one where it was made again."""
    return {line["step"]: line["loss"] for line in lines(output)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process left."""
    output = tmp_path_factory.mktemp("one")
    [printed] = run_ranks(1, PROGRAM, "--output", str(output), *QUICK)
    assert json.loads(printed)["world_size"] == 1
    return output


@pytest.fixture
def one(alone: Path, tmp_path: Path) -> dict[int, float]:
    """The losses of one process, whose tokens are there for others as well."""
    shutil.copytree(alone / "data", tmp_path / "data")
    found = losses(alone)
    assert list(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < found[1]
    return found


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
    precision: str, tmp_path: Path, one: dict[int, float]
) -> None:
    options = ("--output", str(tmp_path), *QUICK, "--precision", precision)
    launch = ("launch", "--nproc-per-node", "1", "--backend", "nccl")
    ended = subprocess.run(
        [*HPCTK, *launch, str(PROGRAM), *options],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )

    summary = json.loads(ended.stdout[ended.stdout.index("{") :])
    assert (summary["backend"], summary["device"]) == ("nccl", "cuda:0")
    assert summary["precision"] in ("bfloat16", "float16")
    assert summary["peak_gpu_bytes"] > 0
    found = losses(tmp_path)
    assert max(abs(found[step] - one[step]) for step in one) < 0.2
