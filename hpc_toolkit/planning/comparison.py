"""Compare a saved plan with the actual progress of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.reading import read_course

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.system.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The prediction of a plan and the actual progress."""

    workers_predicted: int
    workers: int
    """Number of workers that ended an attempt since the plan."""
    low_s: float
    predicted_s: float
    high_s: float
    real_s: float
    """Seconds from the plan to the last attempt that ended, or to now while the run goes on."""
    complete: bool
    left: int
    """Items without a result now."""
    error: float | None
    """Predicted minus real time, as a share of the real time; None while the run goes on."""
    inside: bool | None
    """Whether the real time is within the interval; None while it still may be."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def compare(view: RunView, clock: Clock, plan: dict[str, Any]) -> Comparison:
    """Compare a plan of this run with the actual progress.

    The forecast is the plan's forecast for the workers that were running then, else the one whose
    number of workers is nearest to the number that worked since. Times are by workers' clocks.

    Raises:
        ConfigError: the plan was made from typed numbers, or has no forecast.
    """
    if not plan.get("run"):
        message = "the plan is of typed numbers, and of no run"
        raise ConfigError(message, hint="make one with 'hpctk plan RUN -o FILE.json'")
    course = read_course(view, plan["at"])
    forecast = _forecast(plan, course.workers)
    end = course.last_at if view.complete else clock.wall()
    real_s = max(0.0, end - plan["at"])
    time = forecast["time_s"]
    error, inside = None, None
    if view.complete:
        error = (time["median"] - real_s) / real_s if real_s > 0 else 0.0
        inside = time["low"] <= real_s <= time["high"]
    elif real_s > time["high"]:
        inside = False
    return Comparison(
        workers_predicted=forecast["workers"],
        workers=course.workers,
        low_s=time["low"],
        predicted_s=time["median"],
        high_s=time["high"],
        real_s=real_s,
        complete=view.complete,
        left=course.left,
        error=error,
        inside=inside,
    )


def _forecast(plan: dict[str, Any], workers: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = [choice["forecast"] for choice in plan["choices"]]
    if plan.get("now"):
        return dict(plan["now"])
    if not found:
        message = "the plan has no forecast"
        raise ConfigError(message, hint="make one with --nodes 1,2,4")
    return min(found, key=lambda one: abs(one["workers"] - workers))
