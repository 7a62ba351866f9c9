"""The training example, whose rank 1 sends itself a signal within a step: SIGNAL STEP ARGUMENTS."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from examples.train_ddp import Training, main
from hpc_toolkit.training.distributed import get_distributed_info, leave


def disturbed(number: signal.Signals, at: int) -> None:
    """Send the signal in the middle of step ``at``, in the first start alone."""
    plain, made = Training._step, [0]

    def step(self: Training, batches: Any) -> float:
        made[0] += 1
        info = get_distributed_info()
        if (info.rank, info.restart, made[0]) == (1, 0, at):
            os.kill(os.getpid(), number)
        return plain(self, batches)

    Training._step = step  # type: ignore[method-assign] # the disturbance


if __name__ == "__main__":
    disturbed(signal.Signals[sys.argv[1]], int(sys.argv[2]))
    leave(main(sys.argv[3:]))
