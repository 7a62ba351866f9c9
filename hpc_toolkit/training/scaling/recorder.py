"""Record the speed of any training as JSON lines, for ``hpctk scaling``, and read them.

::

    recorder = Recorder(batch_per_rank=32)   # or batch_global=256
    for inputs, labels in loader:
        ...
        recorder.step(loss=loss)
    recorder.finish()
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from hpc_toolkit.errors import PASSING, ConfigError, RunError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.ranks import host_name

KIND = "hpctk.scaling"
FORMAT = 1
DIRECTORY = "records"
"""Subdirectory of a scaling run with one file of records for each world size."""

Record = dict[str, Any]
_GROUPS = ("settings", "step_s", "memory", "machine")
_LOGS = (".jsonl", ".log", ".out", ".txt")

RECORDS = "HPCTK_SCALING_RECORDS"
"""Variable with the file to which a measurement is appended; without it, it is printed."""
REPEAT = "HPCTK_SCALING_REPEAT"
"""Variable with the number of the measurement, from 0."""


class Recorder:
    """Times the steps of a training, and records samples per second at its end.

    Every rank makes one; rank 0 writes. A step lasts from the end of the step before to the call of
    :meth:`step`, on rank 0, after its GPU has finished, with everything in the loop: loading,
    evaluation, checkpoints. The first ``warmup`` steps are not counted.
    """

    def __init__(
        self,
        *,
        batch_per_rank: int | None = None,
        batch_global: int | None = None,
        tokens_per_sample: int = 1,
        warmup: int = 5,
    ) -> None:
        """Give the samples of a step either for each rank or for all ranks together.

        Raises ConfigError: both batch sizes are given, or neither.
        """
        given = [one for one in (batch_per_rank, batch_global) if one is not None]
        if len(given) != 1 or given[0] < 1:
            message = f"batch_per_rank={batch_per_rank}, batch_global={batch_global}"
            raise ConfigError(message, hint="give one of them, at least 1")
        self._world_size = int(os.environ.get("WORLD_SIZE") or 1)
        self._weak = batch_per_rank is not None
        self._batch = given[0]
        self._tokens = tokens_per_sample
        self._warmup = warmup
        self._loss: float | None = None
        self._ends: list[float] = []

    def step(self, *, loss: Any = None) -> None:
        """Count a step that has ended; ``loss`` is a number or a tensor with one."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        number = None if loss is None else float(loss)
        self._loss = number if is_number(number) else None
        self._ends.append(time.perf_counter())

    def finish(self) -> Record | None:
        """Write the record on rank 0 and return it; None on other ranks.

        Raises ConfigError: there were no steps after the warm-up.
        """
        if int(os.environ.get("RANK") or 0):
            return None
        ends = self._ends[self._warmup :]
        if len(ends) < 2:
            message = f"{len(self._ends)} steps were recorded, and {self._warmup} are warm-up"
            raise ConfigError(message, hint="train longer, or set warmup to a smaller number")
        times = [after - before for before, after in pairwise(ends)]
        samples = self._batch * self._world_size if self._weak else self._batch
        rate = samples * len(times) / (ends[-1] - ends[0])
        torch = sys.modules.get("torch")
        cuda = torch is not None and torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or self._world_size)
        job = os.environ.get("SLURM_JOB_ID")
        record: Record = {
            "kind": KIND,
            "format": FORMAT,
            "world_size": self._world_size,
            "nodes": max(1, self._world_size // local),
            # Jobs of one world size are repeats, too.
            "repeat": int(os.environ.get(REPEAT) or job or 0),
            "settings": {
                "model": Path(sys.argv[0]).name,
                "arguments": shlex.join(sys.argv[1:]),
                "weak": self._weak,
                "batch_size": self._batch,
            },
            "machine": {
                "host": host_name(),
                "device": torch.cuda.get_device_name() if torch is not None and cuda else "cpu",
                "cpus": len(os.sched_getaffinity(0)),
                "python": platform.python_version(),
                **({"job": job} if job else {}),
            },
            "memory": {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
            "at": time.time(),
            "samples_per_s": rate,
            "tokens_per_s": rate * self._tokens,
            "step_s": {
                "median": median(times),
                "p90": quantiles(times, n=10)[-1] if len(times) > 1 else times[0],
            },
            "loss": self._loss,
        }
        path = os.environ.get(RECORDS)
        write_record(record, Path(path) if path else None)
        return record


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Reject a record that is damaged or has another format. Raises ConfigError."""
    if record.get("format") != FORMAT:
        message = f"{where}: format {record.get('format')!r} is not {FORMAT}"
        raise ConfigError(message, hint="read it with the version of hpctk that wrote it")
    # The groups are checked before the values in them are read.
    for fits, values, keys in _checks(record):
        for key in keys:
            if not fits(values.get(key)):
                message = f"{where}: {key} is {values.get(key)!r:.50}"
                raise ConfigError(message, hint="remove the damaged line, and measure again")


def _checks(
    record: Mapping[str, Any],
) -> Iterator[tuple[Callable[[Any], bool], Mapping[str, Any], Iterable[str]]]:
    """Yield tests, with the values and the keys that they are for."""
    yield lambda count: type(count) is int and 1 <= count < 10**9, record, ("world_size", "nodes")
    yield lambda count: type(count) is int and 0 <= count < 10**9, record, ("repeat",)
    yield lambda rate: is_number(rate) and rate > 0, record, ("samples_per_s", "tokens_per_s")
    yield lambda group: isinstance(group, dict), record, _GROUPS
    yield is_number, record["machine"], record["machine"].keys() & {"cpus"}


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold: not a bool, NaN or infinite."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def records_in(text: str, where: str) -> Iterator[Record]:
    """Yield the records in a text; skip other lines, and text before a record on its line.

    So the log of a pod can be read, with time stamps or names before each line. A torn line is
    skipped as well. Raises ConfigError for a record that is damaged otherwise.
    """
    decoder = json.JSONDecoder()
    for number, line in enumerate(text.splitlines(), start=1):
        start = line.find("{") if KIND in line else -1
        if start < 0:
            continue
        try:
            record, _ = decoder.raw_decode(line, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("kind") == KIND:
            check_record(record, f"{where}:{number}")
            yield record


def identity(record: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return a key of the training, equal at any world size; the world size; the repeat."""
    settings = json.dumps(record["settings"], sort_keys=True)
    return settings, record["world_size"], record["repeat"]


def write_record(record: Record, path: Path | None) -> None:
    """Append a record to a file; without one, print it."""
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    if path is None:
        sys.stdout.write(line.decode())
        sys.stdout.flush()
        return
    fd = files.open_or_create(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        # A killed rank may have left an incomplete last line, which would absorb this one.
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        files.write_all(fd, b"\n" * torn + line)
    finally:
        os.close(fd)


def read_source(path: Path) -> list[Record]:
    """Read the records of a directory or file; there is at least one.

    A directory is from ``hpctk scaling run``, or contains logs. A file ends in .jsonl, .log, .out
    or .txt; ``-`` is a log on stdin. Raises ConfigError.
    """
    if str(path) == "-":
        return _of_logs({"stdin": sys.stdin.read()}, "stdin")
    if path.is_dir():
        if (path / DIRECTORY).is_dir():
            if records := read_records(path):
                return records
            message = f"{path}: nothing has been measured yet"
            hint = "wait for the first measurement; logs/ contains the output of the ranks"
            raise ConfigError(message, hint=hint)
        logs = sorted(one for one in path.iterdir() if one.suffix in _LOGS)
        return _of_logs({str(one): read_text(one) for one in logs}, str(path))
    if path.suffix not in _LOGS:
        message = f"{path}: unknown format {path.suffix!r}"
        raise ConfigError(message, hint="a directory, or a .jsonl, .log, .out or .txt file")
    return _of_logs({str(path): read_text(path)}, str(path))


def read_records(directory: Path) -> list[Record]:
    """Read the records of a scaling run; [] if nothing was measured yet. Raises ConfigError."""
    paths = sorted((directory / DIRECTORY).glob("*.jsonl"))
    return [record for path in paths for record in records_in(read_text(path), str(path))]


def read_text(path: Path) -> str:
    """Read a file as text; invalid bytes, such as those of a torn line, are replaced by marks.

    Raises ConfigError if the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
        raise ConfigError(message, hint="name a file, or the directory of a scaling run") from error


def _of_logs(texts: Mapping[str, str], source: str) -> list[Record]:
    if found := [one for path, text in texts.items() for one in records_in(text, path)]:
        return found
    message = f"{source}: no measurement in {counted(len(texts), 'file')}"
    hint = "name the directory of a scaling run, or of logs ('kubectl logs POD > POD.log')"
    raise ConfigError(message, hint=hint)


def prepare(directory: Path) -> None:
    """Create the directory of a scaling run and write to it.

    Raises ConfigError if that is not possible, and OSError if a later call may succeed.
    """
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
    directory: Path, program: Sequence[str], world_size: int, repeat: int, *, backend: str | None
) -> None:
    """Run a training, a script or ``-m MODULE``, on this machine's ranks, with output to files.

    Its `Recorder` adds a record to ``directory``. Raises RunError: it ended with another code than
    0; ConfigError: it has recorded nothing.
    """
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
