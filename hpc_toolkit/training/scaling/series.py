"""Rates of the same work on several numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Law = Literal["strong", "weak"]


def money(amount: str, currency: str) -> str:
    """Format an amount for people; without a currency, only the number."""
    if currency == "USD":
        return f"${amount}"
    return f"{amount} {currency}" if currency else amount


THOUSAND = 1000
"""Samples whose cost is given if only a throughput is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    world_size: int
    """Number of ranks; each has a GPU if there are any."""
    rates: tuple[float, ...]
    """Rate of each repeat, sorted: samples per second, or units of `Series.work` per second."""
    price_per_hour: float | None = None
    """Price of all ranks together; None if unknown."""
    nodes: int | None = None
    """Nodes of these ranks; None if unknown."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of a step, 0 to 1, such as ``communication`` and ``loading``."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers of the records, medians over repeats; the advice does not depend on them."""

    def __post_init__(self) -> None:
        # Sort, so that the order of reading changes nothing.
        object.__setattr__(self, "rates", tuple(sorted(self.rates)))

    @property
    def rate(self) -> float:
        return median(self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The same work on several world sizes."""

    name: str
    points: tuple[Point, ...]
    """Points in order of world size, each world size once."""
    law: Law = "strong"
    """Whether all ranks share a fixed batch, or each brings its own."""
    work: str = "1,000 samples"
    """The work to which GPU-hours and costs refer."""
    work_size: float = float(THOUSAND)
    """Amount of work in the unit of ``rates``: 1,000 samples, or 1 epoch."""
    work_samples: float | None = float(THOUSAND)
    """Number of samples in the work; None if unknown."""
    currency: str = ""
    """Currency of the prices, such as USD; "" if unknown."""
    watts_per_gpu: float | None = None
    """Power of a busy GPU where none was measured; None if unknown."""
    device: str = ""
    """Device of the ranks: ``cpu``, or a GPU's name; "" if unknown."""
    cluster: str = ""
    """Cluster of all measurements, as ``--cluster`` takes it; "" if unknown or not the same."""
    partition: str = ""
    """Partition of all measurements; "" if unknown or not the same."""
    notes: tuple[str, ...] = ()
    """Facts that a reader must know, such as ranks that shared CPUs."""

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
        """The smallest world size, with which all others are compared."""
        return self.points[0]

    def at_price(self, price: float, per: Literal["nodes", "world_size"]) -> Series:
        """Return the series with a price per hour of each node or rank, as far as they are known."""
        points = (
            replace(point, price_per_hour=price * count)
            if (count := getattr(point, per))
            else point
            for point in self.points
        )
        return replace(self, points=tuple(points))

    def watts(self, point: Point) -> float | None:
        """Return the total power of a point's GPUs; None if unknown."""
        each = point.details.get("gpu_power_w", self.watts_per_gpu)
        return None if each is None else each * point.world_size
