"""Commands of the user that run when a run ends or pauses.

A command is passed to bash as it was given. Facts about the run reach it only in environment
variables, so no text of a run can become a part of a command.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.report.panel import failed_items
from hpc_toolkit.system.processes import describe_exit
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.run import Run

COMPLETE, FAILED, PAUSED, STOPPED = "complete", "failed", "paused", "stopped"
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
    counts = now.stages.values()
    return {
        "HPCTK_RUN": os.path.abspath(now.run),
        "HPCTK_STATE": state,
        "HPCTK_DONE": str(sum(one.done for one in counts)),
        "HPCTK_FAILED": str(failed_items(now)),
        "HPCTK_LEFT": str(now.left),
    }


class _Started(NamedTuple):
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    """Where its output goes; None: to stderr."""


class Hooks:
    """Starts each command once per event, without waiting for it."""

    def __init__(self, on_end: str | None = None) -> None:
        self.quiet = False
        """Whether commands that start now must not write to the terminal."""
        self._on_end = on_end
        self._state = ""
        self._running: list[_Started] = []

    def look(self, now: Status) -> None:
        """Start the command if the run has ended or paused since the last look."""
        state = end_of(now)
        if state and state != self._state and self._on_end is not None:
            self.start(self._on_end, facts(now, state))
        self._state = state

    def start(self, command: str, environment: dict[str, str]) -> None:
        output = tempfile.TemporaryFile() if self.quiet else None  # noqa: SIM115 - outlives this call
        process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=2 if output is None else output,  # stdout is for data
            stderr=output,
            env={**os.environ, **environment},
        )
        self._running.append(_Started(process, output))

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
                found.append(f"the command of --on-end {how} {describe_exit(code)}")
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
                note("waiting for the command of --on-end; ^C ends it")
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
                hooks.start(command, facts(now, end_of(now) or STOPPED))
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
