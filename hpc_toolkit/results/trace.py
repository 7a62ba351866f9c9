"""The trace of a run: a row for each attempt at an item."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.history import Attempt, History
from hpc_toolkit.rundir.layout import without_places

if TYPE_CHECKING:
    from hpc_toolkit.results.tables import Row


@dataclass
class Trace:
    """The attempts of a run as rows, which are read again each time that they are used.

    They are in the order in which attempts ended; ``stage``: only those of a stage.
    """

    view: RunView
    stage: str | None = None
    count: int = 0
    """Number of rows, once all were read."""
    own: ClassVar = (
        *("number", "stage", "unit", "generation", "attempt", "outcome"),
        *("begin", "end", "seconds", "worker", "host", "job", "error"),
    )
    """Columns that describe an attempt, in this order, after the columns of its item."""

    def __iter__(self) -> Iterator[Row]:
        history, self.count = History(self.view), 0
        stages = self.view.stages

        # Workers run their units side by side.
        @lru_cache(maxsize=2 * len(self.view.readers))
        def lines_of(stage: str, entry: int, unit: str) -> list[bytes]:
            """The JSON of a unit's items; empty if its segment is damaged."""
            with suppress(RunError, OSError):
                return stages[stage].log.segments[entry].lines(stages[stage].unit(unit))
            return []

        for record in history.work():
            if isinstance(record, Attempt) and self.stage in (None, record.stage):
                self.count += 1
                presence = history.presences.get(record.worker)
                seconds = record.seconds
                lines = lines_of(record.stage, record.entry, record.unit)
                place = record.position - stages[record.stage].unit(record.unit).first
                yield {
                    "item": without_places(json.loads(lines[place])) if lines else {},
                    "number": record.item,
                    "stage": record.stage,
                    "unit": record.unit,
                    "generation": record.generation,
                    "attempt": record.number,
                    "outcome": record.outcome,
                    "begin": record.begin,
                    "end": record.end,
                    "seconds": seconds if seconds is None else round(seconds, 6),
                    "worker": record.worker,
                    "host": record.host,
                    "job": presence.job if presence is not None else None,
                    "error": record.error,
                }
