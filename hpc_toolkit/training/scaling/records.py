"""Measurements as JSON lines, in directories and logs.

The recorder of a training writes them. A record names the settings and the machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.quantities import counted

KIND = "hpctk.scaling"
FORMAT = 1
DIRECTORY = "records"
"""Subdirectory of a scaling run with one file of records for each world size."""

Record = dict[str, Any]

_GROUPS = ("settings", "step_s", "memory", "machine")
_PARAMETERS = ("parameters", "trained_parameters")


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
    # Records of other programs may lack these.
    yield lambda count: count is None or (type(count) is int and count >= 0), record, _PARAMETERS
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


_LOGS = (".jsonl", ".log", ".out", ".txt")


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
