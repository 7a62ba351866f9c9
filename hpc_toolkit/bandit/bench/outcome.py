"""Summarise the searches of one policy in numbers that JSON can hold, with bootstrap bands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc_toolkit.bandit.rule import Stream
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.bench.recorded import ScoreTable
    from hpc_toolkit.bandit.bench.replay import Trace
    from hpc_toolkit.bandit.policy import Floats


RESAMPLES = 2_000
"""Number of bootstrap resamples of a band."""

COVERAGE = 0.95
"""Nominal coverage of a band."""

GOALS = (0.98, 0.99, 0.995, 1.0)
"""Shares of the table's best mean to which searches are timed; 1 is the best arm."""

GRID = 60
"""Number of points of a curve over a cost."""


class Spread(NamedTuple):
    """How a cost varies between searches. Infinity means that a search did not reach the goal."""

    median: float
    p90: float
    """Nine of ten searches need no more: the lowest number with that property."""
    low: float
    high: float
    """Ends of the median's bootstrap band."""
    reached: float
    """The share of the searches that reached the goal, 0 to 1."""


def spread(values: Sequence[float], clusters: Sequence[int]) -> Spread:
    """Return median, ninth decile and the median's bootstrap band of one number per search.

    Infinity means that a search did not reach the goal, and sorts above every number. For
    ``clusters`` see :func:`draws`. The band is of the lower median, which is one of the numbers.
    """
    numbers = np.asarray(values, dtype=np.float64)
    member, counts = draws(clusters)
    order = np.argsort(numbers, kind="stable")
    below = np.cumsum(counts[:, member[order]], axis=1)
    medians = numbers[order][np.argmax(2 * below >= below[:, -1:], axis=1)]
    low, high = _ends(medians[:, None])
    return Spread(
        median=float(np.median(numbers)),
        p90=float(np.quantile(numbers, 0.9, method="inverted_cdf")),
        low=float(low[0]),
        high=float(high[0]),
        reached=float(np.isfinite(numbers).mean()),
    )


def mean_band(values: Floats, clusters: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """Return the mean over searches and its bootstrap band: mean, low, high, each (n_columns,).

    ``values`` has shape (n_searches, n_columns). For ``clusters`` see :func:`draws`.
    """
    member, counts = draws(clusters)
    sums = np.zeros((counts.shape[1], values.shape[1]))
    np.add.at(sums, member, values)
    sizes = np.bincount(member, minlength=counts.shape[1])
    low, high = _ends((counts @ sums) / (counts @ sizes)[:, None])
    return np.asarray(values.mean(axis=0)), low, high


def draws(clusters: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the resamples of a bootstrap (Efron 1979) over clusters, with replacement.

    ``clusters`` has the table of each search, because searches on one table resemble each other. If
    all searches ran on one table, the searches themselves are drawn; the band then covers other
    seeds on this table, and not other tables.

    Returns the member that each search belongs to, shape (n_searches,), and how often each resample
    draws each member, shape (RESAMPLES, n_members). Raises ConfigError without any search.
    """
    if not len(clusters):
        message = "no search to summarize"
        raise ConfigError(message, hint="give at least one seed")
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    if not member.any():
        member = np.arange(len(clusters))
    members = int(member.max()) + 1
    rng = np.random.default_rng([0, Stream.BOOTSTRAP])
    counts = rng.multinomial(members, np.full(members, 1.0 / members), size=RESAMPLES)
    return member, counts


def _ends(drawn: Floats) -> tuple[Floats, Floats]:
    """Return the ends of the percentile band over resamples, shape (n_columns,) each."""
    tail = (1.0 - COVERAGE) / 2.0
    # Without interpolation, which is undefined between infinities.
    low, high = np.quantile(drawn, [tail, 1.0 - tail], axis=0, method="inverted_cdf")
    return low, high


def goals(until: float | None) -> list[float]:
    """Return the shares to which searches are timed, ascending, up to and including ``until``."""
    return sorted(GOALS if until is None else {*(one for one in GOALS if one < until), until})


def goal_key(share: float) -> str:
    """Return the key of a goal in a report."""
    # More digits than users write, so that different goals have different keys.
    return f"{share:.12g}"


def goal_of(table: ScoreTable, share: float) -> float:
    """Return the mean that an arm must have to be this share of the table's best."""
    # The factor keeps rounding from putting the goal above the best arm's own mean.
    return share * float(table.means.max()) * (1.0 - 1e-12)


def summary(
    traces: Sequence[Trace],
    clusters: Sequence[int],
    *,
    gpus: Sequence[int],
    until: float | None = None,
    whole: bool = True,
) -> dict[str, Any]:
    """Summarise how much searches spent to reach the goals, and how they ended.

    ``clusters`` has the number of the table of each search. Searches that ended at the share
    ``until`` have no curves. If not ``whole``, pulls are of some tasks and are not counted.
    """
    costs = _costs(traces, gpus, whole=whole)
    exact = [len(t.known) > 0 and t.known[-1] >= goal_of(t.table, 1.0) for t in traces]
    found: dict[str, Any] = {
        "searches": len(traces),
        "to_goal": {
            goal_key(share): {
                name: _as_json(spread(_to_goal(traces, columns, share), clusters))
                for name, columns in costs.items()
            }
            for share in goals(until)
        },
        "ended": {"exact": float(np.mean(exact))},
    }
    if until is None:
        found["curves"] = _curves(traces, clusters, costs)
    return found


def _costs(traces: Sequence[Trace], gpus: Sequence[int], *, whole: bool) -> dict[str, list[Floats]]:
    """Return, by the name of the cost, what each search had spent when each pull was told."""
    costs = {"evaluations": [trace.evaluations for trace in traces]}
    if whole:
        costs = {"pulls": [np.arange(1.0, len(t.arms) + 1.0) for t in traces], **costs}
    if traces[0].table.seconds is not None:
        costs["gpu_s"] = [trace.gpu_s for trace in traces]
        costs |= {f"wall_s_{count}": [t.wall_s(count) for t in traces] for count in gpus}
    return costs


def reached_at(trace: Trace, share: float) -> float:
    """Return the pull, from 1, after which the recommended arm always has this share of the best.

    It is infinity if there is no such pull. A policy that compares arms on few tasks may leave a
    good arm again.
    """
    lasting = np.minimum.accumulate(np.nan_to_num(trace.known, nan=-np.inf)[::-1])[::-1]
    reached = lasting >= goal_of(trace.table, share)
    return float(np.argmax(reached)) + 1.0 if reached.any() else math.inf


def _to_goal(traces: Sequence[Trace], costs: Sequence[Floats], share: float) -> list[float]:
    """Return what each search spent to know an arm with this share of the best."""
    places = [reached_at(trace, share) for trace in traces]
    return [
        float(spent[int(place) - 1]) if math.isfinite(place) else math.inf
        for place, spent in zip(places, costs, strict=True)
    ]


def _curves(
    traces: Sequence[Trace], clusters: Sequence[int], costs: dict[str, list[Floats]]
) -> dict[str, Any]:
    """Return mean simple regret over each cost, with its band.

    Before a search knows an arm, its regret is the mean regret of a random arm.
    """
    curves: dict[str, Any] = {}
    for name, columns in costs.items():
        end = max(float(spent[-1]) if len(spent) else 0.0 for spent in columns)
        grid = np.arange(1.0, end + 1.0)
        if name != "pulls":
            grid = np.geomspace(end / 1000.0, end, GRID)
        rows = np.array([_regret(t, spent, grid) for t, spent in zip(traces, columns, strict=True)])
        found = zip(("x", "simple", "low", "high"), (grid, *mean_band(rows, clusters)), strict=True)
        curves[name] = {key: numbers.tolist() for key, numbers in found}
    return curves


def _regret(trace: Trace, spent: Floats, grid: Floats) -> Floats:
    guess = float(trace.table.means.mean())
    known = np.concatenate([[guess], np.where(np.isnan(trace.known), guess, trace.known)])
    # At equal costs the last value counts.
    place = np.searchsorted(spent, grid, side="right")
    return np.asarray(float(trace.table.means.max()) - known[place])


def _as_json(found: Spread) -> dict[str, float | None]:
    """Convert a spread to JSON, with None for infinity: too few searches reached the goal."""
    return {name: one if math.isfinite(one) else None for name, one in found._asdict().items()}
