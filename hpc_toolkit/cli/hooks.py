"""What follows the status of a run: commands of the user, and metrics for Prometheus.

Commands run when a run ends, pauses or stalls. A command is passed to bash as it was given. Facts
about the run reach it only in environment variables, so no text of a run can become a part of a
command.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.report.panel import failed_items
from hpc_toolkit.system.clock import Clock, SystemClock
from hpc_toolkit.system.processes import describe_exit
from hpc_toolkit.system.quantities import parse_duration
from hpc_toolkit.system.record import replace
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.results.status import Status
    from hpc_toolkit.run import Run

COMPLETE, FAILED, PAUSED, STOPPED, STALLED = "complete", "failed", "paused", "stopped", "stalled"
"""Values of HPCTK_STATE; ``failed`` is a complete run with failed items."""

_SHOWN = 200
_SILENT_S = 1.0
"""Seconds to wait for a command before a message names it."""


def end_of(now: Status) -> str:
    """The state that a run has come to: complete, failed or paused; "" if it goes on."""
    if now.complete:
        return FAILED if failed_items(now) else COMPLETE
    return PAUSED if now.is_paused else ""


def facts(now: Status, state: str) -> dict[str, str]:
    """The environment variables of a command."""
    counts = now.stages.values()
    return {
        "HPCTK_RUN": os.path.abspath(now.run),
        "HPCTK_STATE": state,
        "HPCTK_DONE": str(sum(one.done for one in counts)),
        "HPCTK_FAILED": str(failed_items(now)),
        "HPCTK_LEFT": str(now.left),
    }


class _Started(NamedTuple):
    option: str
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    """Where its output goes; None: to stderr."""


class Hooks:
    """Starts each command once per event, without waiting for it."""

    def __init__(
        self,
        on_end: str | None = None,
        on_stall: Sequence[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``on_stall``: a duration and a command. Raises ConfigError for a bad duration."""
        self.quiet = False
        """Whether commands that start now must not write to the terminal."""
        self._on_end = on_end
        self._stall_s, self._on_stall = 0.0, ""
        if on_stall is not None:
            self._stall_s = parse_duration(on_stall[0], where="--on-stall")
            self._on_stall = on_stall[1]
        self._clock = clock or SystemClock()
        self._state = ""
        self._progress: tuple[int, ...] = ()
        self._moved_at = 0.0
        self._stalled = False
        self._running: list[_Started] = []

    def look(self, now: Status) -> None:
        """Start the commands of what has happened since the last look."""
        state = end_of(now)
        if state and state != self._state and self._on_end is not None:
            self.start("--on-end", self._on_end, facts(now, state))
        self._state = state
        if self._on_stall and self._has_stalled(now):
            self.start("--on-stall", self._on_stall, facts(now, STALLED))

    def _has_stalled(self, now: Status) -> bool:
        """Whether nothing was done for too long; True once until something is done again."""
        progress = tuple(n for one in now.stages.values() for n in (one.done, one.failed))
        waits = not now.complete and (now.left > 0 or now.workers.alive > 0)
        if progress != self._progress or not waits:
            self._progress, self._moved_at = progress, self._clock.monotonic()
            self._stalled = False
            return False
        if self._stalled or self._clock.monotonic() - self._moved_at < self._stall_s:
            return False
        self._stalled = True
        return True

    def start(self, option: str, command: str, environment: dict[str, str]) -> None:
        output = tempfile.TemporaryFile() if self.quiet else None  # noqa: SIM115 - outlives this call
        process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=2 if output is None else output,  # stdout is for data
            stderr=output,
            env={**os.environ, **environment},
        )
        self._running.append(_Started(option, process, output))

    def warnings(self, *, wait: bool = False) -> list[str]:
        """The failures of commands that have ended; ``wait``: until all have ended."""
        found: list[str] = []
        for one in list(self._running):
            code = one.process.wait() if wait else one.process.poll()
            if code is None:
                continue
            self._running.remove(one)
            if code:
                how = "failed with" if code > 0 else "was"
                found.append(f"the command of {one.option} {how} {describe_exit(code)}")
                if said := _last_line(one.output):
                    found[-1] += f": {said}"
            if one.output is not None:
                one.output.close()
        return found

    def finish(self) -> None:
        """Wait for all commands, and print a warning about each failure."""
        for one in self._running:
            try:
                one.process.wait(_SILENT_S)
            except subprocess.TimeoutExpired:
                note(f"waiting for the command of {one.option}; ^C ends it")
        for warning in self.warnings(wait=True):
            note(warning, "warning")


def _last_line(output: IO[bytes] | None) -> str:
    if output is None:
        return ""
    output.seek(0)
    lines = output.read().decode(errors="replace").split("\n")
    return next((line[:_SHOWN] for line in reversed(lines) if line.strip()), "")


@contextmanager
def at_end(run: Run, command: str | None) -> Iterator[None]:
    """Run ``command`` when the block has worked on a run, also after an error."""
    try:
        yield
    finally:
        if command is not None:
            try:
                now = run.status(forecast=False)
            except (HpcToolkitError, OSError) as error:
                note(f"--on-end is not run, because the run cannot be read: {error}", "warning")
            else:
                hooks = Hooks(command)
                hooks.start("--on-end", command, facts(now, end_of(now) or STOPPED))
                hooks.finish()


def exit_code(run: Run, code: int, *, fail_on_failed: bool) -> int:
    """The exit code of work that ended with ``code``: 1 for failed items, if that is wanted."""
    if code == 0 and fail_on_failed and failed_items(run.status(forecast=False)):
        return 1
    return code


def refuse_in_step(given: dict[str, Any]) -> None:
    """Refuse options for the end of a run in a rank, which does not see the end of the others."""
    for name in ("on_end", "fail_on_failed"):
        if given[name]:
            message = f"--{name.replace('_', '-')}: not available in a Slurm step"
            hint = "'hpctk status RUN --watch --on-end COMMAND' or 'hpctk status RUN --check'"
            raise ConfigError(message, hint=f"use {hint} outside the step")


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
"""Help text of each metric; all of them are gauges.

The text format, for node_exporter's textfile collector, is a few lines to write, and the package
prometheus-client would be one more to install.
"""

_STATES = ("pending", "running", "claimed", "done", "failed", "coming")
_Sample = tuple[str, dict[str, str], float]


def prometheus_file(path: Path) -> Callable[..., None]:
    """A function that replaces a file by the metrics of the statuses that it is given.

    Raises ConfigError, before any run is read: the file cannot be written, or node_exporter would
    not read it.
    """
    from hpc_toolkit.cli.arguments import check_out, writing
    from hpc_toolkit.rundir.files import replace_file

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
