"""What single items of a list say of themselves: needs, a priority, and the items they follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_toolkit.errors import ConfigError, ItemsError, near_miss
from hpc_toolkit.rundir.layout import RESULTS, StageSpec
from hpc_toolkit.system.jsonlines import batches, decode_each, encode
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from array import array

    from hpc_toolkit.queue.log import StageLog
    from hpc_toolkit.queue.units import Unit
    from hpc_toolkit.system.needs import Retry

NEEDS, PRIORITY = "needs", "priority"
STAGES = "{}"
"""The want of an item that has no needs of its own: JSON, as of those that have some."""
MOST_WANTS = 1000
"""Different wants of one list; each one divides it into further units."""
_ID, _AFTER = "id", "after"
_MOST_NAMES = 10_000
"""Ids among which a similar one is looked for, which takes a second for each 100,000."""


class Wants:
    """Takes ``needs``, and ``priority`` beside them, out of the items of a list."""

    def __init__(self, stage: StageSpec) -> None:
        self._stage = stage
        self._known: dict[str, str] = {}
        self._each: list[str] = []

    def taken(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items without these keys. Raises ItemsError: a worker cannot fulfil them."""
        return changed(items, NEEDS, self._without)

    def _without(self, number: int, item: Any) -> Any:
        if not isinstance(item, dict) or type(item.get(NEEDS)) is not dict:
            return item
        own = {key: item[key] for key in (NEEDS, PRIORITY) if key in item}
        if type(own.get(PRIORITY, 0)) is not int:
            refuse(number, f"its priority {own[PRIORITY]!r:.40} is not a whole number", "such as 5")
        if (text := str(own)) not in self._known:
            if len(self._known) == MOST_WANTS:
                wrong = f"it is the first after {MOST_WANTS} different needs and priorities"
                refuse(number, wrong, "give more items the same needs and priority")
            self._known[text] = self._parsed(number, own)
        self._each += [STAGES] * (number - len(self._each)) + [self._known[text]]
        return {key: value for key, value in item.items() if key not in own}

    def _parsed(self, number: int, own: dict[str, Any]) -> str:
        from hpc_toolkit.system.needs import parse_needs  # few lists have needs

        try:
            want = encode({**own, NEEDS: parse_needs(own[NEEDS], NEEDS)})
            spec_with(self._stage, want)
        except ConfigError as error:
            refuse(number, error.message, str(error.hint))
        return want

    def each(self, count: int) -> list[str]:
        """The want of each of ``count`` items; [] if none has one of its own."""
        return self._each and self._each + [STAGES] * (count - len(self._each))


def spec_with(stage: StageSpec, want: str) -> StageSpec:
    """The stage as it is for an item with a want. Raises ConfigError: its retry does not fit."""
    own = json.loads(want)
    needs = {**(stage.needs or {}), **own.get(NEEDS, {})}
    return replace(stage, needs=needs, priority=own.get(PRIORITY, stage.priority))


class Arrows:
    """Takes ``after`` out of the items of a list, if there are items with an id and such a list."""

    def __init__(self) -> None:
        from array import array  # few lists have ``after``

        self.count = array("I")
        """Number of items before each item, for those up to the last item that follows others."""
        self.before = array("I")
        """The ids before all items, one after another, as numbers of names."""
        self.names: dict[str, int] = {}
        self._other: int | None = None
        """The first item whose ``after`` is not a list."""

    def __bool__(self) -> bool:
        return bool(self.count)

    def taken(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items without ``after``. Raises ItemsError: it is neither a list of ids nor left."""
        return changed(items, _AFTER, self._without)

    def _without(self, number: int, item: Any) -> Any:
        if not isinstance(item, dict) or _AFTER not in item:
            return item
        after = item[_AFTER]
        if type(after) is not list or _ID not in item:
            self._other = number if self._other is None else self._other
            return item
        for one in after:
            if not _is_id(one):
                wrong = f"'after' has {one!r:.80}, which cannot be an id"
                refuse(number, wrong, "ids are text or whole numbers")
        self.count.extend([0] * (number - len(self.count)))
        numbers = [self.names.setdefault(str(one), len(self.names)) for one in after]
        before = dict.fromkeys(numbers)
        self.count.append(len(before))
        self.before.extend(before)
        return {key: value for key, value in item.items() if key != _AFTER}

    def edges(self, lines: list[bytes], *, results: bool) -> tuple[array[int], array[int]]:
        """How many items there are before each item, and which, one after another.

        ``results``: items get the results of those before. Raises ItemsError: an id is missing,
        unknown or not unique.
        """
        from array import array

        if self._other is not None:
            hint = 'such as {"id": "c", "after": ["a", "b"]}; give the key another name otherwise'
            refuse(self._other, "its 'after' is not a list of ids, or it has no 'id'", hint)
        self.count.extend([0] * (len(lines) - len(self.count)))
        where = self._where(lines, results=results)
        unknown = {number for name, number in self.names.items() if where[number] < 0}
        if unknown:
            at = next(at for at, one in enumerate(self.before) if one in unknown)
            starts = accumulate(self.count)
            number = next(number for number, end in enumerate(starts) if at < end)
            name = next(name for name, one in self.names.items() if one == self.before[at])
            known = [one for one, of in self.names.items() if where[of] >= 0]
            hint = near_miss(name, known) if len(known) <= _MOST_NAMES else "check its spelling"
            refuse(number, f"it follows {name!r}, and no item has this id", hint)
        return self.count, array("I", [where[one] for one in self.before])

    def _where(self, lines: list[bytes], *, results: bool) -> array[int]:
        """The number of the item that has each id; -1 for ids without an item."""
        from array import array

        names = self.names
        where = array("q", [-1]) * len(names)
        for number, item in enumerate(one for some in batches(lines) for one in decode_each(some)):
            if not _is_id(item.get(_ID)):
                hint = "give each item an 'id', which is text or a whole number"
                refuse(number, "it has no 'id', and others follow items by their ids", hint)
            if results and RESULTS in item:
                refuse(
                    number,
                    f"it has the key {RESULTS!r}, which gets the results of items before",
                    "give the key another name",
                )
            at = names.setdefault(str(item[_ID]), len(names))
            if at == len(where):
                where.append(-1)
            if where[at] >= 0:
                wrong = f"its id {item[_ID]!r} is that of item {where[at]}"
                refuse(number, wrong, "give each item another id")
            where[at] = number
        return where


def _is_id(value: object) -> bool:
    return isinstance(value, str) or type(value) is int


class Specs(dict[str, StageSpec]):
    """Want -> the stage, with the needs and the priority of items with this want."""

    def __init__(self, stage: StageSpec, log: StageLog) -> None:
        super().__init__({STAGES: stage})
        self._log = log
        self._retries: dict[str, Retry | None] = {}

    def __missing__(self, want: str) -> StageSpec:
        self[want] = found = spec_with(self[STAGES], want)
        return found

    def want(self, unit: Unit) -> str:
        return self._log.segments[unit.entry].want_of(unit)

    def of(self, unit: Unit) -> StageSpec:
        return self[self.want(unit)]

    def retry(self, unit: Unit) -> Retry | None:
        """How the needs of a unit's items grow; None: they do not."""
        if (want := self.want(unit)) not in self._retries:
            from hpc_toolkit.system.needs import retry_of  # few runs have one

            self._retries[want] = retry_of(self[want])
        return self._retries[want]

    def steps(self, unit: Unit) -> int:
        """How often the needs of an item of a unit grow at most."""
        retry = self.retry(unit) if self[STAGES].retry else None
        return 0 if retry is None else retry.steps


def may_need(stage: StageSpec) -> bool:
    """Whether items of a stage, or single ones of them, may have needs."""
    return stage.needs is not None or stage.retry is not None


def changed(items: Iterable[Any], key: str, change: Callable[[int, Any], Any]) -> Iterator[Any]:
    """The items; ``change`` gets the number of an item and the item, where some have a key."""
    first = 0
    for some in batches(items):
        if any(isinstance(item, dict) and key in item for item in some):
            yield from (change(number, item) for number, item in enumerate(some, first))
        else:
            yield from some
        first += len(some)


def refuse(number: int, wrong: str, hint: str) -> NoReturn:
    raise ItemsError(f"item {number}: {wrong}", hint=hint, number=number)
