"""Gather journal lines into one row per item, and publish the results table (rules R11, R12)."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import repeat
from operator import mod
from pathlib import Path
from typing import Any
from zlib import crc32

from hpc_toolkit.errors import HpcToolkitError, TryAgainLaterError
from hpc_toolkit.queue.state import ItemState, Ref, UnitState
from hpc_toolkit.queue.view import RunView, StageView
from hpc_toolkit.results.explain import unit_items
from hpc_toolkit.results.published import PublishedTable, given_order, without_at
from hpc_toolkit.results.status import Search
from hpc_toolkit.results.tables import Row, Table
from hpc_toolkit.results.workers import not_shown
from hpc_toolkit.rundir.journal import CRC_LENGTH, is_whole, read_spans
from hpc_toolkit.rundir.layout import CALLS, Manifest, without_places
from hpc_toolkit.rundir.valuefiles import value_columns
from hpc_toolkit.system.clock import Seldom
from hpc_toolkit.system.jsonlines import (
    decode,
    decode_each,
    encode,
    encode_each,
    without_collections,
)
from hpc_toolkit.system.quantities import counted

_CATCH_UP_S = 10.0
"""Seconds to wait for lines that a worker has synced and that this host does not show yet."""
_LOOK_S = 0.2

_VALUE, _CRC = b',"value":', b',"crc":"'

ItemKey = tuple[int, int]
"""(log entry of the segment, position in it): the identity of an item."""


class NotCompleteError(HpcToolkitError):
    """Some items have no result yet."""

    def __init__(self, message: str, *, hint: str = "", pending: list[Row] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.pending = pending or []
        """The items without a result."""


@without_collections()
def gather(view: RunView, name: str, *, partial: bool = False, publish: bool = True) -> Table:
    """Gather a stage: read its latest table, or publish one if the stage is complete without one.

    ``partial`` accepts pending items; they have no row, and no table is published with them.
    Otherwise raises NotCompleteError, or OSError if a journal cannot be read. Without ``publish``,
    the run stays as it is.
    """
    stage = view.stages[name]
    while True:
        view.poll()
        if stage.log.is_published:
            return _table(stage, PublishedTable.read(stage))
        if not partial:
            _refuse_incomplete(view, stage)
        kept = None if stage.log.table is None else PublishedTable.read(stage)
        # A published table must rest on every journal: an unread one may hold the winning line.
        if not (publish and stage.complete) or view.unreadable or stage.log.hidden:
            return _provisional(view, stage, kept)
        made = PublishedTable(stage)
        try:
            rows = _rows(view, stage, kept)
            if name := stage.log.add_table(made.write(rows, _failed(stage))):
                made.path = stage.paths.root / name
                return _table(stage, made)
        except TryAgainLaterError:
            if stage.complete:
                raise
            # A unit run lacked results that its release counts: its items are pending.
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return _provisional(view, stage, kept)  # a reader without write access


def _table(stage: StageView, found: PublishedTable) -> Table:
    failed = sum(map(len, found.failed.values()))
    return Table(_shown(stage, found.lines), found.count, failed, published=True)


def _shown(stage: StageView, lines: Callable[[], Iterator[bytes]]) -> Callable[[], Iterator[bytes]]:
    """The lines without the places of results in items that were made of them (rule R17)."""
    if not stage.spec.after:
        return lines

    def shown() -> Iterator[bytes]:
        for some in lines():
            rows = decode_each(some.splitlines())
            found = [{**row, "item": without_places(row["item"])} for row in rows]
            yield b"".join(b"%b\n" % line for line in encode_each(found))

    return shown


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


def _refuse_incomplete(view: RunView, stage: StageView) -> None:
    late = _catch_up(view, stage)
    view.await_journals()
    for error in view.unreadable.values():
        raise error
    stage.log.refuse_hidden()
    if stage.complete:
        return
    found = {}
    for name in stage.state.open:
        unit = stage.unit(name)
        items = unit_items(stage, unit)
        for position in stage.state.pending(name):
            found[unit.entry, position] = items[position - unit.first]
    pending = [without_places(found[key]) for key in _given(stage, found)]
    if not pending and stage.spec.workload.function == CALLS:
        return  # later calls of the script are other items
    sealed = "" if stage.log.sealed else ", and the stage is open for more"
    have = "has" if len(pending) == 1 else "have"
    left = counted(len(pending), "item")
    message = f"{left} of stage {stage.paths.name!r} {have} no result yet{sealed}"
    hint = "start workers, or gather only finished items with --partial"
    if late:
        hint = f"{not_shown(late)}: try again in a minute; else {hint}"
    raise NotCompleteError(message, hint=hint, pending=pending)


def _given(stage: StageView, keys: Iterable[ItemKey]) -> list[ItemKey]:
    """Items in the order in which they were given."""

    return sorted(keys, key=partial(given_order, stage.log.segments))


def _failed(stage: StageView) -> dict[int, set[int]]:
    """Positions of failed items, by segment."""
    found: dict[int, set[int]] = {entry: set() for entry in stage.log.segments}
    for state in stage.state.units.values():
        if state.clean is None:
            failed = (item for item, kind in stage.states(state) if kind is ItemState.FAILED)
            found[state.unit.entry].update(failed)
    return found


def _provisional(view: RunView, stage: StageView, kept: PublishedTable | None) -> Table:
    """Rows that may still change; nothing may be read into ``view`` before they are used."""
    count = sum(
        state.unit.count - len(stage.state.pending(name))
        for name, state in stage.state.units.items()
    )

    def lines() -> Iterator[bytes]:
        units = _rows(view, stage, kept)
        if all(one.order is None and one.numbers is None for one in stage.log.segments.values()):
            yield from (without_at(rows) for _, _, rows in units)
            return
        found = {
            (entry, position): row
            for entry, positions, rows in units
            for position, row in zip(positions, rows, strict=True)
        }
        yield from (without_at([found[key]]) for key in _given(stage, found))

    failed = sum(map(len, _failed(stage).values()))
    return Table(_shown(stage, lines), count, failed, published=False)


def _rows(
    view: RunView, stage: StageView, kept: PublishedTable | None
) -> Iterator[tuple[int, list[int], list[bytes]]]:
    """(Segment, positions, lines in a table) of the finished items of each unit, by R8 and R11.

    Rows of the table ``kept`` stay, except failed ones that were retried.
    """
    for entry, segment in stage.log.segments.items():
        for unit in segment.units:
            state = stage.state.units[unit.name]
            stay = [at for at in unit.items if kept is not None and _stays(stage, kept, entry, at)]
            rows = encode_rows(view, stage, state) if len(stay) < unit.count else {}
            if kept is not None:
                rows.update(zip(stay, kept.lines_of(entry, stay), strict=True))
            positions = sorted(rows)
            yield entry, positions, [rows[position] for position in positions]


def _stays(stage: StageView, kept: PublishedTable, entry: int, position: int) -> bool:
    assert stage.log.table is not None
    lifted = stage.log.retried_at.get((entry, position), 0) > stage.log.table[0]
    return kept.has(entry, position) and not (lifted and position in kept.failed[entry])


def rows_of_unit(
    view: RunView, stage: StageView, state: UnitState, only: Collection[int] | None = None
) -> Iterator[tuple[int, Row]]:
    """Provisional (position, row) of a unit's finished items, or of those in ``only`` (R8, R11)."""
    for position, line in encode_rows(view, stage, state, only).items():
        yield position, decode(without_at([line]).decode())


def encode_rows(
    view: RunView, stage: StageView, state: UnitState, only: Collection[int] | None = None
) -> dict[int, bytes]:
    """As :func:`rows_of_unit`; each row is its line in a table."""
    unit = state.unit
    texts, items = stage.log.segments[unit.entry].read(unit)
    texts = _encoded(texts, items)
    forms, lines = _lines_of(view, stage, state, only)
    try:
        records: list[dict[str, Any]] = decode_each(lines)
        positions = [record["item"] for record in records]
        found = [record["value" if record["type"] == "done" else "error"] for record in records]
        units, kinds = ({record[key] for record in records} for key in ("unit", "type"))
        once = sorted(positions) == list(unit.items) and kinds == {"done"} and len(units) == 1
    except (ValueError, RecursionError, LookupError, TypeError):
        once, records, positions, found = False, [], [], []
    if state.clean is not None and not once:  # its release counts what is not there
        stage.state.open_up(state)
        return encode_rows(view, stage, state, only)
    values = _encoded([line.partition(_VALUE)[2][:-CRC_LENGTH] for line in lines], found)
    columns = zip(
        positions,
        [texts[position - unit.first] for position in positions],
        values,
        encode_each([record["seconds"] for record in records]),
        strict=True,
    )
    rows = dict(zip(positions, map(mod, forms, columns), strict=True))
    for record in records:
        for name, kind in (("types", dict), ("exception", list)):
            if isinstance(more := record.get(name), kind):
                row = rows[record["item"]][:-2]  # without the brace
                rows[record["item"]] = b'%b,"%b":%b}\n' % (
                    row,
                    name.encode(),
                    encode(more).encode(),
                )
    return rows


def _form(entry: int, worker: str, attempts: int, *, done: bool) -> bytes:
    """A row's line in a table, without the position, item, value or error, and seconds."""
    name = encode(worker).replace("%", "%%")
    what = '"done","value":%b,"error":null' if done else '"failed","value":null,"error":%b'
    begin = f'{{"at":[{entry},%d],"item":%b,"state":{what},'
    return f'{begin}"attempts":{attempts},"seconds":%b,"worker":{name}}}\n'.encode()


def _encoded(texts: list[bytes], values: list[Any]) -> list[bytes]:
    """Each value as JSON: its text, if that is known to be the same, else encoded again.

    The texts are what our encoder made of objects; only of those in which a key occurs twice, it
    makes something else now. A key ends with a quote and a colon, and so do some values. So a text
    with as many of these as its object has keys has each key once, and contains nothing else.
    """
    ends = map(bytes.count, texts, repeat(b'":'))
    if set(map(type, values)) == {dict} and list(ends) == list(map(len, values)):
        return texts
    other = [
        index
        for index, (text, value) in enumerate(zip(texts, values, strict=True))
        if type(value) is not dict or text.count(b'":') != len(value)
    ]
    for index, text in zip(other, encode_each([values[index] for index in other]), strict=True):
        texts[index] = text
    return texts


def _lines_of(
    view: RunView, stage: StageView, state: UnitState, only: Collection[int] | None
) -> tuple[list[bytes], list[bytes]]:
    """The form of the row (:func:`_form`) and the journal line of each finished item of a unit."""
    if state.clean is not None:
        worker, start, end, total = state.clean
        path = view.paths.journal(worker)
        (data,) = read_spans(path, [(start, end)])
        lines = data.split(b"\n")[:-1]
        ends = {line[-CRC_LENGTH : len(_CRC) - CRC_LENGTH] for line in lines}
        if crc32(data) != total or ends != {_CRC}:
            raise _changed(path)
        return [_form(state.unit.entry, worker, 1, done=True)] * len(lines), lines
    refs: dict[str, list[tuple[bytes, Ref]]] = {}
    entry = state.unit.entry
    for position, kind in stage.states(state):
        history = state.histories.get(position)
        if (only is not None and position not in only) or history is None:
            continue
        floor = stage.state.floor(entry, position)
        done = kind is ItemState.DONE
        ref = history.done if done else history.last_failure(floor)
        # Without a line of a finished item, a power loss took it: only a table has the row.
        if kind is not ItemState.PENDING and ref is not None:
            form = _form(entry, ref.worker, history.attempts(floor) + done, done=done)
            refs.setdefault(ref.worker, []).append((form, ref))
    lines = []
    for worker, some in refs.items():
        path = view.paths.journal(worker)
        lines += read_spans(path, [(ref.start, ref.end - 1) for _, ref in some])
        if not all(map(is_whole, lines)):
            raise _changed(path)
    return [form for some in refs.values() for form, _ in some], lines


def _changed(path: Path) -> TryAgainLaterError:
    message = f"{path} is not what it was when it was first read"
    return TryAgainLaterError(message, hint="try again; 'hpctk doctor RUN' names damaged lines")


def study_so_far(
    view: RunView, manifest: Manifest, kept: Seldom[dict[str, Any]], complete: bool
) -> Search:
    """The search of a study: its best trial so far, and how many trials were pruned."""
    found, _ = kept.read(lambda: _so_far(view, manifest), complete)
    return Search(found["best"], found)


def _so_far(view: RunView, manifest: Manifest) -> dict[str, Any]:
    (stage,) = manifest.stages
    options = stage.workload.options
    sign = -1 if options["directions"] == ["maximize"] else 1
    counts: Counter[str] = Counter()
    best: tuple[float, int, dict[str, Any]] | None = None
    for row in gather(view, stage.name, partial=True, publish=False):
        value = value_columns(row)
        counts[value.get("state", "FAIL")] += 1
        if value.get("state") == "COMPLETE" and "value" in value:
            this = (sign * value["value"], row["item"]["trial"], value)
            best = min(best or this, this, key=lambda one: one[:2])
    shown = None
    if best is not None:
        params = {key.removeprefix("params."): best[2][key] for key in best[2] if "params." in key}
        arm = ",".join(f"{key}={value}" for key, value in params.items())
        shown = {"arm": arm, "reward": best[2]["value"], "trial": best[1], "stderr": None}
    words = [
        one["of"] if isinstance(one, dict) else one
        for one in (options["sampler"], options["pruner"])
        if one != "none"
    ]
    return {"policy": ", ".join(words), "trials": dict(counts), "best": shown}
