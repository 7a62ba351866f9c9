"""A benchmark that is repeated with many seeds, in batches that shrink where memory runs out.

    hpctk init runs/bench --workload examples.iterated:Iterations --count 500 --key seed \
        --option batch=10 --max-attempts 3 --timeout 5min
    hpctk work runs/bench --workers 10

docs/how-to/iterated-benchmarks.md goes on from there.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Item = dict[str, Any]


class Iterations:
    """The mean and spread of some draws, for each seed.

    Args:
        batch: how many iterations are computed together, at most.
        draws: how many numbers an iteration draws.
        mib: memory that an iteration needs while its batch is computed, in MiB.
        seconds: how long an iteration takes beside that.
        flaky: chance that an attempt fails; another one may succeed.
    """

    def __init__(
        self,
        *,
        batch: int = 10,
        draws: int = 1000,
        mib: float = 0.0,
        seconds: float = 0.0,
        flaky: float = 0.0,
    ) -> None:
        self._batch = batch
        self._draws = draws
        self._mib = mib
        self._seconds = seconds
        self._flaky = flaky

    def load(self, group: Any) -> dict[str, int]:
        """What is kept between batches: how large they may be."""
        return {"batch": self._batch}

    def run(self, context: dict[str, int], items: Iterable[Item]) -> Iterator[Item]:
        """One result for each item, in their order; each is recorded as it comes."""
        waiting = iter(items)
        while batch := list(islice(waiting, context["batch"])):
            # Stands for what a model needs for a batch on its device.
            memory = bytes(int(len(batch) * self._mib * 2**20))
            for item in batch:
                yield self.measure(item, len(batch))
            del memory

    def measure(self, item: Item, batch: int) -> Item:
        """One iteration; its numbers depend on its seed alone."""
        if random.random() < self._flaky:
            message = "the license server did not answer"
            raise ConnectionError(message)
        time.sleep(self._seconds)
        draw = random.Random(item["seed"])
        numbers = [draw.gauss(0.0, 1.0) for _ in range(self._draws)]
        mean, spread = statistics.fmean(numbers), statistics.pstdev(numbers)
        return {"mean": mean, "spread": spread, "batch": batch}

    def on_oom(self, context: dict[str, int] | None, items: list[Item]) -> bool:
        """Memory ran out: go on with half the batch, at once and without an attempt."""
        if context is None or context["batch"] == 1:
            return False
        context["batch"] = max(1, min(context["batch"], len(items)) // 2)
        return True
