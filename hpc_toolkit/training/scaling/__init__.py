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
    from hpc_toolkit.training.scaling.records import DIRECTORY

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
    0; ConfigError: it has recorded nothing; and what a launch raises.
    """
    import os
    import shlex

    from hpc_toolkit.errors import ConfigError, RunError
    from hpc_toolkit.system.quantities import counted
    from hpc_toolkit.training.launch import launcher
    from hpc_toolkit.training.launch.plan import Request
    from hpc_toolkit.training.scaling.recorder import RECORDS, REPEAT
    from hpc_toolkit.training.scaling.records import DIRECTORY

    path = directory / DIRECTORY / f"world-{world_size}.jsonl"
    before = path.stat().st_size if path.exists() else 0
    os.environ.update({RECORDS: str(path), REPEAT: str(repeat)})
    module = program[0] == "-m"
    script, *arguments = program[1:] if module else program
    outcome = launcher.launch(
        Request(
            script=script,
            arguments=tuple(arguments),
            options={"module": module, "redirects": "3", "nproc_per_node": world_size},
            backend=backend,
            run_dir=directory,
        )
    )
    if outcome.error is not None:
        raise outcome.error
    name = shlex.join(program)
    if outcome.code:
        message = f"{name} ended with exit code {outcome.code} on {counted(world_size, 'rank')}"
        raise RunError(message, hint=f"{directory}/logs has the output of the ranks")
    if not path.exists() or path.stat().st_size == before:
        message = f"{name} recorded no speed on {counted(world_size, 'rank')}"
        hint = "use hpc_toolkit.training.scaling.recorder.Recorder in its loop"
        raise ConfigError(message, hint=hint)
