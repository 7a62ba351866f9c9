"""Read a monitor's file, and summarise it in a few numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir.files import read_fresh

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Recording:
    """The lines of one start of a monitor."""

    header: dict[str, Any]
    """Host, CPUs, memory and GPUs, as the monitor found them."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Samples in the order of time."""


def read_recordings(path: Path) -> list[Recording]:
    """Return a recording for every start of a monitor in a file; skip damaged lines.

    A file that does not exist has no recordings.
    """
    found: list[Recording] = []
    for line in read_fresh(path).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        kind = record.get("type") if isinstance(record, dict) else None
        if kind == "header":
            found.append(Recording(record))
        elif kind == "sample" and found:
            found[-1].samples.append(record)
    return found


def summarise(recording: Recording) -> dict[str, Any]:
    """Return means and maxima over the samples; None for a value that was never sampled.

    ``gpus`` has one entry per GPU. Its ``energy_j`` is the power integrated over time by the
    trapezoid rule, from the first sample to the last.
    """
    samples = recording.samples
    last = samples[-1] if samples else {}
    return {
        "host": recording.header.get("host"),
        "samples": len(samples),
        "seconds": last.get("t_s"),
        "cpu_percent_mean": _mean([one.get("cpu_percent") for one in samples]),
        "rss_bytes_max": _greatest([one.get("rss_bytes") for one in samples]),
        "memory_used_bytes_max": _greatest([one.get("memory_used_bytes") for one in samples]),
        "net_sent_bytes": last.get("net_sent_bytes"),
        "net_received_bytes": last.get("net_received_bytes"),
        "infiniband": last.get("infiniband", {}),
        "gpus": [
            _gpu_summary(samples, index) for index in range(len(recording.header.get("gpus", [])))
        ],
    }


def _gpu_summary(samples: list[dict[str, Any]], index: int) -> dict[str, Any]:
    def each(name: str) -> list[Any]:
        return [one["gpus"][index].get(name) for one in samples if len(one["gpus"]) > index]

    power = [
        (one["t_s"], one["gpus"][index].get("power_w"))
        for one in samples
        if len(one["gpus"]) > index
    ]
    known = [(at, watts) for at, watts in power if watts is not None]
    energy = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(known))
    return {
        "index": index,
        "busy_percent_mean": _mean(each("busy_percent")),
        "memory_used_bytes_max": _greatest(each("memory_used_bytes")),
        "power_w_mean": _mean(each("power_w")),
        "temperature_c_max": _greatest(each("temperature_c")),
        "energy_j": energy if len(known) > 1 else None,
    }


def _mean(values: list[Any]) -> Any:
    return _over(values, lambda known: sum(known) / len(known))


def _greatest(values: list[Any]) -> Any:
    return _over(values, max)


def _over(values: list[Any], rule: Callable[[list[Any]], Any]) -> Any:
    known = [value for value in values if value is not None]
    return rule(known) if known else None
