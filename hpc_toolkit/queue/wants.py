"""What single items of a list need, and their priorities, in place of what their stage says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_toolkit.errors import ConfigError, ItemsError
from hpc_toolkit.rundir.layout import StageSpec
from hpc_toolkit.system.jsonlines import batches, encode
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from hpc_toolkit.queue.log import StageLog
    from hpc_toolkit.queue.units import Unit
    from hpc_toolkit.system.needs import Retry

NEEDS, PRIORITY = "needs", "priority"
STAGES = "{}"
"""The want of an item that has no needs of its own: JSON, as of those that have some."""
MOST_WANTS = 1000
"""Different wants of one list; each one divides it into further units."""


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
