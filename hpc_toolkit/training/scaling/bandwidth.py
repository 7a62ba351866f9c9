"""Time collectives, and compute the network's bandwidth by the formulas of nccl-tests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The time of one collective with one message size."""

    collective: str
    """A key of :data:`BUS_FACTORS`."""
    size_bytes: int
    """As nccl-tests counts it: all bytes gathered or scattered, else the bytes on each rank."""
    seconds: float
    """Median over the iterations; the slowest rank counts in each."""
    world_size: int

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size over time."""
        return self.size_bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes per second on each rank's link, to compare with the hardware at any world size."""
        return self.algorithm_bytes_per_s * bus_factor(self.collective, self.world_size)


# doc/PERFORMANCE.md of https://github.com/NVIDIA/nccl-tests
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
}
"""Factor from algorithm bandwidth to bus bandwidth, by world size."""


def bus_factor(collective: str, world_size: int) -> float:
    """Return how often a link carries the message in the best known algorithm."""
    return BUS_FACTORS[collective](world_size)


def expected_s(size_bytes: float, world_size: int, bus_bytes_per_s: float) -> float:
    """Return the seconds of an all-reduce at this bus bandwidth, without latency."""
    return size_bytes * bus_factor("all_reduce", world_size) / bus_bytes_per_s


def time_collective(
    collective: str, size_bytes: int, *, device: torch.device, iterations: int, warmup: int = 2
) -> Timed:
    """Time one collective of float32; all ranks call it together, in a process group.

    The size is rounded up so that every rank has an equal part of it.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size()
    elements = ranks * max(1, -(-size_bytes // (4 * ranks)))
    call = _call(collective, elements, ranks, device)
    taken = time_calls(call, device=device, iterations=iterations, warmup=warmup)
    return Timed(
        collective=collective,
        size_bytes=4 * elements,
        seconds=median(taken),
        world_size=ranks,
    )


def _call(collective: str, elements: int, ranks: int, device: torch.device) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    # Repeated sums may overflow, but adding infinite float32 values takes no longer.
    return calls[collective]


def time_calls(
    call: Callable[[], object], *, device: torch.device, iterations: int, warmup: int
) -> list[float]:
    """Return the seconds of each call on its slowest rank; all ranks begin each call together."""
    import torch
    import torch.distributed as dist

    taken = []
    for number in range(warmup + iterations):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        if number >= warmup:
            taken.append(time.perf_counter() - began)
    slowest = torch.tensor(taken, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(value) for value in slowest.tolist()]


def time_all_reduces(sizes: Sequence[int], *, device: torch.device, iterations: int) -> float:
    """Return the median seconds of all-reduces of ``sizes`` bytes in turn: a step's gradients."""
    import torch
    import torch.distributed as dist

    buffers = [torch.zeros(max(1, size // 4), device=device) for size in sizes]

    def call() -> None:
        for buffer in buffers:
            dist.all_reduce(buffer)

    return median(time_calls(call, device=device, iterations=iterations, warmup=1))


def synchronize(device: torch.device) -> None:
    """Wait for pending work on a GPU; a CPU has none."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
