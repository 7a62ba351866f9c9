"""A snapshot: a run's items and results at one moment, and the file format for it."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpc_toolkit import __version__
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.queue.claims import Claims
from hpc_toolkit.queue.items import Item, canonical
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import FINISHED, Presence, PresenceFile
from hpc_toolkit.results.tables import Row, row_fault
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalWriter, encode_line, release_line
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec, parse_manifest, shown_item
from hpc_toolkit.rundir.values import is_stored
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.jsonlines import encode
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.ranks import RankInfo

FORMAT = 1
KIND = "hpctk snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run's items and results at one moment."""

    taken: str
    """Time of the snapshot, in ISO 8601."""
    hpctk: str
    """The hpctk version that took it."""
    sealed: bool
    manifest: Manifest
    items: list[Item]
    """All items, in the order in which they were given."""
    rows: list[Row]
    """The gathered rows of items that were done or failed, in the items' order."""

    @property
    def counts(self) -> dict[str, int]:
        states = Counter(row["state"] for row in self.rows)
        return {
            "items": len(self.items),
            "done": states["done"],
            "failed": states["failed"],
            "pending": len(self.items) - len(self.rows),
        }

    @property
    def kept(self) -> list[Row]:
        """Rows of done items whose values are complete here, and not in value files of the run."""
        done = (row for row in self.rows if row["state"] == "done")
        return [row for row in done if not is_stored(row.get("types", {}))]

    @property
    def usable(self) -> list[Item]:
        """All items but calls without a result here whose arguments are in files of the run."""
        done = {canonical(row["item"]) for row in self.kept}
        apart = (shown_item(one) != one and "file" in one["stored"] for one in self.items)
        found = zip(self.items, apart, strict=True)
        return [one for one, is_apart in found if not is_apart or canonical(one) in done]

    def to_lines(self) -> Iterator[bytes]:
        """One JSON object, with an item or a row on each line."""
        head = {
            "kind": KIND,
            "format": FORMAT,
            "taken": self.taken,
            "hpctk": self.hpctk,
            "sealed": self.sealed,
            "counts": self.counts,
            "manifest": json.loads(self.manifest.to_bytes()),
        }
        yield b"{\n"
        for key, value in head.items():
            yield f"{json.dumps(key)}: {encode(value)},\n".encode()
        yield from _array("items", self.items, b",")
        yield from _array("rows", self.rows, b"")
        yield b"}\n"


def _array(key: str, values: list[Any], end: bytes) -> Iterator[bytes]:
    yield f"{json.dumps(key)}: [".encode()
    for number, value in enumerate(values):
        yield (",\n" if number else "\n").encode() + encode(value).encode()
    yield b"]" + end + b"\n"


def make_snapshot(manifest: Manifest, log: StageLog, rows: list[Row]) -> Snapshot:
    """The snapshot of a plain run: the items of its log, as given, and the rows that it has now."""
    found: list[Item] = []
    for segment in log.segments.values():
        items = [json.loads(line) for line in segment.items()]
        order = segment.order or range(len(items))
        found += [item for _, item in sorted(zip(order, items, strict=True), key=lambda at: at[0])]
    return Snapshot(
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        hpctk=__version__,
        sealed=log.sealed,
        manifest=manifest,
        items=found,
        rows=rows,
    )


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot; a reader, also after an OSError, sees the old file or the new one."""
    files.replace_file(path, snapshot.to_lines())


def read_snapshot(path: Path) -> Snapshot:
    """Read what :func:`write_snapshot` wrote; RunError if that fails."""
    try:
        record = json.loads(path.read_bytes())
        if record["kind"] != KIND:
            raise ValueError(f"its kind is {record['kind']!r}")
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise RunError(message, hint="name a file of 'hpctk snapshot'") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        message = f"{path} is not a snapshot: {type(error).__name__}: {error}"
        raise RunError(message, hint="'hpctk snapshot RUN -o FILE.json' makes one") from error
    if not isinstance(record.get("format"), int) or record["format"] > FORMAT:
        message = f"{path}: format {record.get('format')!r}; this hpctk reads up to {FORMAT}"
        raise RunError(message, hint="upgrade hpctk to the version that wrote it")
    try:
        return _snapshot(record)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{path} is damaged: {type(error).__name__}: {error}"
        raise RunError(message, hint="take another snapshot of the run") from error


def _snapshot(record: dict[str, Any]) -> Snapshot:
    snapshot = Snapshot(
        taken=record["taken"],
        hpctk=record["hpctk"],
        sealed=record["sealed"],
        manifest=parse_manifest(record["manifest"]),
        items=record["items"],
        rows=record["rows"],
    )
    if len(snapshot.manifest.stages) != 1 or not isinstance(snapshot.sealed, bool):
        raise ValueError("it is not that of one list of items")
    waiting = set()
    given: list[object] = record["items"]
    for number, item in enumerate(given):
        if not isinstance(item, dict):
            raise TypeError(f"item {number} is not a JSON object")
        waiting.add(canonical(item))
    for number, row in enumerate(snapshot.rows):
        fault = row_fault(row)
        if not fault and canonical(row["item"]) not in waiting:
            fault = "it is of no item, or of one that has a row already"
        if fault:
            raise ValueError(f"row {number}: {fault}")
        waiting.remove(canonical(row["item"]))
    if snapshot.counts != record["counts"]:
        raise ValueError(f"it holds {snapshot.counts}, and says {record['counts']}")
    return snapshot


def read_rows(path: Path) -> list[Row]:
    """Read the rows that ``hpctk gather`` wrote as JSON; else ConfigError or RunError."""
    hint = "'hpctk gather RUN -o FILE.jsonl' writes them"
    if path.suffix not in (".jsonl", ".json"):
        message = f"{path}: results are a run, a snapshot in .json, or rows in .jsonl or .json"
        raise ConfigError(message, hint=hint)
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".json":
            rows: list[Row] = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        raise RunError(f"{path} holds no gathered rows: {what}", hint=hint) from error
    for number, row in enumerate(rows, 1):
        if fault := row_fault(row):
            raise RunError(f"{path} holds no gathered rows: row {number}: {fault}", hint=hint)
    return rows


def note_origin(manifest: Manifest, snapshot: Snapshot) -> None:
    """Record the snapshot in the new run's provenance; warn if other code made its results."""
    stage = manifest.stages[0].name
    if apart := snapshot.counts["done"] - len(snapshot.kept):
        what = f"{counted(apart, 'result')} of the snapshot {'is' if apart == 1 else 'are'}"
        sys.stderr.write(f"warning: {what} in value files, which it lacks; those items run again\n")
    if calls := len(snapshot.items) - len(snapshot.usable):
        what = f"the snapshot lacks the arguments or functions of {counted(calls, 'call')}"
        sys.stderr.write(f"warning: {what}; start their script on this run: it adds them again\n")
    code = snapshot.manifest.provenance.get("code")
    before = code.get(stage) if isinstance(code, dict) else None
    if snapshot.counts["done"] and before not in (None, manifest.provenance["code"][stage]):
        sys.stderr.write("warning: the results of the snapshot were made by other code\n")
    manifest.provenance["from"] = {
        "run": snapshot.manifest.run,
        "taken": snapshot.taken,
        **snapshot.counts,
        "provenance": snapshot.manifest.provenance,
    }


def import_results(paths: RunPaths, stage: StageSpec, rows: list[Row]) -> None:
    """Write the files of a worker named ``import-...`` that did these items and finished.

    No other process may know the run's directory yet. Raises RunError: a value cannot be stored as
    JSON.
    """
    done = {canonical(row["item"]): row for row in rows}
    if not done:
        return
    name = f"import-{os.getpid()}-{os.urandom(3).hex()}"
    at = round(SystemClock().wall(), 3)
    paths.worker_lock(name).touch()
    paths.worker_log(name).touch()
    journal = JournalWriter(paths.journal(name))
    claims = Claims(paths.stage(stage.name))
    log = StageLog(paths.stage(stage.name))
    log.poll()
    for segment in log.segments.values():
        for unit in segment.units:
            lines = zip(unit.items, segment.lines(unit), strict=True)
            found = {
                position: done[key]
                for position, line in lines
                if (key := canonical(json.loads(line))) in done
            }
            if found:
                claims.create(unit.name, 1, name)
                try:
                    record = _unit_run(f"{stage.name}/{unit.name}", found, journal.size, at)
                except ValueError as error:
                    message = f"the snapshot contains an invalid result: {error}"
                    hint = "'hpctk gather --check FILE.json' may name it"
                    raise RunError(message, hint=hint) from error
                journal.append(record)
    journal.sync()
    # Last, as when a worker exits: the presence file says that all lines are written.
    presence = replace(
        Presence.here(name, RankInfo(), interval_s=0.0, at=at),
        state=FINISHED,
        done=len(done),
        note="a snapshot's results",
        journal=journal.size,
    )
    PresenceFile(paths.worker(name), presence).close()
    journal.close()
    for directory in (paths.journals, paths.workers, paths.stage(stage.name).claims):
        files.sync_directory(directory)


def _unit_run(unit: str, found: dict[int, Row], start: int, at: float) -> bytes:
    """The journal lines of one unit run: a result for each position, and the release."""
    named: dict[str, Any] = {"unit": unit, "generation": 1}
    records = (
        {
            "type": "done",
            **named,
            "item": position,
            "at": at,
            "seconds": row["seconds"],
            "from": {"worker": row["worker"], "attempts": row["attempts"]},
            **({"types": row["types"]} if row.get("types") else {}),
            "value": row["value"],
        }
        for position, row in found.items()
    )
    lines, seconds = b"".join(map(encode_line, records)), sum(r["seconds"] for r in found.values())
    counts = {"lines": len(found), "done": len(found), "failed": 0}
    return lines + release_line(start, lines, **named, **counts, seconds=round(seconds, 6), at=at)
