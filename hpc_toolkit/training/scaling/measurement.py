"""Measure a training at one world size: its steps, its gradient exchange and its memory."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from hpc_toolkit.training.scaling.bandwidth import (
    MIB,
    expected_s,
    time_all_reduces,
    time_collective,
)
from hpc_toolkit.training.scaling.training import Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hpc_toolkit.training.distributed.place import DistributedInfo
    from hpc_toolkit.training.scaling.settings import Settings

_ITERATIONS = 5
"""How often the all-reduces are timed on their own."""

_LARGE = 16 * MIB
"""Message size for the bandwidth, in bytes; so large that latency does not matter."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of all ranks: the slowest rank's time of each, and the share of waiting for samples."""

    seconds: list[float]
    loading: float


def measure(settings: Settings, info: DistributedInfo) -> dict[str, Any]:
    """Measure one repeat; every rank calls it and gets the same numbers. Raises ConfigError."""
    _forget_peaks(info.device)
    training = Training(settings, info)
    training.steps(settings.warmup)
    # Half of the steps without exchange run before the steps with exchange, and half after them.
    # A machine that becomes slower or faster then affects both kinds equally.
    half = max(1, settings.max_steps // 4) if info.world_size > 1 else 0
    before = training.steps(half, exchange=False)
    _meet(info)
    steps = _gathered(training.steps(settings.max_steps), training.device)
    after = training.steps(half, exchange=False)
    before.seconds += after.seconds
    before.loading += after.loading
    communication: dict[str, Any] = {}
    if info.world_size > 1:
        apart = _gathered(before, training.device)
        communication = _exchange(training, steps, apart, info)
    samples = training.batch * settings.accumulate * info.world_size * settings.max_steps
    total = math.fsum(steps.seconds)
    return {
        "samples_per_s": samples / total,
        "tokens_per_s": samples * settings.seq_length / total,
        "step_s": {
            "mean": mean(steps.seconds),
            "median": median(steps.seconds),
            "p90": _p90(steps.seconds),
        },
        "shares": {
            "loading": steps.loading,
            "communication": communication.get("share", 0.0),
        },
        "communication": communication,
        "memory": _memory(info, training.device),
        "batch_per_rank": training.batch,
        "parameters": training.parameters,
        "trained_parameters": sum(one.numel() for one in training.trained),
    }


def _exchange(
    training: Training, steps: _Steps, apart: _Steps, info: DistributedInfo
) -> dict[str, Any]:
    """Return the cost of exchanging gradients, measured in three ways."""
    typical = median(steps.seconds)
    exposed = typical - median(apart.seconds)
    with_it, without = median_interval(steps.seconds), median_interval(apart.seconds)
    timed = time_collective("all_reduce", _LARGE, device=training.device, iterations=_ITERATIONS)
    size = training.gradient_bytes
    return {
        "gradient_bytes": size,
        # The time that the exchange adds to a step; noise can make it negative.
        "exposed_s": exposed,
        "share": min(max(exposed / typical, 0.0), 1.0),
        # From the worst ends of both intervals, so at least 95 %; a value below 0 is noise.
        "share_low": 1 - without[1] / with_it[0],
        "share_high": 1 - without[0] / with_it[1],
        "all_reduce_s": time_all_reduces(
            training.buckets(), device=training.device, iterations=_ITERATIONS
        ),
        "bus_bytes_per_s": timed.bus_bytes_per_s,
        "expected_s": expected_s(size, info.world_size, timed.bus_bytes_per_s),
    }


def _gathered(times: Any, device: torch.device) -> _Steps:
    import torch

    from hpc_toolkit.training.distributed.collectives import all_gather

    own = torch.tensor([times.seconds, times.loading], dtype=torch.float64, device=device)
    ranks = all_gather(own)
    waited = (ranks[:, 1].sum() / ranks[:, 0].sum()).item()
    return _Steps(ranks[:, 0].max(dim=0).values.tolist(), float(waited))


def _meet(info: DistributedInfo) -> None:
    if info.world_size > 1:
        import torch.distributed as dist

        dist.barrier()


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median from order statistics, for any distribution of times.

    With fewer than 6 values it is the minimum and the maximum, which cover less than 95 %.
    """
    ordered, count = sorted(values), len(values)
    outside, below = 0, 0
    # The probability that fewer than ``below`` values are under the median, times 2 ** count.
    while outside + math.comb(count, below) <= 0.025 * 2**count:
        outside += math.comb(count, below)
        below += 1
    at = max(0, below - 1)
    return ordered[at], ordered[count - 1 - at]


def _p90(values: Sequence[float]) -> float:
    """Return the smallest value that at least nine of ten values do not exceed."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _forget_peaks(device: str) -> None:
    # proc(5): writing 5 resets the peak of resident memory; some systems do not allow it.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()


def _memory(info: DistributedInfo, device: torch.device) -> dict[str, int]:
    """Return the highest memory peaks of any rank, in bytes."""
    import torch

    from hpc_toolkit.training.distributed.collectives import all_gather

    cuda = torch.cuda.max_memory_allocated() if info.device.startswith("cuda") else 0
    own = torch.tensor([peak_rss_bytes(), cuda], dtype=torch.int64, device=device)
    rss, gpu = all_gather(own).max(dim=0).values.tolist()
    return {"rss": int(rss), "cuda": int(gpu)}


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process since the last reset."""
    with suppress(OSError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
