"""A snapshot: a run's items and results at one moment, and the file format for it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit import __version__
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.queue.items import canonical
from hpc_toolkit.results.tables import row_fault
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import Manifest, parse_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.queue.log import StageLog
    from hpc_toolkit.results.gather import Row
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.system.clock import Clock

FORMAT = 1
KIND = "hpctk snapshot"
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run's items and results at one moment."""

    taken: str
    """Time of the snapshot, in ISO 8601."""
    hpctk: str
    """The hpctk version that took it."""
    sealed: bool
    """Whether no more items could be added."""
    manifest: Manifest
    """The run's manifest, with its provenance."""
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
            yield f"{json.dumps(key)}: {_encode(value)},\n".encode()
        yield from _array("items", self.items, b",")
        yield from _array("rows", self.rows, b"")
        yield b"}\n"


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _array(key: str, values: list[Any], end: bytes) -> Iterator[bytes]:
    yield f"{json.dumps(key)}: [".encode()
    for number, value in enumerate(values):
        yield (",\n" if number else "\n").encode() + _encode(value).encode()
    yield b"]" + end + b"\n"


def make_snapshot(manifest: Manifest, log: StageLog, rows: list[Row]) -> Snapshot:
    """The snapshot of a plain run: the items of its log, and the rows that it has now."""
    return Snapshot(
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        hpctk=__version__,
        sealed=log.sealed,
        manifest=manifest,
        items=given_items(log),
        rows=rows,
    )


def given_items(log: StageLog) -> list[Item]:
    """All items of a stage, in the order in which they were given."""
    found: list[Item] = []
    for segment in log.segments.values():
        items = [json.loads(line) for line in segment.items()]
        order = segment.order or range(len(items))
        found += [item for _, item in sorted(zip(order, items, strict=True), key=lambda at: at[0])]
    return found


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot; a reader sees the complete old file or the complete new one.

    Raises OSError: it cannot be written; the old file stays.
    """
    files.replace_file(path, snapshot.to_lines())


def read_snapshot(path: Path) -> Snapshot:
    """Read what :func:`write_snapshot` wrote.

    Raises RunError: the file is missing, not a snapshot, damaged, or of a newer format.
    """
    try:
        record = json.loads(path.read_bytes())
        if record["kind"] != KIND:
            message = f"its kind is {record['kind']!r}"
            raise ValueError(message)
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise RunError(message, hint="name a file of 'hpctk snapshot'") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        message = f"{path} is not a snapshot: {type(error).__name__}: {error}"
        raise RunError(message, hint="'hpctk snapshot RUN -o FILE.json' makes one") from error
    if not isinstance(record.get("format"), int) or record["format"] > FORMAT:
        message = f"{path}: format {record.get('format')!r}; this hpctk reads up to {FORMAT}"
        raise RunError(message, hint="upgrade hpc-toolkit to the version that took it")
    try:
        return _snapshot(record)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        message = f"{path} is damaged: {type(error).__name__}: {error}"
        raise RunError(message, hint="take another one from the run") from error


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
        message = "it is not that of one list of items"
        raise ValueError(message)
    waiting = set()
    given: list[object] = record["items"]
    for number, item in enumerate(given):
        if not isinstance(item, dict):
            message = f"item {number} is not a JSON object"
            raise TypeError(message)
        waiting.add(canonical(item))
    for number, row in enumerate(snapshot.rows):
        fault = row_fault(row)
        if not fault and canonical(row["item"]) not in waiting:
            fault = "it is of no item, or of one that has a row already"
        if fault:
            message = f"row {number}: {fault}"
            raise ValueError(message)
        waiting.remove(canonical(row["item"]))
    if snapshot.counts != record["counts"]:
        message = f"it holds {snapshot.counts}, and says {record['counts']}"
        raise ValueError(message)
    return snapshot


class Snapshots:
    """Takes snapshots of a run while workers run, one each time ``every`` more items are done.

    It looks once a second, so several steps share a snapshot if results come faster. If a snapshot
    cannot be written, it is skipped and the work goes on.

    Args:
        status, take: read the status of the run, and take its snapshot.
        pattern: path of the file; ``{done}`` in it is replaced by the number of items that are
            done, so that each snapshot has its own file.
        every: done items from one snapshot to the next; None: only :meth:`take` takes one.

    Raises ConfigError: ``every`` is below 1.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        take: Callable[[], Snapshot],
        pattern: str,
        every: int | None,
        clock: Clock,
    ) -> None:
        if every is not None and every < 1:
            message = f"--snapshot-every must be at least 1, got {every}"
            raise ConfigError(message, hint="such as --snapshot-every 50")
        self._status = status
        self._take = take
        self._pattern = pattern
        self._every = every
        self._clock = clock
        self._done = self._count()
        self._look_at = self._clock.monotonic() + _LOOK_S

    def _count(self) -> int:
        return sum(counts.done for counts in self._status().stages.values())

    def look(self) -> None:
        """Take a snapshot if the number of done items has passed a multiple of ``every``."""
        now = self._clock.monotonic()
        if self._every is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        try:
            done = self._count()
        except (OSError, HpcToolkitError) as error:
            _warn(error)
            return
        if done // self._every > self._done // self._every:
            self.take()
        self._done = done

    def take(self) -> None:
        try:
            snapshot = self._take()
            done = str(snapshot.counts["done"])
            write_snapshot(Path(self._pattern.replace("{done}", done)), snapshot)
        except (OSError, HpcToolkitError) as error:
            _warn(error)


def _warn(error: Exception) -> None:
    sys.stderr.write(f"warning: no snapshot was taken: {error}\n")
