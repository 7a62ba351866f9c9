"""Measurements as JSON lines, and the inputs of an analysis: directories and logs.

The recorder of a training writes them. A record names the settings and the machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.training.scaling.comparison import Point, Series

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


def series_of(records: Iterable[Record]) -> tuple[Series, ...]:
    """Return one series per training; of two records with one identity, the later one counts."""
    # Sorted by content, so that the order of reading changes nothing.
    ordered = sorted(records, key=lambda one: (str(one.get("at")), json.dumps(one)))
    latest = {identity(record): record for record in ordered}
    groups: dict[str, list[Record]] = defaultdict(list)
    for key in sorted(latest):
        groups[key[0]].append(latest[key])
    names = _names(groups)
    return tuple(_series(names[key], group) for key, group in groups.items())


def _names(groups: Mapping[str, list[Record]]) -> dict[str, str]:
    """Name each training by the settings that differ; a single one by its model."""
    settings = {key: group[0]["settings"] for key, group in groups.items()}
    keys = sorted({key for one in settings.values() for key in one})
    differing = [
        key for key in keys if len({json.dumps(one.get(key)) for one in settings.values()}) > 1
    ]
    return {
        key: ", ".join(f"{name}={one.get(name)}" for name in differing)
        or str(one.get("model", "training"))
        for key, one in settings.items()
    }


def _series(name: str, records: list[Record]) -> Series:
    sizes = sorted({record["world_size"] for record in records})
    clusters, partitions = _all(records, "cluster"), _all(records, "partition")
    return Series(
        name=name,
        points=tuple(_point([one for one in records if one["world_size"] == n]) for n in sizes),
        law="weak" if records[0]["settings"].get("weak") else "strong",
        notes=tuple(_notes(records)),
        device=" and ".join(_all(records, "device")),
        cluster=clusters[0] if len(clusters) == 1 else "",
        partition=partitions[0] if len(partitions) == 1 else "",
    )


def _all(records: list[Record], key: str, missing: str = "") -> list[str]:
    return sorted({str(one["machine"].get(key, missing)) for one in records})


def _point(records: list[Record]) -> Point:
    details = {
        "tokens_per_s": median(one["tokens_per_s"] for one in records),
        **{f"step_{key}_s": _median(records, "step_s", key) for key in ("median", "p90")},
        "rss_bytes": _median(records, "memory", "rss"),
        **{key: max(one.get(key) or 0 for one in records) or None for key in _PARAMETERS},
    }
    return Point(
        world_size=records[0]["world_size"],
        rates=tuple(one["samples_per_s"] for one in records),
        nodes=max(one["nodes"] for one in records),
        details={key: value for key, value in details.items() if value is not None},
    )


def _median(records: list[Record], group: str, key: str) -> float | None:
    values: list[Any] = [one[group].get(key) for one in records]
    known = list(filter(is_number, values))
    return float(median(known)) if known else None


def parameters_text(values: Mapping[str, Any]) -> str:
    """Return the trained and the frozen parameters of a record or a row; "" if unknown."""
    trained, total = values.get("trained_parameters") or 0, values.get("parameters") or 0
    if not trained:
        return ""
    if total <= trained:
        return f"{trained:,} parameters" + (", all of them trained" if total else " are trained")
    frozen = f"{total - trained:,} are frozen"
    return f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%}), {frozen}"


def _notes(records: list[Record]) -> Iterator[str]:
    machines = [one["machine"] for one in records]
    if all(one.get("device") == "cpu" for one in machines):
        yield "the ranks are processes on CPUs: a GPU-hour here is an hour of one of them"
    shared = sorted(
        {
            (one["world_size"], one["machine"]["cpus"])
            for one in records
            if one["machine"].get("device") == "cpu"
            and one["world_size"] / max(1, one["nodes"]) > one["machine"].get("cpus", 10**9)
        }
    )
    for size, cpus in shared:
        yield f"{size} ranks shared {cpus} CPUs of a node: they had to take turns"
    names = {"device": "kinds of device", "cluster": "clusters"}
    for key, words in names.items():
        if len(found := _all(records, key, "none")) > 1:
            yield f"measured on several {words}: {', '.join(found)}"


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


_LOGS = (".jsonl", ".log", ".txt")


def read_source(path: Path) -> tuple[Series, ...]:
    """Read the series of a directory or file.

    A directory is from ``hpctk scaling run``, or contains logs. A file ends in .jsonl, .log or
    .txt; ``-`` is a log on stdin. Raises ConfigError.
    """
    if str(path) == "-":
        return _of_logs({"stdin": sys.stdin.read()}, "stdin")
    if path.is_dir():
        if (path / DIRECTORY).is_dir():
            if records := read_records(path):
                return series_of(records)
            message = f"{path}: nothing has been measured yet"
            hint = "wait for the first measurement; logs/ contains the output of the ranks"
            raise ConfigError(message, hint=hint)
        logs = sorted(one for one in path.iterdir() if one.suffix in _LOGS)
        return _of_logs({str(one): read_text(one) for one in logs}, str(path))
    if path.suffix not in _LOGS:
        message = f"{path}: unknown format {path.suffix!r}"
        raise ConfigError(message, hint="a directory, or a .jsonl, .log or .txt file")
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


def _of_logs(texts: Mapping[str, str], source: str) -> tuple[Series, ...]:
    if found := [one for path, text in texts.items() for one in records_in(text, path)]:
        return series_of(found)
    message = f"{source}: no measurement in {counted(len(texts), 'file')}"
    hint = "name the directory of a scaling run, or of logs ('kubectl logs POD > POD.log')"
    raise ConfigError(message, hint=hint)
