"""What an item says of the place where it ran."""

from __future__ import annotations

import os
import time
from typing import Any


def place(item: dict[str, Any]) -> dict[str, Any]:
    """Sleep, and say on which node, as which rank, with which GPUs."""
    time.sleep(item["seconds"])
    return {
        "host": os.uname().nodename,
        "node": os.environ["SLURMD_NODENAME"],
        "rank": int(os.environ["SLURM_PROCID"]),
        "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
    }
