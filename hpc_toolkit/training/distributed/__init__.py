"""The parts of torch.distributed that a training script needs.

Each function is a few lines around torch, and its docstring names the call. All of them also work
in a process without a launcher, as with one rank: the same script runs on a laptop, under ``hpctk
launch`` or torchrun, and as a task of srun. torch is imported when the first of them is called.
"""

from __future__ import annotations

from hpc_toolkit.errors import TRY_AGAIN
from hpc_toolkit.training.distributed.checkpoints import Checkpoints, Restored, StopSignal
from hpc_toolkit.training.distributed.group import (
    DistributedInfo,
    ResumableSampler,
    accumulating,
    all_reduce,
    get_distributed_info,
    leave,
    process_group,
    unwrapped,
    wrap_model,
)

__all__ = [
    "TRY_AGAIN",
    "Checkpoints",
    "DistributedInfo",
    "Restored",
    "ResumableSampler",
    "StopSignal",
    "accumulating",
    "all_reduce",
    "get_distributed_info",
    "leave",
    "process_group",
    "unwrapped",
    "wrap_model",
]
