"""How fast the same work went on several numbers of ranks: what all of the analysis reads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Law = Literal["strong", "weak"]


def money(amount: str, currency: str) -> str:
    """An amount for people; a number alone where nobody said in which currency."""
    if currency == "USD":
        return f"${amount}"
    return f"{amount} {currency}" if currency else amount


THOUSAND = 1000
"""Samples of a job for which only a throughput is known: its cost is that of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is known of one world size."""

    world_size: int
    """Ranks, which are GPUs where there are any."""
    rates: tuple[float, ...]
    """Samples a second of each repeat, or works a second where the series counts works; sorted."""
    price_per_hour: float | None = None
    """What all ranks together cost in an hour; None where only the series has a price."""
    nodes: int | None = None
    """Nodes of these ranks; None where unknown."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of a step, 0 to 1, such as ``communication`` and ``loading``."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers of the records, medians over repeats; nothing is decided by them."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            message = f"world_size: {self.world_size} is no number of ranks"
            raise ConfigError(message, hint="write 1 or more")
        if not self.rates or not all(math.isfinite(rate) and rate > 0 for rate in self.rates):
            message = f"world size {self.world_size}: {list(self.rates)} are no rates"
            raise ConfigError(message, hint="throughputs and times are above 0")
        # Equal records give equal numbers in whatever order they were read.
        object.__setattr__(self, "rates", tuple(sorted(self.rates)))

    @property
    def rate(self) -> float:
        """The median over repeats."""
        return median(self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A number that somebody states of a series, to be held against it."""

    text: str
    """As it was written."""
    quantity: str
    """Which number: a key of ``claims.QUANTITIES``."""
    value: float
    half: float
    """Half of the last digit that was written: 0.05 for "7.6"."""
    world_size: int | None = None
    """Of which world size; None where the statement does not say."""
    samples: int = THOUSAND
    """For how many samples a cost is stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The same work on several world sizes."""

    name: str
    points: tuple[Point, ...]
    """By rising world size, each once."""
    law: Law = "strong"
    """Whether all ranks share a fixed batch, or each brings its own."""
    work: str = "1,000 samples"
    """What GPU-hours and costs are told of."""
    work_size: float = float(THOUSAND)
    """How much of the unit of ``rates`` that is: 1,000 samples, or 1 epoch."""
    work_samples: float | None = float(THOUSAND)
    """How many samples that is; None where nobody said."""
    price_per_gpu_hour: float | None = None
    currency: str = ""
    """In what prices are told, such as USD; "" where nobody said."""
    watts_per_gpu: float | None = None
    """Power of a GPU that works; None where nobody said."""
    watts_given: bool = False
    """Whether that stands for what was measured, too."""
    device: str = ""
    """What the ranks computed on: ``cpu``, or a GPU's name; "" where nobody said."""
    cluster: str = ""
    """The cluster of all measurements, as ``--cluster`` takes it; "" where no record says it."""
    partition: str = ""
    """Its partition, where it was one."""
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader must know, such as ranks that shared CPUs."""

    def __post_init__(self) -> None:
        sizes = [point.world_size for point in self.points]
        if not sizes:
            message = f"{self.name}: no world size was measured"
            raise ConfigError(message, hint="'hpctk scaling run' measures them")
        twice = sorted({size for size in sizes if sizes.count(size) > 1})
        if twice:
            message = f"{self.name}: world size {twice[0]} is there twice"
            raise ConfigError(message, hint="repeats of one world size are one point")
        ordered = tuple(sorted(self.points, key=lambda point: point.world_size))
        object.__setattr__(self, "points", ordered)

    @property
    def base(self) -> Point:
        """The smallest world size, which all others are compared with."""
        return self.points[0]

    def at_price(self, per_gpu_hour: float) -> Series:
        """The same with another price for all world sizes."""
        points = tuple(replace(point, price_per_hour=None) for point in self.points)
        return replace(self, points=points, price_per_gpu_hour=per_gpu_hour)

    def watts(self, point: Point) -> float | None:
        """What the GPUs of a point draw together; None where nobody measured or said it."""
        measured = point.details.get("gpu_power_w")
        each = self.watts_per_gpu if self.watts_given or measured is None else measured
        return None if each is None else each * point.world_size

    def price(self, point: Point) -> float | None:
        """What all ranks of a point cost in an hour; None if nobody said."""
        if point.price_per_hour is not None:
            return point.price_per_hour
        if self.price_per_gpu_hour is None:
            return None
        return self.price_per_gpu_hour * point.world_size
