"""Analyze measurements and tables: compare their world sizes, judge them, and show the result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.training.scaling.comparison import FAIR, compare, judge
from hpc_toolkit.training.scaling.loaders import advise_loaders
from hpc_toolkit.training.scaling.page import as_data, as_markdown, scaling_svg
from hpc_toolkit.training.scaling.records import read_source
from hpc_toolkit.training.scaling.series import of_samples, priced

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hpc_toolkit.training.scaling.loaders import LoaderAdvice
    from hpc_toolkit.training.scaling.page import Judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Options of an analysis, besides the measurements."""

    samples: int | None = None
    """Number of samples whose time and cost are shown; None for 1,000."""
    price_per_gpu_hour: float | None = None
    """Price that replaces every other price; None to look for one."""
    min_efficiency: float | None = None
    """Lowest efficiency that is wanted; None for :data:`FAIR` without a demand."""
    cluster: str | None = None
    """The cluster whose prices apply; None for the measured one."""

    @property
    def minimum(self) -> float:
        return FAIR if self.min_efficiency is None else self.min_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    judged: tuple[Judged, ...]
    """Each series with its verdict."""
    loaders: tuple[LoaderAdvice, ...]
    notes: tuple[str, ...]
    """What was left out of the sources."""
    wanted: Wanted

    @property
    def page(self) -> str:
        return as_markdown(self.judged, self.notes, self.loaders)

    @property
    def data(self) -> str:
        found = as_data(self.judged, self.notes, self.loaders)
        return json.dumps(found, allow_nan=False) + "\n"

    @property
    def picture(self) -> str:
        return scaling_svg([one for one, _ in self.judged], self.wanted.minimum)

    @property
    def failed(self) -> bool:
        """Whether a world size is less efficient than ``--min-efficiency`` demands."""
        demanded = self.wanted.min_efficiency is not None
        return demanded and any(verdict.below for _, verdict in self.judged)


def analyze(sources: Iterable[Path], wanted: Wanted) -> Analysis:
    """Analyze directories and files. Raises ConfigError if one cannot be read."""
    judged: list[Judged] = []
    notes: list[str] = []
    loaders: list[LoaderAdvice] = []
    for path in sources:
        found, left_out = read_source(path)
        notes += left_out
        loaders += advise_loaders(found)
        for one in found:
            series = priced(
                of_samples(one, wanted.samples),
                price_per_gpu_hour=wanted.price_per_gpu_hour,
                cluster=wanted.cluster,
            )
            compared = compare(series)
            judged.append((compared, judge(compared, wanted.minimum)))
    return Analysis(judged=tuple(judged), loaders=tuple(loaders), notes=tuple(notes), wanted=wanted)
