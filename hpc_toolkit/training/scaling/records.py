"""Measurements as JSON lines, and the inputs of an analysis: records, logs and tables.

The measured program writes the records. A record is self-contained: it names every setting, the
machine and the code. Decision 0029 describes the format.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling.series import Point, Series
from hpc_toolkit.training.scaling.tables import read_csv, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    Rule = Callable[[Any], bool]

KIND = "hpctk.scaling"
FORMAT = 1
DIRECTORY = "records"
"""Subdirectory of a scaling run with one file of records for each world size."""

Record = dict[str, Any]

_BUSY = 1.25
"""Load of a node divided by its CPUs above which its times are doubtful."""

_EXCHANGE = ("exposed_s", "all_reduce_s", "expected_s", "gradient_bytes", "bus_bytes_per_s")
_USE = ("cpu_percent", "gpu_percent", "gpu_percent_least", "gpu_power_w")


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Reject a record that is damaged or has another format. Raises ConfigError."""
    if record.get("format") != FORMAT:
        message = f"{where}: format {record.get('format')!r} is not {FORMAT}"
        raise ConfigError(message, hint="read it with the version of hpctk that wrote it")
    _check(record, _NEEDED, where)
    numbers = dict(record["shares"])
    numbers |= {key: record["machine"].get(key, 0) for key in ("cpus", "threads", "load")}
    _check(numbers, dict.fromkeys(numbers, _is_number), where)


def _check(values: Mapping[str, Any], rules: Mapping[str, Rule], where: str) -> None:
    for key, fits in rules.items():
        if not fits(values.get(key)):
            message = f"{where}: {key} is {values.get(key)!r:.50}"
            raise ConfigError(message, hint="leave the damaged line out, and measure again")


def _is_number(value: object) -> bool:
    """Return whether a value is a number that a float can hold: not a bool, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 10**9


_NEEDED: dict[str, Rule] = {
    **dict.fromkeys(("world_size", "nodes"), _is_count),
    "repeat": lambda value: _is_count(value, 0),
    **dict.fromkeys(
        ("samples_per_s", "tokens_per_s"), lambda value: _is_number(value) and value > 0
    ),
    **dict.fromkeys(
        ("settings", "variation", "shares", "step_s", "communication", "memory", "machine"),
        lambda value: isinstance(value, dict),
    ),
    "utilisation_of_ranks": lambda value: value is None or isinstance(value, dict),
}


def records_in(text: str, where: str) -> Iterator[Record]:
    """Yield the records in a text; skip other lines, and text before a record on its line.

    So the log of a pod can be read, with time stamps or names before each line. A torn line is
    skipped as well. Raises ConfigError for a record that is damaged otherwise.
    """
    for number, record in objects_in(text, KIND):
        check_record(record, f"{where}:{number}")
        yield record


def objects_in(text: str, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and JSON object of each line that has one of this kind, prefixed or not."""
    decoder = json.JSONDecoder()
    for number, line in enumerate(text.splitlines(), start=1):
        start = line.find("{") if kind in line else -1
        if start < 0:
            continue
        try:
            value, _ = decoder.raw_decode(line, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value.get("kind") == kind:
            yield number, value


def case_key(record: Mapping[str, Any]) -> str:
    """Return a key that is equal for records of the same training, at any world size."""
    settings = {key: value for key, value in record["settings"].items() if key != "repeats"}
    return json.dumps([settings, record["variation"]], sort_keys=True)


def identity(record: Mapping[str, Any]) -> tuple[str, int, int]:
    return case_key(record), record["world_size"], record["repeat"]


def series_of(records: Iterable[Record]) -> tuple[Series, ...]:
    """Return one series per training; of two records with one identity, the later one counts."""
    latest: dict[tuple[str, int, int], Record] = {}
    # Sorted by content, so that the order of reading changes nothing.
    for record in sorted(records, key=lambda one: (str(one.get("at")), json.dumps(one))):
        latest[identity(record)] = record
    groups: dict[str, list[Record]] = defaultdict(list)
    for key in sorted(latest):
        groups[key[0]].append(latest[key])
    names = _names(groups)
    order = sorted(groups, key=lambda key: (sorted(groups[key][0]["variation"].items()), key))
    return tuple(_series(names[key], groups[key]) for key in order)


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
    return Series(
        name=name,
        points=tuple(_point([one for one in records if one["world_size"] == n]) for n in sizes),
        law="weak" if records[0]["settings"].get("weak") else "strong",
        notes=tuple(_notes(records)),
        device=" and ".join(_all(records, "device")),
        cluster=_same(records, "cluster"),
        partition=_same(records, "partition"),
    )


def _all(records: list[Record], key: str) -> list[str]:
    return sorted({str(one["machine"].get(key, "")) for one in records})


def _same(records: list[Record], key: str) -> str:
    """Return the value of all machines; "" if they differ or one has none."""
    found = _all(records, key)
    return found[0] if len(found) == 1 else ""


def _point(records: list[Record]) -> Point:
    names = sorted({name for one in records for name in one["shares"]})
    details = {
        "tokens_per_s": median(one["tokens_per_s"] for one in records),
        **{f"step_{key}_s": _median(records, "step_s", key) for key in ("median", "p90")},
        **{key: _median(records, "communication", key) for key in _EXCHANGE},
        **_exposed(records),
        **{f"{key}_bytes": _median(records, "memory", key) for key in ("rss", "cuda")},
        **{key: _median(records, "utilisation_of_ranks", key) for key in _USE},
    }
    return Point(
        world_size=records[0]["world_size"],
        rates=tuple(one["samples_per_s"] for one in records),
        nodes=max(one["nodes"] for one in records),
        shares={name: median(one["shares"].get(name, 0.0) for one in records) for name in names},
        details={key: value for key, value in details.items() if value is not None},
    )


def _median(records: list[Record], group: str, key: str) -> float | None:
    values: list[Any] = [(one.get(group) or {}).get(key) for one in records]
    known = [value for value in values if _is_number(value)]
    return float(median(known)) if known else None


def _exposed(records: list[Record]) -> dict[str, float]:
    """Return the range of the communication share over repeats; a value below 0 is noise."""
    times = [
        (one["communication"].get("exposed_s"), one["step_s"].get("median")) for one in records
    ]
    shares = [
        exposed / step
        for exposed, step in times
        if _is_number(exposed) and _is_number(step) and step > 0
    ]
    if len(shares) < 2:
        return {}
    return {"communication_low": min(shares), "communication_high": max(shares)}


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
    threads = sorted({one.get("threads", 0) for one in machines})
    if len(threads) > 1:
        told = " and ".join(map(str, threads))
        yield f"some ranks computed with {told} threads: --threads N gives all of them as many"
    busy = max((one.get("load", 0.0) / max(1, one.get("cpus", 1)) for one in machines), default=0)
    if busy > _BUSY:
        yield f"a node was busy before a launch: its load was {busy:.1f} times its CPUs"
    for key, words in (
        ("device", "kinds of device"),
        ("torch", "versions of torch"),
        ("cluster", "clusters"),
    ):
        found = sorted({str(one.get(key, "none")) for one in machines})
        if len(found) > 1:
            yield f"measured on several {words}: {', '.join(found)}"


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
