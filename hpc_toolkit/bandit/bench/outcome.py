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


RESAMPLES = 2_000
"""Number of bootstrap resamples of a band."""

COVERAGE = 0.95
"""Nominal coverage of a band."""

GOALS = (0.98, 0.99, 0.995, 1.0)
"""Shares of the table's best mean to which searches are timed; 1 is the best arm."""

EXACT_AFTER = (25, 50, 100)
"""Pulls after which to count the searches that know the best arm."""

GRID = 60
"""Number of points of a curve over a cost."""


class Spread(NamedTuple):
    """How a cost varies between searches. Infinity means that a search did not reach the goal."""

    median: float
    """Half of the searches need no more."""
    p90: float
    """Nine of ten searches need no more: the lowest number with that property."""
    low: float
    """Lower end of the median's bootstrap band."""
    high: float
    """Upper end of the median's bootstrap band."""
    reached: float
    """The share of the searches that reached the goal, 0 to 1."""


def spread(values: Sequence[float], clusters: Sequence[int], *, seed: int = 0) -> Spread:
    """Return median, ninth decile and the median's bootstrap band of one number per search.

    Infinity means that a search did not reach the goal, and sorts above every number. For
    ``clusters`` see :func:`draws`. The band is of the lower median, which is one of the numbers.
    """
    numbers = np.asarray(values, dtype=np.float64)
    member, counts = draws(clusters, seed=seed)
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


def mean_band(
    values: NDArray[np.float64], clusters: Sequence[int], *, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean over searches and its bootstrap band: mean, low, high, each (n_columns,).

    ``values`` has shape (n_searches, n_columns). For ``clusters`` see :func:`draws`.
    """
    member, counts = draws(clusters, seed=seed)
    sums = np.zeros((counts.shape[1], values.shape[1]))
    np.add.at(sums, member, values)
    sizes = np.bincount(member, minlength=counts.shape[1])
    low, high = _ends((counts @ sums) / (counts @ sizes)[:, None])
    return np.asarray(values.mean(axis=0)), low, high


def draws(clusters: Sequence[int], *, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the resamples of a bootstrap (Efron 1979) over clusters, with replacement.

    ``clusters`` has the table of each search, because searches on one table resemble each other. If
    all searches ran on one table, the searches themselves are drawn; the band then covers other
    seeds on this table, and not other tables.

    Returns the member that each search belongs to, shape (n_searches,), and how often each resample
    draws each member, shape (RESAMPLES, n_members). Raises ConfigError without any search.
    """
    if not len(clusters):
        message = "no search to sum up"
        raise ConfigError(message, hint="give at least one seed")
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    if not member.any():
        member = np.arange(len(clusters))
    members = int(member.max()) + 1
    rng = np.random.default_rng([seed, Stream.BOOTSTRAP])
    counts = rng.multinomial(members, np.full(members, 1.0 / members), size=RESAMPLES)
    return member, counts


def first_at(values: NDArray[np.float64], goal: float) -> float:
    """Return the position, from 1, of the first value of at least ``goal``; infinity if none."""
    reached = values >= goal
    return float(np.argmax(reached)) + 1.0 if reached.any() else math.inf


def at_costs(
    costs: NDArray[np.float64],
    values: NDArray[np.float64],
    grid: NDArray[np.float64],
    before: float,
) -> NDArray[np.float64]:
    """Return the value known after spending each cost of a grid, in the shape of ``grid``.

    ``values[k]`` is known from ``costs[k]`` on; ``costs`` never falls. ``before`` is the value
    before the first cost. At equal costs the last value counts.
    """
    place = np.searchsorted(costs, grid, side="right")
    return np.concatenate([[before], values])[place]


def _ends(drawn: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
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
    found: dict[str, Any] = {
        "searches": len(traces),
        "to_goal": {
            goal_key(share): {
                name: spread_json(spread(_to_goal(traces, columns, share), clusters))
                for name, columns in costs.items()
            }
            for share in goals(until)
        },
        "ended": _ended(traces, clusters),
    }
    if until is None:
        found["exact_after"] = _exact_after(traces) if whole else {}
        found["curves"] = _curves(traces, clusters, costs)
    if timed(traces[0].table):
        found["speedup"] = {
            str(count): spread_json(spread([_speedup(t, count) for t in traces], clusters))
            for count in gpus
        }
    return found


def timed(table: ScoreTable) -> bool:
    """Whether the table has durations."""
    return table.seconds is not None


def _costs(
    traces: Sequence[Trace], gpus: Sequence[int], *, whole: bool
) -> dict[str, list[NDArray[np.float64]]]:
    """Return, by the name of the cost, what each search had spent when each pull was told."""
    costs = {"evaluations": [trace.evaluations for trace in traces]}
    if whole:
        costs = {"pulls": [np.arange(1.0, len(t.arms) + 1.0) for t in traces], **costs}
    if timed(traces[0].table):
        costs["gpu_s"] = [trace.gpu_s for trace in traces]
        costs |= {f"wall_s_{count}": [t.wall_s(count) for t in traces] for count in gpus}
    return costs


def reached_at(trace: Trace, share: float) -> float:
    """Return the pull, from 1, after which the recommended arm always has this share of the best.

    It is infinity if there is no such pull. A policy that compares arms on few tasks may leave a
    good arm again.
    """
    lasting = np.minimum.accumulate(np.nan_to_num(trace.known, nan=-np.inf)[::-1])[::-1]
    return first_at(lasting, goal_of(trace.table, share))


def _to_goal(
    traces: Sequence[Trace], costs: Sequence[NDArray[np.float64]], share: float
) -> list[float]:
    """Return what each search spent to know an arm with this share of the best."""
    found = []
    for trace, spent in zip(traces, costs, strict=True):
        place = reached_at(trace, share)
        found.append(float(spent[int(place) - 1]) if math.isfinite(place) else math.inf)
    return found


def _ended(traces: Sequence[Trace], clusters: Sequence[int]) -> dict[str, Any]:
    """Summarise how the searches ended, with costs as shares of those of an exhaustive search."""
    last = [float(t.known[-1]) if len(t.known) else math.nan for t in traces]
    best = [float(t.table.means.max()) for t in traces]
    pairs = list(zip(traces, last, best, strict=True))
    found: dict[str, Any] = {
        "finished": float(np.mean([trace.finished for trace in traces])),
        "exact": float(np.mean([value >= goal_of(trace.table, 1.0) for trace, value, _ in pairs])),
        "regret": float(np.mean([top - np.nan_to_num(value) for _, value, top in pairs])),
        "evaluations": spread_json(
            spread([_last(t.evaluations) / t.table.evaluations for t in traces], clusters)
        ),
    }
    if timed(traces[0].table):
        shares = [
            _last(t.gpu_s) / float(t.table.seconds.sum())
            for t in traces
            if t.table.seconds is not None
        ]
        found["gpu_s"] = spread_json(spread(shares, clusters))
    return found


def _last(values: NDArray[np.float64]) -> float:
    return float(values[-1]) if len(values) else 0.0


def _exact_after(traces: Sequence[Trace]) -> dict[str, float]:
    """Return the share of searches that know the best arm after each of ``EXACT_AFTER`` pulls.

    Numbers of pulls that no search made are left out.
    """
    found = {}
    longest = max(len(trace.arms) for trace in traces)
    for pulls in EXACT_AFTER:
        if pulls <= longest:
            hits = [np.any(t.known[:pulls] >= goal_of(t.table, 1.0)) for t in traces]
            found[str(pulls)] = float(np.mean(hits))
    return found


def _curves(
    traces: Sequence[Trace],
    clusters: Sequence[int],
    costs: dict[str, list[NDArray[np.float64]]],
) -> dict[str, Any]:
    """Return mean simple regret over each cost, with its band, and cumulative regret over pulls.

    Before a search knows an arm, its regret is the mean regret of a random arm.
    """
    curves: dict[str, Any] = {}
    for name, columns in costs.items():
        end = max(_last(spent) for spent in columns)
        grid = np.arange(1.0, end + 1.0)
        if name != "pulls":
            grid = np.geomspace(end / 1000.0, end, GRID)
        rows = np.array([_regret(t, spent, grid) for t, spent in zip(traces, columns, strict=True)])
        mean, low, high = mean_band(rows, clusters)
        curves[name] = {
            "x": grid.tolist(),
            "simple": mean.tolist(),
            "low": low.tolist(),
            "high": high.tolist(),
        }
        if name == "pulls":
            curves[name]["cumulative"] = _cumulative(traces, len(grid)).tolist()
    return curves


def _regret(
    trace: Trace, spent: NDArray[np.float64], grid: NDArray[np.float64]
) -> NDArray[np.float64]:
    top = float(trace.table.means.max())
    guess = top - float(trace.table.means.mean())
    known = np.where(np.isnan(trace.known), top - guess, trace.known)
    return at_costs(spent, top - known, grid, guess)


def _cumulative(traces: Sequence[Trace], length: int) -> NDArray[np.float64]:
    """Return the mean over searches of the summed regrets of pulled arms; ended searches add 0."""
    rows = np.zeros((len(traces), length))
    for row, trace in zip(rows, traces, strict=True):
        pulled = trace.table.means[list(trace.arms)]
        row[: len(pulled)] = float(trace.table.means.max()) - pulled
    return np.asarray(np.cumsum(rows.mean(axis=0)))


def _speedup(trace: Trace, gpus: int) -> float:
    """Return the speedup of the same pulls over one GPU."""
    return _last(trace.gpu_s) / max(_last(trace.wall_s(gpus)), 1e-300)


def spread_json(found: Spread) -> dict[str, float | None]:
    """Convert a spread to JSON, with None for infinity: too few searches reached the goal."""
    return {
        name: number if math.isfinite(number) else None for name, number in found._asdict().items()
    }
