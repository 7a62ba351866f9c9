"""The history of single items: their attempts, the workers that made them, and the outcomes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ItemsError
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.results.journals import ATTEMPTS, records_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.queue.units import Unit
    from hpc_toolkit.queue.view import RunView, StageView


_DIGITS = 19
"""No list has an item with a longer number, and Python converts no number of over 4,300 digits."""


@dataclass(frozen=True, slots=True)
class FoundItem:
    """An item and its location."""

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


def retryable(view: RunView) -> int:
    """Items whose attempts a retry of everything would reset, as far as was read."""
    return sum(1 for stage in view.stages.values() for _ in _floors(view, stage, "", None))


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
                return before + (position if segment.order is None else segment.order[position])
            before += segment.count
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
    examples = ", ".join(json.dumps(match.item) for match in found[:3])
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
            if 0 <= number < segment.count:
                position = number if segment.order is None else segment.order.index(number)
                unit = segment.unit_of(position)
                yield FoundItem(stage, unit, position, json.loads(item_json(stage, unit, position)))
            number -= segment.count


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
    return {
        "item": found.item,
        "stage": stage.paths.name,
        "unit": unit.name,
        "group": stage.log.segments[unit.entry].group_of(unit),
        "state": str(stage.state.item_state(state, found.position)),
        "claims": [
            {
                "generation": n,
                "worker": _owner(stage, unit, n),
                "released": n in state.released,
            }
            for n in range(1, stage.claims.generation(unit.name) + 1)
        ],
        "attempts": [
            {"worker": worker, **{key: line[key] for key in kept if key in line}}
            for worker, line in attempts_of(view, found)
        ],
        "deaths": [
            {
                "generation": generation,
                "worker": death.worker,
                "evidence": death.evidence,
                "explained": death.explained,
                "suspect": death.item == found.position,
            }
            for generation, death in sorted(state.deaths.items())
        ],
        "lifted_to_generation": floor,
        "counting_attempts": history.attempts(floor) if history is not None else 0,
    }


def _owner(stage: StageView, unit: Unit, generation: int) -> str | None:
    try:
        return stage.claims.owner(unit.name, generation)
    except OSError:
        return None


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
