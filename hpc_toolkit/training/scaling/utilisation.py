"""Use of nodes and GPUs during a measurement, from the monitor that samples each node."""

from __future__ import annotations

import math
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.ranks import host_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpc_toolkit.training.distributed.place import DistributedInfo

INTERVAL_S = 0.5


@contextmanager
def monitored(directory: Path | None, size: int) -> Iterator[Path | None]:
    """Let one rank of each node sample it; yield the node's file, or None if there is none."""
    if directory is None:
        yield None
        return
    path = directory / "monitor" / f"world-{size}-{host_name()}.jsonl"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield path
        return
    from hpc_toolkit.training.monitor.child import watching

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        watcher = watching(path, INTERVAL_S)
        watcher.__enter__()
    except ConfigError as error:
        sys.stderr.write(f"note: nothing samples this node: {error.message} ({error.hint})\n")
        yield None
        return
    try:
        yield path
    finally:
        watcher.__exit__(None, None, None)


def sample_count(path: Path | None) -> int:
    """Return the number of samples since the monitor's last start."""
    from hpc_toolkit.training.monitor.recordings import read_recordings

    found = read_recordings(path) if path is not None else []
    return len(found[-1].samples) if found else 0


def summary(path: Path | None, before: int) -> dict[str, Any]:
    """Summarise the samples after the first ``before``; {} if the time was too short for one."""
    from hpc_toolkit.training.monitor.recordings import Recording, read_recordings, summarise

    recordings = read_recordings(path) if path is not None else []
    if not recordings or len(recordings[-1].samples) <= before:
        return {}
    last = recordings[-1]
    found = summarise(Recording(last.header, last.samples[before:]))
    # The driver shows GPUs of other jobs, too: UUIDs tell which one belongs to a rank.
    names = [gpu.get("uuid") for gpu in last.header.get("gpus", [])]
    gpus = [{**gpu, "uuid": name} for gpu, name in zip(found["gpus"], names, strict=True)]
    return {**{key: found[key] for key in ("samples", "cpu_percent_mean")}, "gpus": gpus}


def of_all_ranks(use: dict[str, Any], info: DistributedInfo) -> dict[str, float]:
    """Return means over the ranks of their nodes' CPUs and own GPUs, and the least busy GPU.

    Every rank calls it with its node's summary. A value that no rank knows is left out.
    """
    import torch

    from hpc_toolkit.training.distributed.collectives import all_gather

    own = torch.tensor(_own(use, _uuid(info.device)), dtype=torch.float64, device=info.device)
    return over_ranks(all_gather(own).tolist() if info.world_size > 1 else [own.tolist()])


def over_ranks(ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    """Combine each rank's CPU percent, GPU percent and watts; a NaN is an unknown value."""
    cpus, gpus, watts = (
        [one for one in column if not math.isnan(one)] for column in zip(*ranks, strict=True)
    )
    found = {
        "cpu_percent": _mean(cpus),
        "gpu_percent": _mean(gpus),
        "gpu_percent_least": min(gpus, default=None),
        "gpu_power_w": _mean(watts),
    }
    return {key: value for key, value in found.items() if value is not None}


def _own(use: dict[str, Any], uuid: str) -> list[float]:
    mine = [gpu for gpu in use.get("gpus", []) if uuid and str(gpu["uuid"]).endswith(uuid)]
    values = [use.get("cpu_percent_mean")]
    values += [mine[0][key] if mine else None for key in ("busy_percent_mean", "power_w_mean")]
    return [math.nan if value is None else float(value) for value in values]


def _uuid(device: str) -> str:
    """Return the driver's UUID of this rank's GPU, without prefix; "" if torch has none."""
    if not device.startswith("cuda"):
        return ""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "") or "")


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
