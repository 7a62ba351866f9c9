"""Group the failures of a run, so that a thousand equal errors are one line."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.system.record import Record, asdict, fresh

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.state import Ref
    from hpc_toolkit.queue.units import Unit
    from hpc_toolkit.queue.view import RunView, StageView

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
    from hpc_toolkit.results.explain import item_json, number_of

    ranked = sorted(groups.values(), key=lambda one: (-one.items, -one.retrying))[:most]
    for one in ranked:
        found = newest[one.error]
        if len(texts[one.error]) == 1:
            one.error = one.message
        one.stage = found.stage.spec.name
        one.item = number_of(view, found.stage, found.unit, found.position)
        one.example = json.loads(item_json(found.stage, found.unit, found.position))
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
