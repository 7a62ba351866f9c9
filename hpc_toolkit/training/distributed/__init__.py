"""The parts of torch.distributed that a training script needs.

Each function is a few lines around torch, and its docstring names the call. All of them also work
in a process without a launcher, as with one rank: the same script runs on a laptop, under ``hpctk
launch`` or torchrun, and as a task of srun. torch is imported when the first of them is called.
"""

from __future__ import annotations

from hpc_toolkit.errors import TRY_AGAIN
from hpc_toolkit.training.distributed.batches import (
    ResumableSampler,
    Scaled,
    accumulating,
    gradient_checkpointing,
    scaled,
    unwrapped,
    wrap_model,
)
from hpc_toolkit.training.distributed.checkpoints import Checkpoints, Restored, StopSignal
from hpc_toolkit.training.distributed.group import (
    DistributedInfo,
    all_gather,
    all_reduce,
    broadcast,
    get_distributed_info,
    leave,
    process_group,
    rank_logging,
)

__all__ = [
    "TRY_AGAIN",
    "Checkpoints",
    "DistributedInfo",
    "Restored",
    "ResumableSampler",
    "Scaled",
    "StopSignal",
    "accumulating",
    "all_gather",
    "all_reduce",
    "broadcast",
    "get_distributed_info",
    "gradient_checkpointing",
    "leave",
    "process_group",
    "rank_logging",
    "scaled",
    "unwrapped",
    "wrap_model",
]
