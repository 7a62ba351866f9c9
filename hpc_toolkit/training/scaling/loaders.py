"""Advise a number of loader processes, from measurements of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.system.quantities import counted
from hpc_toolkit.training.scaling.comparison import NOTABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hpc_toolkit.training.scaling.series import Series

LOADERS = "loader_workers"
ENOUGH = 0.95
"""Share of the highest rate with which fewer loader processes are preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderAdvice:
    """The number of loader processes to use, of those that were compared."""

    workers: int
    """Processes per rank: the fewest that reach `ENOUGH` of the highest rate."""
    world_size: int
    """Largest number of ranks at which all were measured."""
    rates: Mapping[int, float]
    """Rate by number of processes, medians over repeats."""
    loading: float
    """Share of a step in which ranks wait for data, with the advised number."""
    certain: bool
    """Whether repeats of the advised number and of the fastest one agree within 1 - `ENOUGH`."""
    others: Mapping[str, int]
    """Values of the other settings that vary."""

    def __str__(self) -> str:
        """Return the advice with its numbers, for the page."""
        where = ", ".join(f"{name}={value}" for name, value in self.others.items())
        rates = ", ".join(f"{rate:,.4g} with {workers}" for workers, rate in self.rates.items())
        words = f"**Use {counted(self.workers, 'loader worker')} per rank"
        words += f"{' for ' * bool(where)}{where}** "
        words += f"(samples/s on {counted(self.world_size, 'rank')}: {rates})"
        if not self.certain:
            words += "; but measure again: repeats do not agree"
        if self.loading >= NOTABLE:
            words += f"; ranks still wait for data in {self.loading:.0%} of a step"
        if self.workers == max(self.rates):
            words += "; more workers were not measured, and may be faster"
        return words


def advise_loaders(series: Iterable[Series]) -> Iterator[LoaderAdvice]:
    """Advise a number of loader processes for each set of series that differ only in it."""
    groups: dict[tuple[tuple[str, int], ...], dict[int, Series]] = {}
    for one in series:
        if (workers := one.variation.get(LOADERS)) is not None:
            rest = sorted(item for item in one.variation.items() if item[0] != LOADERS)
            groups.setdefault(tuple(rest), {})[workers] = one
    for others, group in groups.items():
        by_workers = {
            workers: {point.world_size: point for point in group[workers].points}
            for workers in sorted(group)
        }
        sizes = set.intersection(*map(set, by_workers.values()))
        if len(group) < 2 or not sizes:
            continue
        points = {workers: found[max(sizes)] for workers, found in by_workers.items()}
        fastest = max(points.values(), key=lambda point: point.rate)
        enough = ENOUGH * fastest.rate
        chosen = min(workers for workers, point in points.items() if point.rate >= enough)
        compared = (points[chosen].rates, fastest.rates)
        yield LoaderAdvice(
            workers=chosen,
            world_size=max(sizes),
            rates={workers: point.rate for workers, point in points.items()},
            loading=points[chosen].shares.get("loading", 0.0),
            certain=all(rates[0] >= ENOUGH * rates[-1] for rates in compared),
            others=dict(others),
        )
