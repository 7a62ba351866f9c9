"""Time collectives: the program that ``hpctk scaling collectives`` runs on every rank, its table.

``hpctk launch -m hpc_toolkit.training.scaling.collectives`` runs it on any ranks; rank 0 prints one
JSON object for each collective and size. Bandwidths follow the formulas of nccl-tests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError, near_miss
from hpc_toolkit.system.quantities import format_size, parse_size
from hpc_toolkit.system.terminal import show_error
from hpc_toolkit.training.distributed import leave, process_group
from hpc_toolkit.training.scaling.records import is_number, objects_in
from hpc_toolkit.training.scaling.settings import DEFAULT_SIZES

if TYPE_CHECKING:
    import torch

KIND = "hpctk.collectives"
MIB = 2**20


# doc/PERFORMANCE.md of https://github.com/NVIDIA/nccl-tests
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
}
"""How often a link carries the message in the best known algorithm, by world size."""


def expected_s(size_bytes: float, world_size: int, bus_bytes_per_s: float) -> float:
    """Return the seconds of an all-reduce at this bus bandwidth, without latency."""
    return size_bytes * BUS_FACTORS["all_reduce"](world_size) / bus_bytes_per_s


def record_of(
    collective: str, *, world_size: int, size_bytes: int, seconds: float
) -> dict[str, Any]:
    """Return the time of a collective as a record, with its bandwidths.

    ``size_bytes`` counts as in nccl-tests: all bytes gathered or scattered, else the bytes on each
    rank. The bus bandwidth is that of each rank's link, to compare with the hardware at any world
    size.
    """
    rate = size_bytes / seconds
    return {
        "kind": KIND,
        "format": 1,
        "collective": collective,
        "world_size": world_size,
        "size_bytes": size_bytes,
        "seconds": seconds,
        "algorithm_bytes_per_s": rate,
        "bus_bytes_per_s": rate * BUS_FACTORS[collective](world_size),
    }


def time_collective(
    collective: str, size_bytes: int, *, device: torch.device, iterations: int, warmup: int = 2
) -> dict[str, Any]:
    """Time one collective of float32; all ranks call it together, in a process group.

    The size is rounded up so that every rank has an equal part of it. The record has the median
    over the iterations.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    elements = ranks * max(1, -(-size_bytes // (4 * ranks)))
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)
    # Repeated sums may overflow, but adding infinite float32 values takes no longer.
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    taken = time_calls(calls[collective], device=device, iterations=iterations, warmup=warmup)
    return record_of(collective, world_size=ranks, size_bytes=4 * elements, seconds=median(taken))


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


MODULE = "hpc_toolkit.training.scaling.collectives"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``1K,32K,1M``; return each size once, in rising order. Raises ConfigError."""
    return tuple(sorted({parse_size(word.strip(), where="--sizes") for word in text.split(",")}))


def parse_collectives(text: str) -> tuple[str, ...]:
    """Parse names separated by commas, or ``all``. Raises ConfigError."""
    if text == "all":
        return tuple(BUS_FACTORS)
    names = [word.strip().replace("-", "_") for word in text.split(",")]
    for name in names:
        if name not in BUS_FACTORS:
            message = f"--collectives: {name!r}"
            raise ConfigError(message, hint=near_miss(name, ["all", *BUS_FACTORS]))
    return tuple(dict.fromkeys(names))


def records_in(text: str) -> Iterator[dict[str, Any]]:
    """Return the output lines in a log, without the text that precedes them on a line."""
    names = ("world_size", "size_bytes", "seconds", "algorithm_bytes_per_s", "bus_bytes_per_s")
    for _, record in objects_in(text, KIND):
        numbers = [record.get(name) for name in names]
        # Damaged records are left out.
        if isinstance(record.get("collective"), str) and all(map(is_number, numbers)):
            yield record


def as_markdown(records: Iterable[dict[str, Any]]) -> str:
    """Return a table; bandwidths are in GB/s of 10^9 bytes, as in nccl-tests."""
    lines = [
        "| collective | ranks | size | time | algorithm GB/s | bus GB/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in records:
        cells = (
            one["collective"],
            str(one["world_size"]),
            format_size(one["size_bytes"]),
            f"{1e6 * one['seconds']:.4g} us",
            f"{one['algorithm_bytes_per_s'] / 1e9:.3g}",
            f"{one['bus_bytes_per_s'] / 1e9:.3g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Time the collectives on the ranks of this launch; return the exit code."""
    import torch

    parser = argparse.ArgumentParser(prog=MODULE, allow_abbrev=False)
    parser.add_argument("--sizes", default=DEFAULT_SIZES)
    parser.add_argument("--collectives", default="all")
    parser.add_argument("--iterations", type=int, default=20)
    given = parser.parse_args(argv)
    try:
        sizes, names = parse_sizes(given.sizes), parse_collectives(given.collectives)
        with process_group() as info:
            if info.world_size == 1:
                message = "one rank alone has no one to exchange data with"
                raise ConfigError(message, hint="start two or more ranks")
            for name, size in itertools.product(names, sizes):
                device = torch.device(info.device)
                timed = time_collective(name, size, device=device, iterations=given.iterations)
                if info.is_main:
                    sys.stdout.write(json.dumps(timed) + "\n")
                    sys.stdout.flush()
    except HpcToolkitError as error:
        show_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    leave(main())
