"""A pool of local worker processes, each replaced when it is killed, and a process for a pool."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError, TryAgainLaterError
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.queue.state import MAX_DEATHS
from hpc_toolkit.queue.wants import may_need
from hpc_toolkit.rundir.layout import Manifest, RunPaths, read_manifest
from hpc_toolkit.system.binding import Machine, Place, Shares, bind, place_workers, read_machine
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.gpus import CUDA, ranks_here, visible_gpus
from hpc_toolkit.system.installation import open_streams
from hpc_toolkit.system.needs import FEATURES
from hpc_toolkit.system.processes import STOP_SIGNALS, die_with_parent, handling, readable
from hpc_toolkit.system.quantities import counted, format_duration
from hpc_toolkit.system.ranks import RankInfo, host_name, without_rank
from hpc_toolkit.system.record import Record, replace
from hpc_toolkit.worker.starting import FORK_SERVER, packages_of
from hpc_toolkit.worker.worker import EXIT_COMPLETE, WorkerOptions, start_worker

if TYPE_CHECKING:
    import subprocess


_TICK_S = 0.2
BARREN_LIVES = MAX_DEATHS + 1
"""A worker killed this often in a row without finishing an item is not started again.

The last of them fails an item that killed those before it."""


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
        self._machine: Machine | None = None  # before a worker is bound to a part of it
        if self.shares or any(map(may_need, self.manifest.stages)):
            self._machine = read_machine()
            self._places = place_workers(self._machine, self.shares or Shares(), self.workers)
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
            with handling(STOP_SIGNALS, self._forward), chld:
                if any(map(packages_of, self.manifest.stages)):
                    FORK_SERVER.start(common=True)
                for slot in range(self.workers):
                    self._start(slot)
                codes: list[int] = []
                while self._slots:
                    if readable(wake_read, timeout_s=_TICK_S):
                        os.read(wake_read, 4096)
                    codes += self._reap()
                    if on_tick is not None:
                        on_tick()
                with suppress(BlockingIOError):
                    first = os.read(self._error_read, 1 << 16).split(b"\n")[0]
                    raise reported_error(json.loads(first))
                return overall_code(codes)
        finally:
            FORK_SERVER.stop()
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
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if not self._draining:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_worker(slot, parent)
            self._slots[pid] = slot
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

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
            options = replace(
                self.options,
                pool=parent,
                has=self._has(slot, place),
                rank=_own_rank().one_of(self.workers, slot),
            )
            code = start_worker(self.paths, self.manifest, options, SystemClock())
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

    def _has(self, slot: int, place: Place) -> dict[str, Any]:
        """What one worker has, for stages with needs: an equal part, unless a share was given.

        Of divided CPUs, each brings an equal part of the memory.
        """
        machine, shares = self._machine, self.shares
        if machine is None or not any(may_need(stage) for stage in self.manifest.stages):
            return {}
        found: dict[str, Any] = {"nodes": 1} if slot else {}
        if not place.cpus:
            found["cpus"] = max(1, machine.cpus // self.workers)
        if place.memory_bytes is None:
            memory = machine.memory_bytes // ranks_here(os.environ)
            divided = shares is not None and shares.divided and place.cpus
            part = len(place.cpus) / machine.cpus if divided else 1 / self.workers
            found["memory"] = int(memory * part)
        if shares is not None and shares.gpus is not None and 0 < shares.gpus < 1:
            found["gpus"] = shares.gpus
        return found | self.options.has

    def _reap(self) -> list[int]:
        codes = []
        for pid in list(self._slots):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                slot = self._slots.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                codes.append(code)
                if code < 0 and not self._draining:
                    done = _finished_items(self.paths.workers, pid)
                    self._barren[slot] = 0 if done else self._barren[slot] + 1
                    if self._barren[slot] < BARREN_LIVES:
                        self._start(slot)
        return codes


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


def _finished_items(workers: Path, pid: int) -> int:
    """How many items the worker of this host with this process id has finished."""
    found = filter(None, map(read_presence, workers.glob(f"*-{pid}-*.json")))
    return sum(one.done + one.failed for one in found if one.host == host_name())


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
    for name, value in options.has.items():
        words = (
            value
            if name == FEATURES
            else [f"{name}={value}B" if name in ("memory", "gpu_memory") else f"{name}={value}"]
        )
        argv += [word for one in words for word in ("--has", one)]
    # Its own process group: a terminal's ^C reaches only this process, which forwards it once.
    process = subprocess.Popen(argv, env=without_rank(), process_group=0)
    try:
        with handling(STOP_SIGNALS, lambda number, _: process.send_signal(number)):
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout=_TICK_S)
                if on_tick is not None:
                    on_tick()
    finally:
        if process.poll() is None:
            process.terminate()


def local_environment(slot: int, workers: int) -> dict[str, str]:
    rank = _own_rank().one_of(workers, slot)
    found = {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.local_rank),
        "WORLD_SIZE": str(rank.world_size),
    }
    gpus = visible_gpus()
    if gpus:
        found[CUDA] = gpus[slot % len(gpus)]
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    return found


def _own_rank() -> RankInfo:
    """The rank of Slurm or MPI that this pool is; that of a launcher's environment is another's."""
    rank = RankInfo.from_environ()
    return rank if rank.in_step else replace(rank, rank=0, local_rank=0, world_size=1)


_LIVES = 5
"""How often a pool is started again if its process is killed."""
_QUIET_S = 1.0
"""Seconds of waiting for workers to exit before that is reported."""
_MAIN = "import sys; from hpc_toolkit.worker.pool import main; sys.exit(main(*sys.argv[1:]))"


class PoolApart:
    """Local workers of a run, which drain when the thread that started them ends."""

    def __init__(self, root: Path, workers: int) -> None:
        self._root, self._workers, self._lives = root, workers, _LIVES
        self._process: subprocess.Popen[bytes] | None = None
        self.environ: dict[str, str] = {}  # of the workers, besides that of this process

    def keep(self) -> HpcToolkitError | None:
        """Start the workers if they were not, or were killed; the error with which they ended."""
        process = self._process
        if process is None or ((process.poll() or 0) < 0 and self._lives):
            self._lives -= process is not None
            self._process = self._started()
        elif process.returncode is not None:
            assert process.stdout is not None
            with suppress(ValueError):
                return reported_error(json.loads(process.stdout.read()))
            message = f"the workers of {self._root} have ended, and items are left"
            return TryAgainLaterError(message, hint="start workers again; nothing is lost")
        return None

    def end(self, *, complete: bool) -> None:
        """Wait until the workers have exited; unless the run is ``complete``, ask them to."""
        if self._process is None:
            return
        import subprocess

        if not complete:
            self._process.terminate()
        try:
            self._process.wait(timeout=_QUIET_S)
        except subprocess.TimeoutExpired:
            grace_s = WorkerOptions().grace_s
            os.write(2, stopping_line(signal.SIGTERM, self._workers, grace_s, again=False))
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _started(self) -> subprocess.Popen[bytes]:
        import subprocess

        program = [sys.executable, "-P", "-c", _MAIN]
        argv = [*program, str(self._root), str(self._workers), str(os.getpid()), *sys.argv]
        # The caller may run in an srun step, and its local workers are not ranks of that step.
        environ = without_rank() | self.environ
        if environ.pop("SLURM_STEP_ID", None) is not None:
            environ.setdefault("SLURM_OVERLAP", "1")  # as start_worker does
        # Its own process group: a terminal's ^C reaches only the caller.
        return subprocess.Popen(
            argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0
        )


def main(root: str, workers: str, parent: str, *argv: str) -> int:
    """Run the pool of a script that was called with ``argv``; an error is reported on stdout."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):
        return TRY_AGAIN
    try:
        pool = Pool(
            paths=RunPaths(Path(root)),
            manifest=read_manifest(Path(root)),
            options=WorkerOptions(argv=argv),
            workers=int(workers),
            silent=True,
        )
        return pool.run()
    except HpcToolkitError as error:
        os.write(1, error_report(error))
        return error.exit_code
