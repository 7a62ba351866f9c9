"""Measure one training on several numbers of ranks, and compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def prepare(directory: Path) -> None:
    """Create the directory of a scaling run and write to it.

    Raises:
        ConfigError: the directory cannot be created or written to.
        OSError: there is no room, or the filesystem does not answer; a later call may succeed.
    """
    import tempfile

    from hpc_toolkit.errors import PASSING, ConfigError
    from hpc_toolkit.training.scaling.recorder import DIRECTORY

    try:
        (directory / DIRECTORY).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        if error.errno in PASSING:
            raise
        message = f"-o {directory}: cannot be written to: {error.strerror}"
        raise ConfigError(message, hint="name another directory") from error


def measure(
    directory: Path,
    program: Sequence[str],
    world_size: int,
    repeat: int,
    *,
    backend: str | None = None,
) -> None:
    """Run a training, a script or ``-m MODULE``, on this machine's ranks, with output to files.

    Its `Recorder` adds a record to ``directory``. Raises RunError: it ended with another code than
    0; ConfigError: it has recorded nothing.
    """
    import os
    import shlex
    import subprocess
    import sys

    from hpc_toolkit.errors import ConfigError, RunError
    from hpc_toolkit.system.quantities import counted
    from hpc_toolkit.training.scaling.recorder import DIRECTORY, RECORDS, REPEAT

    path = directory / DIRECTORY / f"world-{world_size}.jsonl"
    before = path.stat().st_size if path.exists() else 0
    launch = [sys.executable, "-Pm", "hpc_toolkit", "launch", "--nproc-per-node", str(world_size)]
    launch += ["--redirects", "3", "--run-dir", str(directory)]
    launch += ["--backend", backend] if backend else []
    first = 2 if program[0] == "-m" else 1
    launch += [*program[:first], "--", *program[first:]]
    environ = {**os.environ, RECORDS: str(path), REPEAT: str(repeat)}
    name = shlex.join(program)
    if code := subprocess.run(launch, env=environ, check=False).returncode:
        message = f"{name} ended with exit code {code} on {counted(world_size, 'rank')}"
        raise RunError(message, hint=f"{directory}/logs has the output of the ranks")
    if not path.exists() or path.stat().st_size == before:
        message = f"{name} recorded no speed on {counted(world_size, 'rank')}"
        hint = "use hpc_toolkit.training.scaling.recorder.Recorder in its loop"
        raise ConfigError(message, hint=hint)
