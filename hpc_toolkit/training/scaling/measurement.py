"""One measurement of a training at one world size: its steps, its exchange, its memory."""

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
"""How often the exchange is timed apart."""

_LARGE = 16 * MIB
"""A message in whose time latency plays no part; for the bandwidth."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of all ranks: of each step the slowest rank's time, and the mean share of waiting."""

    seconds: list[float]
    loading: float


def measure(settings: Settings, info: DistributedInfo) -> dict[str, Any]:
    """Measure one repeat; every rank calls it, and gets the same numbers. Raises ConfigError."""
    _forget_peaks(info.device)
    training = Training(settings, info)
    training.steps(settings.warmup)
    # Half of the steps without exchange before the others and half after: a machine that becomes
    # slower or faster meanwhile then disturbs both alike.
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
    """What the exchange of gradients costs, three ways."""
    typical = median(steps.seconds)
    exposed = typical - median(apart.seconds)
    with_it, without = median_interval(steps.seconds), median_interval(apart.seconds)
    timed = time_collective("all_reduce", _LARGE, device=training.device, iterations=_ITERATIONS)
    size = training.gradient_bytes
    return {
        "gradient_bytes": size,
        # What a step lasts longer than without; noise can make it negative.
        "exposed_s": exposed,
        "share": min(max(exposed / typical, 0.0), 1.0),
        # Of the worst corners of both intervals, so at least 95 %; below 0 it is noise.
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
    """A 95 % interval of the median, by ranks: whatever the times are distributed like.

    Of fewer than 6 values it is the least and the greatest, which is less.
    """
    ordered, count = sorted(values), len(values)
    outside, below = 0, 0
    # How often so few of so many are below the median, in parts of 2 ** count.
    while outside + math.comb(count, below) <= 0.025 * 2**count:
        outside += math.comb(count, below)
        below += 1
    at = max(0, below - 1)
    return ordered[at], ordered[count - 1 - at]


def _p90(values: Sequence[float]) -> float:
    """The least value that nine of ten are not above."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _forget_peaks(device: str) -> None:
    # Linux, proc(5): 5 resets the peak of resident memory; not everywhere allowed.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()


def _memory(info: DistributedInfo, device: torch.device) -> dict[str, int]:
    """Peaks of the rank that needed most."""
    import torch

    from hpc_toolkit.training.distributed.collectives import all_gather

    cuda = torch.cuda.max_memory_allocated() if info.device.startswith("cuda") else 0
    own = torch.tensor([peak_rss_bytes(), cuda], dtype=torch.int64, device=device)
    rss, gpu = all_gather(own).max(dim=0).values.tolist()
    return {"rss": int(rss), "cuda": int(gpu)}


def peak_rss_bytes() -> int:
    """The most memory that this process had, since its peak was last forgotten."""
    with suppress(OSError, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
