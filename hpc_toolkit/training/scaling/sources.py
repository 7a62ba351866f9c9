"""Inputs of an analysis: a scaling run, logs of pods, and tables that others measured."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling.records import DIRECTORY, records_in, series_of
from hpc_toolkit.training.scaling.tables import read_csv, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpc_toolkit.training.scaling.records import Record
    from hpc_toolkit.training.scaling.series import Series

_LOGS = (".jsonl", ".log", ".txt")

# Kubernetes names the pods of an Indexed Job JOB-INDEX-RANDOM; a file's name may have a prefix.
_POD = re.compile(r"(?P<job>[a-z0-9][a-z0-9.-]*)-(?P<index>[0-9]{1,6})-[a-z0-9]{5}")


def read_source(path: Path) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    """Read the series of a directory or file, and notes on what was left out.

    A directory is from ``hpctk scaling run``, or contains logs. A file ends in .json, .csv,
    .jsonl, .log or .txt. Raises ConfigError.
    """
    if path.is_dir():
        return _read_directory(path)
    if path.suffix in _LOGS:
        return _read_logs([path], path)
    text = read_text(path)
    if path.suffix == ".json":
        return read_json(text, str(path)), ()
    if path.suffix == ".csv":
        return read_csv(text, str(path)), ()
    message = f"{path}: unknown format {path.suffix!r}"
    raise ConfigError(message, hint="a directory, or a .json, .csv, .jsonl, .log or .txt file")


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


def _read_directory(path: Path) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    if (path / DIRECTORY).is_dir():
        records = read_records(path)
        if records:
            return series_of(records), ()
        message = f"{path}: nothing was measured there yet"
        raise ConfigError(
            message, hint="wait for the first measurement; logs/ has the ranks' output"
        )
    return _read_logs(sorted(one for one in path.iterdir() if one.suffix in _LOGS), path)


def _read_logs(paths: list[Path], source: Path) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    found: list[Record] = []
    notes: list[str] = []
    for path in paths:
        text = read_text(path)
        records = list(records_in(text, str(path)))
        found += records
        notes += [] if records else _silent(path, text)
    if not found:
        message = f"{source}: no measurement in {len(paths)} files"
        hint = "name the directory of a scaling run, or of logs ('kubectl logs POD > POD.log')"
        raise ConfigError("; ".join([message, *notes]), hint=hint)
    return series_of(found), tuple(notes)


def _silent(path: Path, text: str) -> Iterator[str]:
    """Yield a note if the log is from the pod of rank 0, the only rank that prints records."""
    pod = _POD.search(path.stem)
    if pod is None or int(pod["index"]):
        return
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = f"it ended with {lines[-1][:200]!r}" if lines else "it is empty"
    yield f"{path.name} of {pod['job']} has no measurement: {last}"
