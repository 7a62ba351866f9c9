"""Recompute some results and compare them with the recorded ones."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_toolkit.run.verification.checks import Problem
from hpc_toolkit.worker.loading import load_workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.results.gather import Row
    from hpc_toolkit.rundir.layout import StageSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """A check that recomputes results in this process."""

    count: int
    """Number of results, drawn at random."""
    seed: int = 0
    """Seed of the draw."""
    tolerance: float = 1e-9
    """Largest allowed difference, relative to the largest of 1 and both numbers' magnitudes."""
    ignore: tuple[str, ...] = field(default=())
    """Keys that are not compared at any depth, such as times."""

    def check(self, stage: StageSpec, rows: list[Row]) -> tuple[int, list[Problem]]:
        """Recompute results; return how many, and a problem for each that differs.

        Nothing is recorded. The items run one by one, each in a call of its own.

        Raises:
            WorkloadError: the stage's code cannot be loaded.
        """
        done = [row for row in rows if row["state"] == "done"]
        drawn = random.Random(self.seed).sample(done, min(self.count, len(done)))
        by = stage.group_by
        if by is not None:
            drawn.sort(key=lambda row: json.dumps(row["item"][by], sort_keys=True))
        workload = load_workload(stage.workload)
        problems = []
        loaded, context = None, None
        for row in drawn:
            item = row["item"]
            try:
                if loaded is None or (by is not None and loaded[0] != item[by]):
                    loaded = (item[by] if by is not None else None,)
                    context = workload.load(loaded[0])
                value = next(iter(workload.run(context, iter([dict(item)]))))
                now = json.loads(json.dumps(value))
            # Workload code that calls sys.exit must not end this check.
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary of users' code
                what = f"fails now: {type(error).__name__}: {error}"
                problems.append(Problem("recomputed", what, item))
                loaded = None
                continue
            if different := list(self._differences(row["value"], now, "value")):
                problems.append(Problem("recomputed", "; ".join(different[:3]), item))
        return len(drawn), problems

    def _differences(self, before: Any, now: Any, path: str) -> Iterator[str]:
        if isinstance(before, dict) and isinstance(now, dict):
            for key in {**before, **now}:
                if key not in self.ignore:
                    yield from self._differences(before.get(key), now.get(key), f"{path}.{key}")
        elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
            for index, (old, new) in enumerate(zip(before, now, strict=True)):
                yield from self._differences(old, new, f"{path}[{index}]")
        elif not self._same(before, now):
            yield f"{path} was {json.dumps(before)}, is {json.dumps(now)}"

    def _same(self, before: Any, now: Any) -> bool:
        numbers = all(
            isinstance(one, int | float) and not isinstance(one, bool) for one in (before, now)
        )
        if numbers:
            return math.isclose(before, now, rel_tol=self.tolerance, abs_tol=self.tolerance)
        return type(before) is type(now) and bool(before == now)
