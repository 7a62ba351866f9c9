"""The full-screen view of ``hpctk status --watch``; imports no command line framework."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_toolkit.cli.screen import END, Screen
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.report.live import HELP, Choices, Live, Page, screen_lines
from hpc_toolkit.report.panel import DIM, Row, failed_items
from hpc_toolkit.report.terminal import LEAST_COLUMNS, Look, draw, draw_line
from hpc_toolkit.results.events import RecentEvents
from hpc_toolkit.results.workers import Sampler, living_workers, reachable_workers, read_hosts
from hpc_toolkit.rundir.files import last_lines
from hpc_toolkit.rundir.layout import refuse_removed
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from hpc_toolkit.cli.hooks import Hooks
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.run import Run
    from hpc_toolkit.training.progress import Progress


REFRESH_S = 2.0
_BUSY = 0.05
"""Largest share of a processor that refreshes may take."""
_MESSAGE_S = 10.0
"""How long a message replaces the line of keys."""
_SCROLL = {"j": 1, "down": 1, "k": -1, "up": -1}
_SLOW = ("e", "l")
"""Keys that read the journals of all workers, which can take long on a shared filesystem."""
_PAGES = {"pagedown": 1, " ": 1, "pageup": -1}


class LiveView:
    """Shows a run and answers to keys, until the run is complete or the user quits.

    It reads the run with few file operations after the first time.
    """

    def __init__(
        self, run: Run, screen: Screen, hooks: Hooks, chosen: Choices, *, slurm: bool
    ) -> None:
        from hpc_toolkit.submit.jobs import JobStates
        from hpc_toolkit.submit.standstill import beside_of

        self.run, self.screen, self.hooks, self.chosen = run, screen, hooks, chosen
        self.records: list[JobRecord] = []
        self.live: Live | None = None
        self._jobs, self._slurm = JobStates(run.paths), slurm
        self._clock = SystemClock()
        self._sampler = Sampler(run.view, self._clock)
        self._events = RecentEvents(run.view)
        self._beside = beside_of(run, lambda: self.records)
        self._seen: dict[str, Presence | None] = {}
        self._confirmed: Callable[[], str] | None = None
        self._said_at = 0.0
        self._changed = False
        """Whether an action may have changed the run since the last refresh."""

    def _read(self) -> Live:
        """Read everything that is new. Raises RunError: the run was removed, perhaps meanwhile."""
        view = self.run.view
        try:
            seen = self._seen = self._sampler.look()
            now = self.run.status(seen=seen, beside=self._beside)
            alive = living_workers(view, self._clock, seen)
            return Live(
                now,
                self.records,
                read_hosts(view, seen, alive),
                self._events.read(seen, alive, now.failures),
                self._sampler.oldest_s(),
            )
        finally:
            refuse_removed(self.run.root)

    def follow(self) -> Status:
        """Return the last status."""
        next_s, used_s = 0.0, float("inf")  # the first refresh does not delay the second
        while True:
            if time.monotonic() >= next_s:
                self._refresh()
                assert self.live is not None
                if self.live.now.complete:
                    break
                next_s = 0.0
                before = self.records
                # Asks Slurm only now and then.
                self.records = self._jobs.read(ask=self._slurm, seen=self._seen.values())
                if self.records == before:
                    used_s, before_s = time.process_time(), used_s
                    next_s = time.monotonic() + max(REFRESH_S, (used_s - before_s) / _BUSY)
            key = self.screen.key(max(0.0, next_s - time.monotonic()))
            if key == END or (key == "q" and self.chosen.page is None and not self._confirmed):
                break
            if key:
                self._press(key)
            if self._changed:
                self._changed, next_s = False, 0.0
            self._show()
        assert self.live is not None
        return self.live.now

    def _refresh(self) -> None:
        self.live = self._read()
        if time.monotonic() - self._said_at > _MESSAGE_S:
            self._say("")
        if not self.live.now.complete:  # else it may write to the terminal once the view is gone
            self.hooks.look(self.live.now)
        for warning in self.hooks.warnings():
            self._say(warning, is_error=True)
        self._show()

    def _show(self) -> None:
        assert self.live is not None
        look, rows = _look(self.screen)
        self.screen.show(screen_lines(self.live, self.chosen, look, rows))

    def _say(self, text: str, *, is_error: bool = False) -> None:
        self.chosen.message, self.chosen.is_error = text, is_error
        self._said_at = time.monotonic()

    def _press(self, key: str) -> None:
        chosen = self.chosen
        self._say("")
        if self._confirmed is not None:
            action, self._confirmed, chosen.question = self._confirmed, None, ""
            self._say("nothing was done")
            if key in ("y", "Y"):
                self._changed = True
                self._try(lambda: self._say(action()))
        elif key in _SCROLL:
            chosen.offset += _SCROLL[key]
        elif key in _PAGES:
            chosen.offset += _PAGES[key] * max(1, self.screen.size().lines - 3)
        elif key in ("g", "home", "G", "end"):
            chosen.offset = 0 if key in ("g", "home") else sys.maxsize
        elif chosen.page is not None:
            if key in ("q", "escape", "enter"):
                self._open(None)
        elif key in _ACTIONS:
            if key in _SLOW:
                self._say("reading ...")
                self._show()
                self._say("")
            self._try(lambda: _ACTIONS[key](self))

    def _try(self, action: Callable[[], object]) -> None:
        """Do something; an error becomes a line, and so does what would be written to stderr."""
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                action()
        except HpcToolkitError as error:
            hint = f"; {error.hint}" if error.hint else ""
            self._say(f"error: {error.message}{hint}", is_error=True)
        except OSError as error:
            self._say(f"error: {error}", is_error=True)
        else:
            if warned := said.getvalue().strip():
                self._say(f"{self.chosen.message} ({warned})".strip())

    def _open(self, page: Page | None) -> None:
        self.chosen.page, self.chosen.offset = page, 0

    def _ask(self, question: str, action: Callable[[], str]) -> None:
        self.chosen.question, self._confirmed = question, action

    def _drain(self) -> None:
        def drain() -> str:
            return f"asked {counted(self.run.drain(), 'worker')} to exit"

        assert self.live is not None
        count = len(reachable_workers(self.run.view, self._clock, self._seen))
        unsure = count - self.live.now.workers.alive
        if not count:
            self._say("no worker is running: there is nothing to drain")
        else:
            perhaps = f" ({unsure:,} may be dead)" if unsure > 0 else ""
            self._ask(f"ask {counted(count, 'worker')} to exit{perhaps}?", drain)

    def _retry(self) -> None:
        from hpc_toolkit.results.explain import retryable

        def retry() -> str:
            return f"{counted(self.run.retry(), 'item')} pending again"

        assert self.live is not None
        failed = failed_items(self.live.now)
        others = retryable(self.run.view) - failed
        question = f"make {counted(failed, 'failed item')} pending again?"
        if others > 0:
            reset = f"the attempts of {counted(failed + others, 'item')}"
            question = f"reset {reset} ({failed:,} failed, {others:,} retrying)?"
        if failed or others > 0:
            self._ask(question, retry)
        else:
            self._say("no item has failed")

    def _explain(self) -> None:
        from hpc_toolkit.cli.reading import life_lines
        from hpc_toolkit.results.explain import explain, find_item

        assert self.live is not None
        if not self.live.now.failures:
            self._say("no item has failed")
            return
        item, view = str(self.live.now.failures[0]["item"]), self.run.view
        life = explain(view, find_item(view, item))
        self._open(Page(f"item {item}", life_lines(life)))

    def _log(self) -> None:
        assert self.live is not None
        page = read_log(self.run, self.live)
        if page is None:
            self._say("there is no log yet")
        else:
            self._open(page)
            self.chosen.offset = sys.maxsize

    def _workers(self) -> None:
        self.chosen.expanded, self.chosen.offset = not self.chosen.expanded, 0


_ACTIONS: dict[str, Callable[[LiveView], None]] = {
    "d": LiveView._drain,
    "r": LiveView._retry,
    "e": LiveView._explain,
    "l": LiveView._log,
    "w": LiveView._workers,
    "?": lambda view: view._open(Page("keys", HELP)),
}


def read_log(run: Run, live: Live) -> Page | None:
    """The end of the log of the worker with the newest failure, else of the latest job or worker.

    Only failures that the view shows count. None if there is no log yet.
    """
    from hpc_toolkit.results.explain import attempts_of, find_item
    from hpc_toolkit.submit.jobs import log_files

    paths = []
    if live.now.failures:
        newest = max(live.now.failures, key=lambda one: one["last"] or 0.0)
        item = find_item(run.view, str(newest["item"]))
        paths = [run.paths.worker_log(worker) for worker, _ in attempts_of(run.view, item)]
    if not paths and live.jobs:
        paths = log_files(run.paths, live.jobs[-1].id)
    if not any(path.exists() for path in paths):
        paths = sorted(run.paths.logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
    existing = [path for path in paths if path.exists()]
    if not existing:
        return None
    return Page(str(existing[-1]), last_lines(existing[-1]) or ["the log is empty"])


def _look(screen: Screen) -> tuple[Look, int]:
    """What the terminal can show now, and its rows."""
    size = screen.size()
    # The variable COLUMNS, which Look.of reads, would not change with the window.
    look = replace(Look.of(sys.stdout), columns=max(size.columns, LEAST_COLUMNS))
    return look, size.lines


@contextlib.contextmanager
def _quiet_screen() -> Iterator[Screen]:
    """A screen; what is written to stderr meanwhile appears after it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), Screen() as screen:
            yield screen
    finally:
        sys.stderr.write(said.getvalue())


def follow_training(
    read: Callable[[], Progress], rows_of: Callable[[Progress], list[Row]]
) -> Progress:
    """Show a training on the whole terminal until its jobs have ended or the user quits."""
    with _quiet_screen() as screen:
        while True:
            now = read()
            look, rows = _look(screen)
            lines = draw(rows_of(now), look, most=rows - 1)
            lines += [""] * (rows - 1 - len(lines))
            screen.show([*lines, draw_line("q quit", DIM, look)])
            if now.ended or not now.jobs or screen.key(REFRESH_S) in ("q", END):
                return now


def follow_live(
    run: Run, hooks: Hooks, *, slurm: bool, verbose: bool = False
) -> tuple[Status, list[JobRecord]]:
    """Show a run on the whole terminal; return its last status and its jobs.

    ``verbose``: begin with every worker and what it has of its host.
    """
    from hpc_toolkit.submit.jobs import JobStates

    gc.enable()
    chosen = Choices(expanded=verbose, verbose=verbose)
    try:
        with _quiet_screen() as screen:
            hooks.quiet = True
            view = LiveView(run, screen, hooks, chosen, slurm=slurm)
            now = view.follow()
    finally:
        hooks.quiet = False
    if not now.complete:
        return now, view.records
    hooks.look(now)
    # They are about to end, and what Slurm said before would be the last word.
    return now, JobStates(run.paths).read(ask=slurm)
