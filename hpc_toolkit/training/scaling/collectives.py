"""The program that ``hpctk scaling collectives`` runs on every rank, and its results table.

``hpctk launch -m hpc_toolkit.training.scaling.collectives`` runs it on any ranks; rank 0 prints one
JSON object for each collective and size.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError, near_miss
from hpc_toolkit.system.quantities import format_size, parse_size
from hpc_toolkit.training.scaling.bandwidth import BUS_FACTORS, Timed
from hpc_toolkit.training.scaling.records import objects_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

KIND = "hpctk.collectives"
DEFAULT_SIZES = "1K,32K,1M,16M"
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


def as_record(timed: Timed) -> dict[str, Any]:
    """Return the JSON object of one output line."""
    return {
        "kind": KIND,
        "format": 1,
        "collective": timed.collective,
        "world_size": timed.world_size,
        "size_bytes": timed.size_bytes,
        "seconds": timed.seconds,
        "algorithm_bytes_per_s": timed.algorithm_bytes_per_s,
        "bus_bytes_per_s": timed.bus_bytes_per_s,
    }


def records_in(text: str) -> Iterator[dict[str, Any]]:
    """Return the output lines in a log, without the text that precedes them on a line."""
    return (value for _, value in objects_in(text, KIND) if _is_whole(value))


def _is_whole(record: dict[str, Any]) -> bool:
    """Return whether a record has everything that the table shows; damaged ones are left out."""
    names = ("world_size", "size_bytes", "seconds", "algorithm_bytes_per_s", "bus_bytes_per_s")
    return isinstance(record.get("collective"), str) and all(
        isinstance(record.get(name), int | float) and math.isfinite(record[name]) for name in names
    )


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
    parser = argparse.ArgumentParser(prog=MODULE, allow_abbrev=False)
    parser.add_argument("--sizes", default=DEFAULT_SIZES)
    parser.add_argument("--collectives", default="all")
    parser.add_argument("--iterations", type=int, default=20)
    given = parser.parse_args(argv)
    try:
        sizes, names = parse_sizes(given.sizes), parse_collectives(given.collectives)
        _time_all(names, sizes, given.iterations)
    except HpcToolkitError as error:
        sys.stderr.write(f"error: {error.message}\n")
        sys.stderr.write(f"hint: {error.hint}\n" if error.hint else "")
        return error.exit_code
    return 0


def _time_all(names: Sequence[str], sizes: Sequence[int], iterations: int) -> None:
    import torch

    from hpc_toolkit.training.distributed.group import process_group
    from hpc_toolkit.training.scaling.bandwidth import time_collective

    with process_group() as info:
        if info.world_size == 1:
            message = "one rank has nobody to exchange with"
            raise ConfigError(message, hint="start two or more")
        device = torch.device(info.device)
        for name in names:
            for size in sizes:
                timed = time_collective(name, size, device=device, iterations=iterations)
                if info.is_main:
                    sys.stdout.write(json.dumps(as_record(timed)) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    from hpc_toolkit.training.distributed.group import leave

    leave(main())
