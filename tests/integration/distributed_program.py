"""What each of three ranks does for the tests: one file of findings per rank."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.training import distributed


def collectives(rank: int) -> dict[str, Any]:
    own = torch.arange(6.0) + 10 * rank
    whole = torch.tensor([rank, 7])
    return {
        "sum": distributed.all_reduce(own).tolist(),
        "average": distributed.all_reduce(own, "average").tolist(),
        "whole": distributed.all_reduce(whole).tolist(),
        "argument": own.tolist(),
    }


def batches(rank: int) -> list[Tensor]:
    """The two batches of a rank."""
    generator = torch.Generator().manual_seed(17)
    every = [[torch.randn(5, 3, generator=generator) for _ in range(2)] for _ in range(3)]
    return every[rank]


def gradients(model: nn.Module) -> list[list[float]]:
    return [torch.flatten(one.grad).tolist() for one in model.parameters() if one.grad is not None]


def accumulated(rank: int) -> dict[str, Any]:
    """Gradients of two passes of which the first stays here."""
    torch.manual_seed(3)
    model = distributed.wrap_model(nn.Linear(3, 1), bucket_cap_mb=1)
    found: dict[str, Any] = {}
    for passed in range(2):
        with distributed.accumulating(model, passed, 2):
            torch.autograd.backward(model(batches(rank)[passed]).square().mean() / 2)
        found[f"after_{passed}"] = gradients(model)
    bare = copy.deepcopy(distributed.unwrapped(model))
    bare.zero_grad()
    losses = [bare(batches(other)[n]).square().mean() for other in range(3) for n in range(2)]
    torch.autograd.backward(torch.stack(losses).mean())
    found["whole"] = gradients(bare)
    return found


def checkpointed(rank: int, directory: Path) -> dict[str, Any]:
    """Draws behind a checkpoint, before and after it was restored, and what a bad place gives."""
    torch.manual_seed(rank)
    model = distributed.wrap_model(nn.Linear(3, 1))
    checkpoints = distributed.Checkpoints(directory / "checkpoints", {"model": model})
    checkpoints.save(3, which=rank)
    before = torch.rand(2).tolist()
    torch.manual_seed(100)
    restored = checkpoints.restore()
    assert restored is not None
    found = {
        "before": before,
        "after": torch.rand(2).tolist(),
        "step": restored.step,
        "which": restored.values["which"],
        "names": sorted(name for name in torch.load(restored.path)["parts"]["model"]),
    }
    if rank == 0:
        (directory / "file").write_text("in the way")
    try:
        distributed.Checkpoints(directory / "file", {"model": model}).save(1)
    except HpcToolkitError as error:
        found["refused"] = error.message
    return found


def stopped(rank: int) -> int:
    """The step after which this rank stops; only rank 2 gets a signal."""
    steps = 0
    with distributed.StopSignal(look_every_s=0.001) as stop:
        while not stop.agreed():
            steps += 1
            if rank == 2 and steps == 5:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert steps < 100_000
    return steps


def main() -> None:
    directory = Path(sys.argv[1])
    with distributed.process_group("gloo", timeout_s=60) as info:
        findings = {
            "info": [info.rank, info.world_size, info.backend, info.device],
            "collectives": collectives(info.rank),
            "accumulated": accumulated(info.rank),
            "checkpointed": checkpointed(info.rank, directory),
            "stopped": stopped(info.rank),
            "samples": list(distributed.ResumableSampler(range(9))),
        }
        (directory / f"{info.rank}.json").write_text(json.dumps(findings))
        if info.rank == 1:
            message = "rank 1 fails"
            raise ValueError(message)
        try:
            distributed.all_reduce(torch.ones(1))
        except RuntimeError:
            sys.exit(1)


if __name__ == "__main__":
    main()
