"""Gather journal lines into one row per item, and publish the results table (rules R11, R12)."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import HpcToolkitError, TryAgainLaterError
from hpc_toolkit.queue.log import damaged
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.queue.view import not_shown
from hpc_toolkit.results.explain import unit_items
from hpc_toolkit.results.tables import Row, json_lines
from hpc_toolkit.rundir.journal import read_unit_run
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hpc_toolkit.queue.state import UnitState
    from hpc_toolkit.queue.view import RunView, StageView

_AT_ONCE = 256
"""Rows that are parsed together, so that they share the strings of their keys."""

_CATCH_UP_S = 10.0
"""Seconds to wait for lines that a worker has synced and that this host does not show yet."""
_LOOK_S = 0.2

ItemKey = tuple[int, int]
"""(log entry of the segment, position in it): the identity of an item."""


class NotCompleteError(HpcToolkitError):
    """Some items have no result yet."""

    def __init__(self, message: str, *, hint: str = "", pending: list[Row] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.pending = pending or []
        """The items without a result."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one stage."""

    rows: list[Row]
    """In the order in which the items were given."""
    published: bool
    """Whether the rows are a published table's; provisional rows may still change."""


def gather(view: RunView, name: str, *, partial: bool = False) -> Table:
    """Gather a stage: read its latest table, or publish one if the stage is complete without one.

    ``partial`` accepts pending items; they have no row, and no table is published with them.
    Otherwise raises NotCompleteError, or OSError if a journal cannot be read.
    """
    stage = view.stages[name]
    while True:
        view.poll()
        if stage.log.table is not None and stage.log.last_retry < stage.log.table[0]:
            return Table(_strip(stage, _read_table(stage)), published=True)
        if not partial:
            late = _catch_up(view, stage)
            view.await_journals()
            view.refuse_unreadable()
            stage.log.refuse_hidden()
            if not stage.complete:
                raise _incomplete(stage, late)
        found = _compute(view, stage)
        # A published table must rest on every journal: an unread one may hold the winning line.
        if not stage.complete or view.unreadable or stage.log.hidden:
            return Table(_strip(stage, found), published=False)
        try:
            # Our table was added. Reading it back would take as long again, and twice the memory.
            if stage.log.add_table(_encode(stage, found)):
                return Table(_strip(stage, found), published=True)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return Table(_strip(stage, found), published=False)  # a reader without write access


def _catch_up(view: RunView, stage: StageView) -> list[str]:
    """While items are pending, wait for journal lines that this mount does not show yet.

    Returns the workers that reported lines which are still missing.
    """
    until = time.monotonic() + _CATCH_UP_S
    late: list[str] = []
    while not stage.complete:
        reported = view.reported_sizes()
        if not view.behind(reported):
            return []
        view.poll()  # lines written since our last reading do not make it an old copy
        late = view.behind(reported)
        if not late or time.monotonic() >= until:
            return late
        time.sleep(_LOOK_S)
    return []


def _incomplete(stage: StageView, late: list[str]) -> NotCompleteError:
    found = {}
    for name in stage.state.open:
        unit = stage.unit(name)
        items = unit_items(stage, unit)
        for position in stage.state.pending(name):
            found[unit.entry, position] = items[position - unit.first]
    pending = _strip(stage, found)
    sealed = "" if stage.log.sealed else ", and the stage is open for more"
    have = "has" if len(pending) == 1 else "have"
    left = counted(len(pending), "item")
    message = f"{left} of stage {stage.paths.name!r} {have} no result yet{sealed}"
    hint = "start workers, or gather only finished items with --partial"
    if late:
        hint = f"{not_shown(late)}: try again in a minute; else {hint}"
    return NotCompleteError(message, hint=hint, pending=pending)


def _strip(stage: StageView, rows: dict[ItemKey, Row]) -> list[Row]:
    """The rows, or items, in the order in which the items were given."""

    def given(key: ItemKey) -> ItemKey:
        order = stage.log.segments[key[0]].order
        return key if order is None else (key[0], order[key[1]])

    return [rows[key] for key in sorted(rows, key=given)]


def _compute(view: RunView, stage: StageView) -> dict[ItemKey, Row]:
    """Rows by R8 and R11; rows of an earlier table stay, except failed ones that were retried."""
    rows = {
        (entry, position): row
        for entry, segment in stage.log.segments.items()
        for unit in segment.units
        for position, row in rows_of_unit(view, stage, stage.state.units[unit.name])
    }
    if stage.log.table is not None:
        table = stage.log.table[0]
        for key, row in _read_table(stage).items():
            lifted = stage.log.retried_at.get(key, 0) > table
            if not (row["state"] == "failed" and lifted):
                rows[key] = row
    return rows


def unit_rows(
    view: RunView, stage: StageView, entry: int, names: Collection[str]
) -> Iterator[tuple[int, Row]]:
    """Provisional (position, row) of finished items of some units of a segment (R8, R11)."""
    for unit in stage.log.segments[entry].units:
        if unit.name in names:
            yield from rows_of_unit(view, stage, stage.state.units[unit.name])


def rows_of_unit(
    view: RunView, stage: StageView, state: UnitState, only: Collection[int] | None = None
) -> Iterator[tuple[int, Row]]:
    """Provisional (position, row) of a unit's finished items, or of those in ``only``."""
    items = unit_items(stage, state.unit)
    if state.clean is not None:
        worker, found = state.clean
        for line in read_unit_run(view.paths.journal(worker), found):
            position = line["item"]
            yield position, _from_line(items[position - state.unit.first], line, worker, 1)
        return
    wanted = state.unit.items if only is None else only
    for position, kind in stage.states(state):
        history = state.histories.get(position)
        if position not in wanted or kind is ItemState.PENDING or history is None:
            continue
        floor = stage.state.floor(state.unit.entry, position)
        done = kind is ItemState.DONE
        ref = history.done if done else history.last_failure(floor)
        if ref is None:
            continue  # a power loss took the line: only a table has the row
        record = view.line(ref)
        assert record is not None  # it was valid when it was first read
        attempts = history.attempts(floor) + done
        item = items[position - state.unit.first]
        yield position, _from_line(item, record, ref.worker, attempts)


def _from_line(item: dict[str, Any], line: dict[str, Any], worker: str, attempts: int) -> Row:
    done = line["type"] == "done"
    return {
        "item": item,
        "state": "done" if done else "failed",
        "value": line["value"] if done else None,
        "error": None if done else line["error"],
        "attempts": attempts,
        "seconds": line["seconds"],
        "worker": worker,
    }


def _encode(stage: StageView, rows: dict[ItemKey, Row]) -> Iterator[bytes]:
    failed = [list(key) for key, row in rows.items() if row["state"] == "failed"]
    segments = list(stage.log.segments)
    header = {"format": 1, "segments": segments, "rows": len(rows), "failed": failed}
    yield json.dumps(header).encode() + b"\n"
    yield from json_lines({"at": key, **row} for key, row in rows.items())


def _read_table(stage: StageView) -> dict[ItemKey, Row]:
    assert stage.log.table is not None
    rows: dict[ItemKey, Row] = {}
    path = stage.paths.root / stage.log.table[1]
    wanted, _ = stage.log.table_header()
    with path.open("rb") as file:
        file.readline()
        while lines := list(islice(file, _AT_ONCE)):
            try:
                some: list[Row] = json.loads(b"[%s]" % b",".join(lines))
            except ValueError as error:
                message = f"{path} is damaged: {error}"
                hint = (
                    "try again in a minute; if the error persists, restore the file from a backup"
                )
                raise TryAgainLaterError(message, hint=hint) from error
            try:
                rows |= {(entry, at): row for row in some for entry, at in [row.pop("at")]}
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise damaged(path, "a row does not say whose it is") from error
    if len(rows) != wanted:
        message = f"{path} shows {len(rows)} of its {wanted} rows"
        hint = "try again in a minute; if they stay away, restore it from a backup"
        raise TryAgainLaterError(message, hint=hint)
    return rows
