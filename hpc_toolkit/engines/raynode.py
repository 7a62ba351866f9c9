"""Run Ray on one node of a job.

Called as ``python -m hpc_toolkit.engines.raynode ray symmetric-run ... -- PROGRAM``.

``ray symmetric-run`` starts Ray on every node and the program on the first. This process is srun's
task and runs that command. It tells Ray the node's resources that Slurm gave to the job. It lets
only the program get the warning of the time limit (SIGUSR1), which would end Ray's processes. It
ends all processes that the job has started on this node, and no others.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.system.gpus import visible_gpus
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.processes import WARNING, adopt_orphans, descendants

PROGRAM = "--program"
_OF_RAY = "r"
"""Ray's directory below the job's private one: Ray opens its own to everybody (mode 0777)."""
_HEAD = "head"
"""A file that exists if this is the first node."""
_FAILED = "failed"
"""A file that exists if Ray did not start on the first node, which symmetric-run ends with 0."""
_CUT_SHORT = 1
"""Exit code of a task that was ended: low, because srun reports the highest code of all tasks."""
_GRACE_S = 30.0
"""Seconds that processes have to end after a signal, as long as Slurm's KillWait."""
_LEAVING_S = 3.0
"""Seconds that Ray's processes have after the program has ended; they have nothing to save."""
_LOOK_S = 0.05
_SMALLEST_STORE = 80 * 2**20
_STORE_SHARE = 0.3
"""Share of the job's memory; Ray takes the same share of a machine's."""
_MISSED = 5
"""Consecutive looks without an answer after which Ray on the first node counts as ended."""
_RAY = """#!/bin/sh
case "$1 $2" in
  "stop "*) exit 0 ;;
  "start --head")
    : >{head}
    {real} "$@" --include-dashboard=false && exit
    code=$?
    : >{failed}
    exit $code ;;
esac
exec {real} "$@"
"""


def resources(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return options of ``ray start`` for the job's resources on this node.

    Without a memory request in Slurm's variables, Ray determines the memory itself.
    """
    cpus = _number(environ, "SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0))
    gpus = _number(environ, "SLURM_GPUS_ON_NODE") or len(visible_gpus())
    options = [f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
    memory_mib = (
        _number(environ, "SLURM_MEM_PER_NODE")
        or _number(environ, "SLURM_MEM_PER_CPU") * cpus
        or _number(environ, "SLURM_MEM_PER_GPU") * gpus
    )
    if memory_mib:
        store = max(_SMALLEST_STORE, int(memory_mib * 2**20 * _STORE_SHARE))
        room = shutil.disk_usage("/dev/shm").free * 9 // 10  # noqa: S108 - where Ray has its store
        store = max(_SMALLEST_STORE, min(store, room))
        options += [f"--memory={max(1, memory_mib * 2**20 - store)}"]
        options += [f"--object-store-memory={store}"]
    return options


def full_command(words: list[str], root: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return ``ray symmetric-run`` with this node's resources; the program's signals are reset.

    Raises ConfigError: there is no program.
    """
    if "--" not in words or words[-1] == "--":
        message = "no program is given for Ray to run"
        raise ConfigError(message, hint="ray symmetric-run --address HOST:PORT -- PROGRAM")
    cut = words.index("--")
    options = [*resources(environ), f"--temp-dir={root}/{_OF_RAY}"]
    given = {word.partition("=")[0] for word in words[:cut]}
    own = [option for option in options if option.partition("=")[0] not in given]
    program = [sys.executable, "-Pm", "hpc_toolkit.engines.raynode", PROGRAM, *words[cut + 1 :]]
    return [*words[:cut], *own, "--", *program]


def work(words: list[str]) -> int:
    """Run the command until it and its processes have ended; return the exit code for srun.

    Raises HpcToolkitError: Ray did not start, so the program did not run.
    """
    adopt_orphans()
    told: list[int] = []
    with _directory(os.environ) as root:
        command = full_command(words, str(root))
        signal.signal(WARNING, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _: told.append(got))
        path = f"{_own_ray(root)}:{os.environ.get('PATH', os.defpath)}"
        child = subprocess.Popen(command, env={**os.environ, "PATH": path})
        try:
            code = _wait(child.pid, told, FirstNode(root, os.environ.get("RAY_ADDRESS", "")))
        finally:
            _end_all(_GRACE_S if told else _LEAVING_S)
        if code == 0 and (root / _FAILED).exists():
            message = "Ray did not start on the first node, so the program did not run"
            hint = "see the lines above, fix the cause and submit again"
            raise HpcToolkitError(message, hint=hint)
    if code is None:
        return 0
    if code < 0:
        return _CUT_SHORT if told or -code == signal.SIGTERM else 128 - code
    return code


class FirstNode:
    """The node of the program, as the others see it: when its Ray has ended, theirs must end too.

    By themselves they would look for it for half a minute, and write long messages about that.
    """

    def __init__(self, root: Path, address: str) -> None:
        self._root = root
        host, _, port = address.rpartition(":")
        self._place = (host, int(port)) if port.isdigit() else None
        self._missed: int | None = None
        self._look_at = 0.0

    def is_gone(self) -> bool:
        """Return whether it answered once and now does not; looks at most once a second."""
        now = time.monotonic()
        if self._place is None or now < self._look_at:
            return False
        self._look_at = now + 1.0
        if (self._root / _HEAD).exists():
            self._place = None
        elif self._answers():
            self._missed = 0
        elif self._missed is not None:
            self._missed += 1
        return (self._missed or 0) >= _MISSED

    def _answers(self) -> bool:
        try:
            with socket.create_connection(self._place or ("", 0), timeout=2.0):
                return True
        except OSError:
            return False


def _wait(child: int, told: list[int], first: FirstNode) -> int | None:
    """Reap processes until the child has ended; a signal goes to all descendants as SIGTERM.

    Returns the child's exit code, negative for a signal; None if the first node has ended before.
    """
    forwarded = 0
    while True:
        if len(told) > forwarded:
            forwarded = len(told)
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            return os.waitstatus_to_exitcode(status)
        if first.is_gone():
            return None
        if not ended:
            time.sleep(_LOOK_S)


def _end_all(patience_s: float) -> None:
    """End this job's processes on this node; kill those that are left after ``patience_s``."""
    end = time.monotonic() + patience_s
    asked: set[int] = set()
    while left := descendants(os.getpid()):
        force = time.monotonic() > end
        for pid in left if force else [pid for pid in left if pid not in asked]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if force else signal.SIGTERM)
        asked.update(left)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_LOOK_S)


@contextmanager
def _directory(environ: Mapping[str, str]) -> Iterator[Path]:
    """Create the job's directory for Ray's sockets and logs, readable only by this user.

    Its name is the same on all nodes, which older versions of Ray need, and short: paths of
    sockets have at most 107 bytes (unix(7)).
    """
    job = environ.get("SLURM_JOB_ID", str(os.getpid()))
    start = environ.get("SLURM_RESTART_COUNT", "0")
    root = Path(f"/tmp/hpctk-ray-{job}.{start}")  # noqa: S108 - made here, for its owner alone
    try:
        root.mkdir(mode=0o700)
    except FileExistsError as error:
        message = f"{root} exists: another Ray of this job runs on this node"
        hint = "start only one Ray per job, or remove the directory"
        raise HpcToolkitError(message, hint=hint) from error
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _own_ray(root: Path) -> Path:
    """Create a directory with a ``ray`` that stops nothing, and starts no dashboard.

    At its end symmetric-run calls ``ray stop``, which ends every Ray of this user on the node, also
    that of other jobs. This process ends what the job started. The option against a dashboard
    cannot go to symmetric-run, which gives it to all nodes: only the first node accepts it.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"no ray beside {sys.executable}", hint=how_to_add(extra="ray"))
    # Not the program that pip installs: it does not start from a path with quotes or "$".
    real = shlex.join([sys.executable, "-P", "-m", "ray.scripts.scripts"])
    programs = root / "bin"
    programs.mkdir()
    script = programs / "ray"
    script.write_text(
        _RAY.format(
            real=real, head=shlex.quote(str(root / _HEAD)), failed=shlex.quote(str(root / _FAILED))
        ),
        encoding="utf-8",
    )
    script.chmod(0o700)
    return programs


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else 0


def main() -> int:
    """Run as a program; return the exit code."""
    words = sys.argv[1:]
    if words[:1] == [PROGRAM]:
        # The program itself decides what a warning means.
        for number in (WARNING, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(words[1], words[1:])  # noqa: S606 - no shell is wanted
    try:
        return work(words)
    except HpcToolkitError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
