"""Make a complete plan, keep it in a file, and compare it with what came."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.planning.choices import choose, ways
from hpc_toolkit.planning.forecast import DRAWS, Forecaster, Interval
from hpc_toolkit.planning.reading import work_since
from hpc_toolkit.planning.work import joined

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpc_toolkit.planning.choices import Choice, Node, Way
    from hpc_toolkit.planning.forecast import Forecast
    from hpc_toolkit.planning.work import Guess, Work
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.system.clock import Clock


FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that ``hpctk plan`` reports.

    Fields have the meaning of those of the same name in Work, Forecaster and StageWork.
    """

    run: str
    at: float
    items: int
    """Items without a result."""
    done: int
    sealed: bool
    seen: int
    """Ended items from which durations were learned."""
    retried: int
    keys: list[str]
    guessed: list[str]
    item_s: Interval
    load_s: float
    longest_s: float
    largest_s: float
    useful_workers: int
    ungrouped: bool
    """Whether a stage has no groups."""
    node: Node
    cluster: str
    now: Forecast | None
    """Forecast for the workers that are running now; None without any."""
    choices: list[Choice]
    ways: list[Way]
    within_s: float | None
    coming: int
    most_workers: int | None
    assumed: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Kept:
    run: str
    at: float
    """When the plan was made: epoch seconds."""
    forecasts: tuple[tuple[int, Interval], ...]
    """Numbers of workers, and the seconds until the last result.

    If workers were running, it is the forecast for them alone.
    """
    working: bool
    """Whether workers were running."""


def read_plan(path: Path) -> Kept:
    """Read a plan that was written to a file as JSON.

    Raises ConfigError: the file cannot be read, or is not a plan.
    """
    hint = "name a file written by 'hpctk plan RUN -o FILE.json'"
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(found["format"])
        now = found.get("now")
        forecasts = [now] if now else [one["forecast"] for one in found["choices"]]
        return Kept(
            run=str(found["run"]),
            at=float(found["at"]),
            forecasts=tuple(
                (int(one["workers"]), Interval(**{k: float(s) for k, s in one["time_s"].items()}))
                for one in forecasts
            ),
            working=bool(now),
        )
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise ConfigError(message, hint=hint) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = f"{path}: not a plan of format {FORMAT}"
        raise ConfigError(message, hint=hint) from error


def make_plan(
    work: Work,
    guess: Guess | None,
    nodes: Sequence[int],
    cluster: Cluster,
    node: Node,
    *,
    within_s: float | None = None,
    limit_s: int | None = None,
    now_s: Interval | None = None,
    draws: int = DRAWS,
) -> Plan:
    """Plan the rest of a run for several numbers of nodes, each with its own forecast.

    The guess is for stages of which no item has ended. The partitions of the cluster are compared,
    and its longest job is the default of ``limit_s``, the time limit of one job. ``now_s`` is the
    time left on the living workers, as a status shows it; None: forecast it here. Raises RunError
    if no items are left, and ConfigError if nothing is known about how long items take.
    """
    if not work.left:
        message = f"{work.run}: every item has a result" if work.done else "there are no items yet"
        hint = "'hpctk plan RUN --check FILE.json' compares a saved plan with what happened"
        raise RunError(message, hint=hint)
    whole = work.left
    work, assumed = _known(work, guess)
    most = max([*(count * node.workers for count in nodes), len(work.workers)], default=1)
    forecaster = Forecaster(joined(work, most), guess, draws=draws)
    limit_s = limit_s or cluster.max_walltime_s
    # A status gives no time either while stages are left out.
    is_known = bool(work.workers) and work.left == whole
    now = forecaster.forecast(None, within_s=within_s) if is_known else None
    if now is not None and now_s is not None:
        now = replace(now, time_s=now_s)
    return Plan(
        run=work.run,
        at=work.at,
        items=work.left,
        done=work.done,
        sealed=work.sealed,
        seen=sum(len(stage.seen) for stage in work.stages),
        retried=sum(stage.retried for stage in work.stages),
        keys=forecaster.keys,
        guessed=forecaster.guessed,
        item_s=forecaster.item_s,
        load_s=forecaster.load_s,
        longest_s=forecaster.longest_s,
        largest_s=forecaster.largest_s,
        useful_workers=forecaster.useful_workers,
        ungrouped=any(stage.group_by is None for stage in work.stages),
        node=node,
        cluster=cluster.name,
        assumed=assumed,
        most_workers=work.most_workers,
        coming=work.coming,
        now=now,
        choices=[
            choose(forecaster, node, count, limit_s=limit_s, within_s=within_s) for count in nodes
        ],
        ways=ways(forecaster, cluster, node, max(nodes)) if nodes else [],
        within_s=within_s,
    )


def _known(work: Work, guess: Guess | None) -> tuple[Work, list[str]]:
    """Drop stages of which no item was requested and no duration is known.

    Return the rest of the work and the plan's assumptions, which name the dropped stages.
    """
    known = [one for one in work.stages if guess or one.seen or len(one.left) > one.coming]
    if len(known) in (0, len(work.stages)):
        return work, list(work.assumed)
    without = [stage.name for stage in work.stages if stage not in known]
    said = f"Left out, as nothing is known of how long their items take: {', '.join(without)}."
    return replace(work, stages=tuple(known)), [said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    workers_predicted: int
    workers: int
    """Number of workers that ended an attempt since the plan."""
    low_s: float
    predicted_s: float
    high_s: float
    real_s: float
    """Seconds of work until the last attempt that ended, or until now while the run goes on.

    They count from the plan if workers were running then, else from the first claim after it.
    """
    waited_s: float
    """Seconds from the plan to the first claim, for example in Slurm's queue."""
    complete: bool
    left: int
    error: float | None
    """Predicted minus real time, as a share of the real time; None while the run goes on."""
    inside: bool | None
    """Whether the real time is within the interval; None while it still may be."""


def compare(view: RunView, clock: Clock, plan: Kept) -> Comparison:
    """Compare a plan of this run with the actual progress.

    Of the plan's forecasts it takes the one whose number of workers is nearest to the number that
    worked since. Times are corrected for the clocks of hosts. Raises ConfigError: the plan was made
    from typed numbers, or has no forecast.
    """
    if not plan.run or not plan.forecasts:
        message = "the plan was made without a run, or has no forecast"
        raise ConfigError(message, hint="create one with 'hpctk plan RUN -o FILE.json'")
    ends, began = work_since(view, clock, plan.at)
    if plan.working:
        began = plan.at
    workers = sum(end > plan.at for end in ends)
    predicted, time = min(plan.forecasts, key=lambda one: abs(one[0] - workers))
    end = max(ends, default=0.0) if view.complete else clock.wall()
    real_s = 0.0 if began is None else max(0.0, end - began)
    error, inside = None, None
    if view.complete:
        error = (time.median - real_s) / real_s if real_s > 0 else 0.0
        inside = time.low <= real_s <= time.high
    elif real_s > time.high:
        inside = False
    return Comparison(
        workers_predicted=predicted,
        workers=workers,
        low_s=time.low,
        predicted_s=time.median,
        high_s=time.high,
        real_s=real_s,
        waited_s=max(0.0, (clock.wall() if began is None else began) - plan.at),
        complete=view.complete,
        left=sum(
            len(stage.state.pending(unit))
            for stage in view.stages.values()
            for unit in stage.state.open
        ),
        error=error,
        inside=inside,
    )
