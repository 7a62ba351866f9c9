"""Single items: find one, explain what happened to it, retry it; and group those that failed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import ItemsError
from hpc_toolkit.queue.items import Item
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.state import ItemState, Ref, counting_of
from hpc_toolkit.queue.units import Unit
from hpc_toolkit.queue.view import RunView, StageView
from hpc_toolkit.results.workers import ATTEMPTS, records_of
from hpc_toolkit.rundir.layout import shown_item, without_places
from hpc_toolkit.system.record import Record, asdict, fresh

if TYPE_CHECKING:
    from hpc_toolkit.queue.following import Ref as ItemRef


_DIGITS = 19
"""No list has an item with a longer number, and Python converts no number of over 4,300 digits."""
_SHOWN = 5
_MOST_READ = 2_000
"""Failures whose lines are read; the others are counted together, because each is a read."""
_NOT_READ = "(errors beyond the first 2,000, not read)"
_CHARS = 200
_PATH = re.compile(r"(?<![\w/])~?(?:/[\w.@+,:=-]+){2,}/?")
_NUMBER = re.compile(
    r"(?<!code )(?<!status )(?<!errno )(?<!signal )(?<![A-Za-z_0-9.])"
    r"(?:0x[0-9a-fA-F]+|[0-9a-f]{12,}|[-+]?\d[\d_]*(?:\.\d+)?(?:e[-+]?\d+)?)"
)


class FoundItem(Record):
    stage: StageView
    unit: Unit
    position: int
    item: Item


def retry_failed(
    view: RunView, stage: StageView, match: str = "", only: FoundItem | None = None
) -> int:
    """Give the failed items of a stage a full budget of attempts (rule R10); return how many.

    This includes pending items that have failed so far. ``match``: only items whose JSON or last
    error contains this text.
    """
    while True:
        view.poll()
        floors = list(_floors(view, stage, match, only))
        if not floors or stage.log.add_retry(floors):
            return len(floors)


def _floors(
    view: RunView, stage: StageView, match: str, only: FoundItem | None
) -> Iterator[tuple[int, int, int]]:
    """(Entry, position, highest failed generation) of the items to retry."""
    wanted = (only.stage.spec.name, only.unit.entry, only.position) if only else None
    for unit in stage.state.units.values():
        for position, history in unit.histories.items():
            if wanted not in (None, (stage.spec.name, unit.unit.entry, position)):
                continue
            state = stage.state.item_state(unit, position)
            ref = history.last_failure(stage.state.floor(unit.unit.entry, position))
            if state is ItemState.DONE or ref is None:
                continue
            if match:
                error = str((view.line(ref) or {}).get("error", ""))
                if match not in error and match not in item_json(stage, unit.unit, position):
                    continue
            yield unit.unit.entry, position, max(history.failures)


def unit_items(stage: StageView, unit: Unit) -> list[Item]:
    return stage.log.segments[unit.entry].read(unit)[1]


def item_json(stage: StageView, unit: Unit, position: int) -> str:
    segment = stage.log.segments[unit.entry]
    return segment.lines(unit)[position - unit.first].decode()


def number_of(view: RunView, stage: StageView, unit: Unit, position: int) -> int:
    """Return the number from 0 by which :func:`find_item` finds an item."""
    before = 0
    for one in view.stages.values():
        for entry, segment in one.log.segments.items():
            if one is stage and entry == unit.entry:
                return before + segment.number(position)
            before += segment.count if segment.numbers is None else 0
    raise AssertionError(unit.name)


def find_item(view: RunView, text: str) -> FoundItem:
    """Find the one item of this number from 0, JSON, or part of its JSON; else ItemsError."""
    view.poll()
    is_number = text.isdecimal() and len(text) <= _DIGITS
    found = list(_numbered(view, int(text)) if is_number else _matches(view, text))
    exact = [match for match in found if match.item == _object(text)]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if not found:
        message = f"no item is or contains {text!r}"
        logs = [stage.log for stage in view.stages.values()]
        count = sum(segment.count for log in logs for segment in log.segments.values())
        hint = f"give its number (0 to {count - 1}), or a part of its JSON"
        raise ItemsError(message, hint=hint if count else "the run has no items yet")
    examples = ", ".join(json.dumps(shown_item(match.item)) for match in found[:3])
    message = f"{text!r} matches {len(found)} items: {examples}, ..."
    raise ItemsError(message, hint="give more of its JSON")


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _numbered(view: RunView, number: int) -> Iterator[FoundItem]:
    """Read only the unit of the item, since a list may be long."""
    for stage in view.stages.values():
        for segment in stage.log.segments.values():
            order = segment.numbers or segment.order
            if 0 <= number < segment.count if order is None else number in order:
                position = number if order is None else order.index(number)
                unit = segment.unit_of(position)
                yield FoundItem(stage, unit, position, json.loads(item_json(stage, unit, position)))
            number -= segment.count if segment.numbers is None else 0


def _matches(view: RunView, text: str) -> Iterator[FoundItem]:
    wanted = _object(text)
    compact = _compact(text)
    for stage in view.stages.values():
        for segment in stage.log.segments.values():
            for position, line in enumerate(segment.items()):
                # Complete JSON may be given with its keys in another order.
                if compact in line.decode() or (wanted is not None and json.loads(line) == wanted):
                    unit = segment.unit_of(position)
                    yield FoundItem(stage, unit, position, json.loads(line))


def _compact(text: str) -> str:
    """Drop JSON's spaces from a text that is JSON or the inside of a JSON object."""
    for opened, closed in (("", ""), ("{", "}")):
        try:
            value = json.loads(f"{opened}{text}{closed}")
        except ValueError:
            continue
        compact = json.dumps(value, separators=(",", ":"))
        return compact.removeprefix(opened).removesuffix(closed)
    return text


def explain(view: RunView, found: FoundItem) -> dict[str, Any]:
    """Collect everything that the run's files contain about one item."""
    stage, unit = found.stage, found.unit
    view.poll_claims()
    state = stage.state.units[unit.name]
    history = state.histories.get(found.position)
    floor = stage.state.floor(unit.entry, found.position)
    kept = ("type", "generation", "at", "seconds", "value", "error", "traceback", "log")
    deaths = sorted(state.deaths.items())
    suspected = counting_of([death for _, death in deaths if death.item == found.position])
    return {
        "item": without_places(found.item),
        "stage": stage.paths.name,
        "unit": unit.name,
        "group": stage.log.segments[unit.entry].group_of(unit),
        "state": str(stage.state.item_state(state, found.position)),
        "claims": [
            {
                "generation": n,
                "worker": stage.claims.owner(unit.name, n) or None,
                "released": n in state.released,
            }
            for n in range(1, stage.claims.generation(unit.name) + 1)
        ],
        "attempts": [
            {
                "worker": worker,
                **{key: line[key] for key in kept if key in line},
                **_needs(stage, found, floor, line["generation"]),
            }
            for worker, line in attempts_of(view, found)
        ],
        "deaths": [
            {
                "generation": generation,
                "worker": death.worker,
                "evidence": death.evidence,
                "explained": death.explained,
                "suspect": any(one is death for one in suspected),
            }
            for generation, death in deaths
        ],
        **_needs(stage, found, floor),
        "lifted_to_generation": floor,
        "counting_attempts": history.attempts(floor) if history is not None else 0,
    }


def _needs(
    stage: StageView, found: FoundItem, floor: int, generation: float = math.inf
) -> dict[str, Any]:
    """The needs of an item in a generation, if they grow or are its own; by default of its next
    attempt."""
    spec = stage.specs.of(found.unit)
    history = stage.state.units[found.unit.name].histories.get(found.position)
    if not stage.spec.retry and spec is stage.spec:
        return {}
    from hpc_toolkit.system.needs import needs_after

    since = floor if generation > floor else 0  # earlier retries are not known
    growth = 0 if history is None else history.growth(since, generation)
    return {"needs": needs_after(spec, growth)}


def explain_absent(view: RunView, text: str) -> dict[str, Any] | None:
    """Why an item of a list was not added yet (rule R17); None: no item has this number or text."""
    from hpc_toolkit.queue.graph import following  # 'hpctk status' needs none of it

    for name, one in following(view).items():
        if found := one.absent(_compact(text)):
            state, stage = "skipped" if found.skipped else "waiting", view.stages[name]
            causes = [_cause(view, stage, item, ref) for item, ref in found.causes]
            return {"item": found.item, "stage": name, "state": state, "after": causes}
    return None


def _cause(view: RunView, stage: StageView, item: Item, ref: ItemRef | None) -> dict[str, Any]:
    if ref is None:
        return {"item": item, "state": "waiting"}
    unit = stage.state.units[stage.log.segments[ref[0]].unit_of(ref[1]).name]
    history = unit.histories.get(ref[1])
    failure = history.last_failure(stage.state.floor(*ref)) if history else None
    error = {} if failure is None else {"error": _first_line(_record(view, failure))}
    return {"item": item, "state": str(stage.state.item_state(unit, ref[1])), **error}


def attempts_of(view: RunView, found: FoundItem) -> list[tuple[str, dict[str, Any]]]:
    """(worker, journal line) of every attempt at an item, by generation; reads all journals."""
    name = f"{found.stage.paths.name}/{found.unit.name}"
    attempts = [
        (worker, record)
        for worker in sorted(view.readers)
        for record in records_of(view, worker, name)
        if record["type"] in ATTEMPTS and (record["unit"], record["item"]) == (name, found.position)
    ]
    return sorted(attempts, key=lambda pair: (pair[1]["generation"], pair[0]))


class Failures(Record, frozen=False):
    """Failures with one kind of error, of items without a result."""

    error: str
    """First line of the error. If the errors differ, ``#`` is a number that is not a code, and
    ``PATH`` a path."""
    items: int = 0
    """Items that failed for good."""
    retrying: int = 0
    """Items that are still to be tried again."""
    message: str = ""
    """First line of the newest of these errors, as it was raised."""
    output: str = ""
    """The place in the code that raised it, as its traceback names it; "" without a traceback."""
    stage: str = ""
    item: int = 0
    """Number of the item of ``message``, as ``hpctk explain`` takes it."""
    example: dict[str, Any] = fresh(factory=dict)
    """That item."""
    hosts: dict[str, int] = fresh(factory=dict)
    """Number of these failures by host; a worker's name where its host is not known."""
    first: float | None = None
    """When the first and the last of them happened: epoch seconds by the workers' clocks."""
    last: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def masked(error: str) -> str:
    """Return the error without what differs between items: numbers, identifiers and paths."""
    return _NUMBER.sub("#", _PATH.sub("PATH", error))


def group_failures(
    view: RunView, workers: Mapping[str, Presence | None], *, most: int = _SHOWN
) -> list[Failures]:
    """Return the most frequent kinds of failures, items that failed for good first.

    ``workers`` are the presences of the run's workers.
    """
    groups: dict[str, Failures] = {}
    newest: dict[str, _Failing] = {}
    texts: dict[str, set[str]] = {}
    for number, failing in enumerate(_failing(view)):
        record = _record(view, failing.ref) if number < _MOST_READ else {}
        text = _first_line(record) if number < _MOST_READ else _NOT_READ
        one = groups.setdefault(masked(text), Failures(masked(text)))
        texts.setdefault(one.error, set()).add(text)
        one.items += failing.final
        one.retrying += not failing.final
        presence = workers.get(failing.ref.worker)
        host = presence.host if presence is not None else failing.ref.worker
        one.hosts[host] = one.hosts.get(host, 0) + 1
        at = record.get("at")
        one.first = at if one.first is None else min(one.first, at or one.first)
        if one.error not in newest or (at or 0.0) >= (one.last or 0.0):
            newest[one.error] = failing
            one.last, one.message, one.output = at, text, _output(record)
    if not groups:
        return []
    ranked = sorted(groups.values(), key=lambda one: (-one.items, -one.retrying))[:most]
    for one in ranked:
        found = newest[one.error]
        if len(texts[one.error]) == 1:
            one.error = one.message
        one.stage = found.stage.spec.name
        one.item = number_of(view, found.stage, found.unit, found.position)
        item = json.loads(item_json(found.stage, found.unit, found.position))
        one.example = shown_item(item)
    return ranked


class _Failing(NamedTuple):
    stage: StageView
    unit: Unit
    position: int
    ref: Ref
    """The failure to show."""
    final: bool
    """Whether the item will not be tried again."""


def _failing(view: RunView) -> Iterator[_Failing]:
    """Yield the items without a result whose last attempt failed."""
    for stage in view.stages.values():
        begun = (stage.state.units[name] for name in stage.state.begun)
        for unit in sorted(begun, key=lambda one: one.unit):
            for position, history in unit.histories.items():
                ref = history.last_failure(stage.state.floor(unit.unit.entry, position))
                if ref is not None and history.done is None:
                    final = stage.state.item_state(unit, position) is ItemState.FAILED
                    yield _Failing(stage, unit.unit, position, ref, final)


def _record(view: RunView, ref: Ref) -> dict[str, Any]:
    """Return the journal line of a failure, or one that says why it cannot be read."""
    try:
        return view.failure(ref) or {"error": "?"}
    except OSError as error:
        return {"error": f"? ({error.strerror})"}


def _first_line(record: dict[str, Any]) -> str:
    text = str(record["error"])
    return text.splitlines()[0][:_CHARS] if text else "?"


def _output(record: dict[str, Any]) -> str:
    """Return where in the code an error was raised: the last place that its traceback names."""
    lines = str(record.get("traceback", "")).splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return places[-1][:_CHARS] if places else ""
