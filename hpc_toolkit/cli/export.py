"""The status of runs in the text format of Prometheus, for node_exporter's textfile collector.

The format is a few lines to write, and the package prometheus-client would be one more to install.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hpc_toolkit.cli.arguments import check_out, writing
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from hpc_toolkit.results.status import Status


METRICS = {
    "hpctk_items": "Items of a stage by state.",
    "hpctk_items_retried": "Items that were attempted more than once.",
    "hpctk_duplicates": "Results beyond the one that counts.",
    "hpctk_stage_sealed": "1 if no more items can be added.",
    "hpctk_workers": "Workers by state; draining workers are alive as well.",
    "hpctk_deaths": "Deaths of workers and executors that were recorded.",
    "hpctk_rate_items_per_second": "Items done per second by living workers.",
    "hpctk_eta_seconds": "Seconds until everything is done, the median; absent if unknown.",
    "hpctk_eta_low_seconds": "Lower end of the interval for the time left, 90 %.",
    "hpctk_eta_high_seconds": "Its upper end.",
    "hpctk_complete": "1 if every stage is sealed and no item is pending.",
    "hpctk_best_reward": "Best reward of a campaign so far.",
    "hpctk_warnings": "Damage that was skipped, sick hosts, and log entries not readable yet.",
    "hpctk_status_timestamp_seconds": "When the status was read, in seconds since the epoch.",
}
"""Help text of each metric; all of them are gauges."""

_STATES = ("pending", "running", "claimed", "done", "failed", "coming")
_Sample = tuple[str, dict[str, str], float]


def prometheus_file(path: Path) -> Callable[..., None]:
    """A function that replaces a file by the metrics of the statuses that it is given.

    Raises ConfigError, before any run is read: the file cannot be written, or node_exporter would
    not read it.
    """
    check_out(path, (".prom",))

    def export(*found: Status) -> None:
        # Absolute, so that labels do not depend on where the command is called.
        named = [replace(one, run=os.path.abspath(one.run)) for one in found]
        lines = (line.encode(errors="replace") for line in metric_lines(named, time.time()))
        with writing(path):
            # All users can read it, because node_exporter is another user.
            replace_file(path, lines, 0o644)

    return export


def metric_lines(found: Iterable[Status], at: float) -> Iterator[str]:
    """The lines of the file; the samples of one metric follow each other. ``at``: epoch seconds."""
    samples: dict[str, list[str]] = {name: [] for name in METRICS}
    for status in found:
        for name, labels, value in _samples(status, at):
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            samples[name].append(f"{name}{{{inner}}} {value!r}\n")
    for name, lines in samples.items():
        if lines:
            yield f"# HELP {name} {METRICS[name]}\n# TYPE {name} gauge\n"
            yield from lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _samples(status: Status, at: float) -> Iterator[_Sample]:
    run = {"run": status.run}
    for name, counts in status.stages.items():
        labels = {**run, "stage": name}
        for state in _STATES:
            yield "hpctk_items", {**labels, "state": state}, getattr(counts, state)
        yield "hpctk_items_retried", labels, counts.retried
        yield "hpctk_duplicates", labels, counts.duplicates
        yield "hpctk_stage_sealed", labels, int(counts.sealed)
    workers = {
        "alive": status.workers.alive,
        "draining": status.draining,
        "finished": status.workers.finished,
        "dead": status.workers.dead,
        "unreadable": status.workers.unreadable,
    }
    for state, count in workers.items():
        yield "hpctk_workers", {**run, "state": state}, count
    yield "hpctk_deaths", run, status.deaths
    yield "hpctk_rate_items_per_second", run, status.rate_per_s
    times = {"": status.eta_s, "_low": status.eta_low_s, "_high": status.eta_high_s}
    for end, seconds in times.items():
        if seconds is not None:
            yield f"hpctk_eta{end}_seconds", run, seconds
    yield "hpctk_complete", run, int(status.complete)
    if status.best is not None:
        yield "hpctk_best_reward", {**run, "arm": str(status.best["arm"])}, status.best["reward"]
    yield "hpctk_warnings", run, len(status.warnings)
    yield "hpctk_status_timestamp_seconds", run, round(at, 3)
