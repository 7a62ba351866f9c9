"""A pool of local worker processes, each replaced when it is killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.system.binding import Place, bind, place_workers
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.gpus import CUDA, visible_gpus
from hpc_toolkit.system.imports import open_streams
from hpc_toolkit.system.machine import read_machine
from hpc_toolkit.system.processes import die_with_parent, handling, readable
from hpc_toolkit.system.quantities import counted, format_duration
from hpc_toolkit.system.ranks import without_rank
from hpc_toolkit.system.record import Record
from hpc_toolkit.worker.worker import (
    DRAIN_SIGNALS,
    EXIT_COMPLETE,
    WorkerOptions,
    start_worker,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.rundir.layout import Manifest, RunPaths
    from hpc_toolkit.system.binding import Shares

_TICK_S = 0.2
BARREN_LIVES = 5
"""A worker killed this often in a row without finishing an item is not started again."""


class Pool(Record, frozen=False, stateful=True, kw_only=True):
    """Forks workers and watches them; the parent runs no item and claims nothing.

    Raises ConfigError if this machine has fewer resources than the workers' ``shares`` need.
    """

    paths: RunPaths
    manifest: Manifest
    options: WorkerOptions
    workers: int
    shares: Shares | None = None
    silent: bool = False
    """Whether it says nothing when it waits for its workers."""

    def __post_init__(self) -> None:
        open_streams()
        self._places = [Place()] * self.workers
        if self.shares:
            self._places = place_workers(read_machine(), self.shares, self.workers)
        self._slots: dict[int, int] = {}
        self._barren = [0] * self.workers
        self._draining = False
        self._error_read, self._error_write = os.pipe()

    def run(self, on_tick: Callable[[], None] | None = None) -> int:
        """Run until every worker has exited; the exit code (see :mod:`hpc_toolkit.worker.worker`).

        ``on_tick`` is called a few times a second. Raises the first error that a worker reported.
        """
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write, self._error_read):
            os.set_blocking(fd, False)
        old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        chld = handling([signal.SIGCHLD], lambda *_: None)
        try:
            with handling(DRAIN_SIGNALS, self._forward), chld:
                for slot in range(self.workers):
                    self._start(slot)
                codes: list[int] = []
                while self._slots:
                    if readable(wake_read, timeout_s=_TICK_S):
                        os.read(wake_read, 4096)
                    codes += self._reap()
                    if on_tick is not None:
                        on_tick()
                return self._conclude(codes)
        finally:
            signal.set_wakeup_fd(old_wake)
            for fd in (wake_read, wake_write, self._error_read, self._error_write):
                os.close(fd)

    def _forward(self, number: int, _frame: object) -> None:
        again, self._draining = self._draining, True
        if self._slots and not self.silent:
            # Not print(): a handler may interrupt another write to the same buffer.
            os.write(2, stopping_line(number, len(self._slots), self.options.grace_s, again=again))
        for pid in list(self._slots):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _start(self, slot: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Signals wait until the parent knows the new pid and the child has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, DRAIN_SIGNALS)
        if not self._draining:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_worker(slot, parent)
            self._slots[pid] = slot
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DRAIN_SIGNALS)

    def _become_worker(self, slot: int, parent: int) -> None:
        """Run a worker in the forked child; never returns."""
        code = 70
        try:
            # Its own process group: a terminal's ^C reaches the parent, which forwards it once.
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(TRY_AGAIN)
            place = self._places[slot]
            os.environ.update(local_environment(slot, self.workers) | place.environment())
            bind(place)
            # Inherited objects stay to the end; garbage collection would copy their shared pages.
            gc.freeze()
            code = start_worker(self.paths, self.manifest, self.options, SystemClock())
        except HpcToolkitError as error:
            os.write(self._error_write, error_report(error))
            code = error.exit_code
        except BaseException:  # noqa: BLE001 - nothing may run on in the parent's stack
            traceback.print_exc()
            sys.stderr.write("this is a bug in hpctk; please report it with the lines above\n")
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> list[int]:
        codes = []
        for pid in list(self._slots):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                slot = self._slots.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                codes.append(code)
                if code < 0 and not self._draining and self._may_restart(slot, pid):
                    self._start(slot)
        return codes

    def _may_restart(self, slot: int, pid: int) -> bool:
        done = finished_items(self.paths.workers, pid)
        self._barren[slot] = 0 if done else self._barren[slot] + 1
        return self._barren[slot] < BARREN_LIVES

    def _conclude(self, codes: list[int]) -> int:
        with suppress(BlockingIOError):
            first = os.read(self._error_read, 1 << 16).split(b"\n")[0]
            raise reported_error(json.loads(first))
        return overall_code(codes)


def stopping_line(number: int, workers: int, grace_s: float, *, again: bool) -> bytes:
    """What a pool waits for after a signal; it replaces the progress line of a terminal."""
    whom = f"for {counted(workers, 'worker')}"
    if number == signal.SIGINT and again:
        text = f"stopping at once: waiting {whom} to interrupt the running items"
    else:
        most = format_duration(grace_s)
        text = f"stopping: waiting {whom} to finish the current item (at most {most})"
        text += "; press ^C again to stop at once" if number == signal.SIGINT else ""
    start = "\r\x1b[K" if os.isatty(2) else ""
    return f"{start}{text}\n".encode()


def error_report(error: HpcToolkitError) -> bytes:
    """One line of JSON, short enough for one write: it does not mix with another report."""
    texts = {"message": error.message[:700], "hint": error.hint[:200]}
    report = json.dumps({**texts, "code": error.exit_code}, ensure_ascii=False)
    return report.encode(errors="replace") + b"\n"


def reported_error(report: dict[str, Any]) -> HpcToolkitError:
    return HpcToolkitError(report["message"], hint=report["hint"], exit_code=report["code"])


def overall_code(codes: list[int]) -> int:
    """The exit code for workers that ended with ``codes``, negative for a signal."""
    bad = [code for code in codes if code not in (EXIT_COMPLETE, TRY_AGAIN) and code >= 0]
    if bad:
        return bad[0]
    return EXIT_COMPLETE if EXIT_COMPLETE in codes else TRY_AGAIN


def finished_items(workers: Path, pid: int, host: str = "") -> int:
    """How many items the worker with this process id has finished, on ``host`` if it is given."""
    found = filter(None, map(read_presence, workers.glob(f"*-{pid}-*.json")))
    return sum(one.done + one.failed for one in found if host in ("", one.host))


def work_elsewhere(
    root: Path,
    workers: int,
    options: WorkerOptions,
    on_tick: Callable[[], None] | None,
    shares: Shares | None = None,
) -> int:
    """Start a pool from a fresh interpreter, because forking a process with threads is unsafe."""
    import subprocess

    argv = [sys.executable, "-Pm", "hpc_toolkit", "work", str(root), "--workers", str(workers)]
    argv += ["--lease", f"{options.lease_s:.6f}s", "--grace", f"{options.grace_s:.6f}s"]
    if options.idle_exit_s is not None:
        argv += ["--idle-exit", f"{options.idle_exit_s:.6f}s"]
    if options.deadline is not None:
        argv += ["--deadline", f"@{options.deadline}"]
    argv += shares.to_options() if shares else []
    argv += ["--strict-code"] if options.strict_code else []
    # Its own process group: a terminal's ^C reaches only this process, which forwards it once.
    process = subprocess.Popen(argv, env=without_rank(), process_group=0)
    try:
        with handling(DRAIN_SIGNALS, lambda number, _: process.send_signal(number)):
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=_TICK_S)
                if on_tick is not None:
                    on_tick()
    finally:
        if process.poll() is None:
            process.terminate()


def local_environment(slot: int, workers: int) -> dict[str, str]:
    found = {"RANK": str(slot), "LOCAL_RANK": str(slot), "WORLD_SIZE": str(workers)}
    gpus = visible_gpus()
    if gpus:
        found[CUDA] = gpus[slot % len(gpus)]
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    return found
