"""The ranks of one node in one round: their processes, and where their output goes.

A rank writes to files, one for each stream and restart. A thread of this process copies complete
lines from there to the terminal, so a slow terminal never holds up a rank.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.processes import WARNINGS, descendants, kill_group
from hpc_toolkit.system.quantities import format_cpus, parse_cpus
from hpc_toolkit.training.launch import rank
from hpc_toolkit.training.progress import RankFailure

if TYPE_CHECKING:
    from hpc_toolkit.training.launch.plan import Plan
    from hpc_toolkit.training.launch.rendezvous import Place

_COPY_EVERY_S = 0.1
_LOOK_EVERY_S = 0.05
_KILL_S = 5
"""How long children are killed again, since one of them may be a program of another user."""
_CHUNK_BYTES = 1 << 20
"""Copied at once from each file, so that a rank that writes much does not hold up the others."""
_AFTER_LINE = re.compile(rb"(?<=\n)|(?<=\r)(?!\n|\Z)")
"""Where a line ends; a carriage return ends one too, so that progress bars move."""
_AFTER_FAILURE_S = 5
"""How long the remaining ranks get to exit after one has failed; they cannot continue."""


def rank_variables(
    plan: Plan, place: Place, local: int, *, restart: int = 0, error_file: Path | str = ""
) -> dict[str, str]:
    """Return torchrun's variables for a rank of this node; ``@record`` needs ``error_file``."""
    rank, world_size = str(place.first + local), str(place.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(plan.ranks),
        "GROUP_RANK": str(plan.node_rank),
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": plan.role,
        "MASTER_ADDR": place.address.host,
        "MASTER_PORT": str(place.address.port),
        # Rank 0 does not open a store: the launch serves the one at this address.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": plan.launch,
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def streams_of(streams: int | str, local: int) -> int:
    """The streams of one local rank: ``3`` is for all, ``0:3,1:2`` for those that it names."""
    by_rank = dict(re.findall("([0-9]+):([0-3])", str(streams)))
    return int(by_rank.get(str(local), 0) if by_rank else streams)


class Ranks:
    """The ranks of this node in one round."""

    def __init__(self, plan: Plan, directory: Path, place: Place, *, restart: int) -> None:
        """Prepare to start them; the files of their output are in ``directory``.

        This process gets orphans: each new child of it belongs to a rank.
        """
        self._plan, self._directory = plan, directory
        self._others = descendants(os.getpid())
        self._place, self._restart = place, restart
        self._processes: list[subprocess.Popen[bytes]] = []
        self._terminal = _Terminal()

    @property
    def world_size(self) -> int:
        return self._place.world_size

    def start(self, command: list[str], environ: Mapping[str, str]) -> None:
        """Start a process per rank.

        Raises ConfigError if there is no GPU near which a rank could run, or OSError if a file or
        process cannot be created.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        # A warning would end a rank that does not ignore it yet. A signal that ends the launch
        # would lose the child that Popen has just started.
        blocked = (*WARNINGS, *rank.ENDING)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            for local in range(self._plan.ranks):
                self._processes.append(self._started(local, command, environ))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._terminal.start()

    def _started(
        self, local: int, command: list[str], environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        cpus = cpus_near_gpu(local) if self._plan.near_gpus else ""
        error_file = self._log(local, "error.json").absolute()
        error_file.unlink(missing_ok=True)  # of an earlier launch of this name
        variables = rank_variables(
            self._plan, self._place, local, restart=self._restart, error_file=error_file
        )
        with ExitStack() as opened:
            # Detached from the terminal, so that ^C reaches the rank only through the launch.
            return subprocess.Popen(
                [sys.executable, "-Pm", rank.__name__, str(os.getpid()), cpus, *command],
                env={**environ, **variables},
                stdout=self._output(local, 1, opened),
                stderr=self._output(local, 2, opened),
                start_new_session=True,
            )

    def _output(self, local: int, stream: int, opened: ExitStack) -> IO[bytes] | int | None:
        """Return where stdout (1) or stderr (2) of a rank goes; None is this process's own."""
        plan = self._plan
        shown = not plan.shown or local in plan.shown
        tee = streams_of(plan.tee, local)
        if not (tee | streams_of(plan.redirects, local)) & stream:
            return None if shown else subprocess.DEVNULL
        path = self._log(local, "out" if stream == 1 else "err")
        file = opened.enter_context(path.open("wb"))
        if shown and tee & stream:
            to = sys.stdout if stream == 1 else sys.stderr
            if to is not None:  # closed by the caller: >&-
                self._terminal.follow(path, f"[rank {self._place.first + local}] ", to)
        return file

    def _log(self, local: int, stream: str) -> Path:
        number = self._place.first + local
        return self._directory / f"rank-{number}.restart-{self._restart}.{stream}"

    def codes(self) -> dict[int, int | None]:
        """Return the exit code of each rank, by local rank; None while it runs."""
        codes = {local: process.poll() for local, process in enumerate(self._processes)}
        known = {*self._others, *(process.pid for process in self._processes)}
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        # Adopted orphans would stay zombies as long as the launch.
        with suppress(ChildProcessError):
            while (it := os.waitid(os.P_ALL, 0, how)) and it.si_pid not in known:
                os.waitpid(it.si_pid, 0)
        return codes

    def _groups(self) -> set[int]:
        """Return the process groups in which ranks and their descendants run."""
        running = [process.pid for process in self._processes if process.poll() is None]
        others = {pid for one in self._others for pid in (one, *descendants(one))}
        groups = set(running)
        for pid in {*descendants(os.getpid())} - others:
            with suppress(ProcessLookupError):
                groups.add(os.getpgid(pid))
        return groups - {os.getpgrp()}

    def warn(self, number: int) -> None:
        """Send a warning signal to the running ranks, not to their children."""
        for process in self._processes:
            process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, grace_s: float = _AFTER_FAILURE_S) -> None:
        """End what still runs of the ranks and their children; kill it after ``grace_s``."""
        for group in self._groups():
            kill_group(group, number)
        kill_at = time.monotonic() + min(grace_s, self._plan.shutdown_timeout_s)
        while (left := self._groups()) and (now := time.monotonic()) < kill_at + _KILL_S:
            for group in left if now >= kill_at else ():
                kill_group(group)
            time.sleep(_LOOK_EVERY_S)
        for process in self._processes:
            process.wait()
        self._terminal.end()

    def failures(self, ended: Iterable[int]) -> list[RankFailure]:
        """Describe local ranks that ended with a code other than 0."""
        logs = {local: self._log(local, "err") for local in ended}
        return [
            RankFailure(
                self._place.first + local,
                self._processes[local].returncode,
                log if log.exists() else None,
                self._log(local, "error.json"),
            )
            for local, log in logs.items()
        ]


def make_next(directory: Path) -> Path:
    """Make a directory of this name, or with the next free number appended: NAME, NAME-2 ..."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError) as error:
        # For example below /proc, where only the kernel creates names, or below a file.
        message = f"{error.filename}: cannot create a directory there"
        hint = "choose another directory with --run-dir or --log-dir"
        raise ConfigError(message, hint=hint) from error
    path, number = directory, 1
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            path = directory.with_name(f"{directory.name}-{number}")
        else:
            return path


def cpus_near_gpu(index: int, root: Path = Path("/sys")) -> str:
    """Return the CPUs of the NUMA node of a GPU that this process may use, such as 0-7.

    Raises ConfigError if torch does not see that GPU.
    """
    import torch

    if index >= torch.cuda.device_count():
        message = f"--numa-binding: torch sees no GPU {index} for that local rank"
        raise ConfigError(message, hint="leave it out; in a job, srun's --cpu-bind binds tasks")
    gpu: Any = torch.cuda.get_device_properties(index)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    node = int((root / f"bus/pci/devices/{address}/numa_node").read_text())
    # -1 is a machine with one NUMA node.
    path = root / f"devices/system/node/node{max(0, node)}/cpulist"
    return format_cpus(tuple(os.sched_getaffinity(0).intersection(parse_cpus(path.read_text()))))


class _File:
    """A file of a rank that is copied to the terminal."""

    def __init__(self, path: Path, prefix: str, to: TextIO) -> None:
        # A line may follow a bar of another rank, which would stay visible behind it.
        self._file, self._prefix = path.open("rb"), f"\x1b[K{prefix}" if to.isatty() else prefix
        self._to, self._begun = to, b""

    def copy(self, *, last: bool = False) -> None:
        """Copy some new lines, or all if it is the ``last`` time.

        Until then an incomplete line is held back, unless it is long.
        """
        while chunk := self._file.read(_CHUNK_BYTES):
            *lines, self._begun = _AFTER_LINE.split(self._begun + chunk)
            if len(self._begun) >= _CHUNK_BYTES:  # such as a file without an end of a line
                lines, self._begun = [*lines, self._begun + b"\n"], b""
            self._write(lines)
            if not last:
                return
        if last:
            self._write([self._begun + b"\n"] if self._begun else [])
            self.close()

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        encoding = self._to.encoding or "utf-8"
        for line in lines:
            if line != b"\r":  # a bar may begin with it
                text = f"{self._prefix}{line.decode(errors='replace')}"
                self._to.write(text.encode(encoding, "replace").decode(encoding))
        self._to.flush()


class _Terminal(threading.Thread):
    """Copies what ranks write until they have ended."""

    def __init__(self) -> None:
        super().__init__(name="terminal", daemon=True)
        self._files: list[_File] = []
        self._over = threading.Event()

    def follow(self, path: Path, prefix: str, to: TextIO) -> None:
        self._files.append(_File(path, prefix, to))

    def run(self) -> None:
        while not self._over.wait(_COPY_EVERY_S):
            self._copy()
        self._copy(last=True)

    def _copy(self, *, last: bool = False) -> None:
        for file in list(self._files):
            try:
                file.copy(last=last)
            except (OSError, ValueError):
                # The terminal may be gone; the files have all output.
                self._files.remove(file)
                file.close()

    def end(self) -> None:
        """Copy the rest, also incomplete lines."""
        self._over.set()
        if self.ident is not None:
            self.join()
