"""Make a complete plan: forecasts for several numbers of nodes and for the partitions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_toolkit.errors import RunError
from hpc_toolkit.planning.choices import choose, ways
from hpc_toolkit.planning.forecast import DRAWS, Forecaster
from hpc_toolkit.planning.page import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.planning.lengths import Guess
    from hpc_toolkit.planning.nodes import Node
    from hpc_toolkit.planning.work import Work
    from hpc_toolkit.slurm.clusters.facts import Cluster


def make_plan(
    work: Work,
    guess: Guess | None,
    nodes: Sequence[int],
    cluster: Cluster,
    node: Node,
    *,
    within_s: float | None = None,
    limit_s: int | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Plan:
    """Plan the rest of a run for several numbers of nodes.

    Args:
        work: what is left of the run.
        guess: the user's guess, for stages of which no item has ended.
        nodes: the numbers of nodes, each with its own forecast.
        cluster: the cluster whose partitions are compared; its longest job is the default limit.
        node: one node of the cluster.
        within_s: seconds within which the work should be done.
        limit_s: time limit of one job in seconds.
        draws: number of draws of each forecast.
        seed: seed of all random numbers.

    Raises:
        RunError: no items are left.
        ConfigError: nothing is known about how long items take.
    """
    if not work.left:
        message = f"{work.run}: every item has a result" if work.done else "there are no items yet"
        hint = "'hpctk plan RUN --check FILE.json' compares a plan that was kept with what came"
        raise RunError(message, hint=hint)
    work, assumed = _known(work, guess)
    forecaster = Forecaster(work, guess, draws=draws, seed=seed)
    limit_s = limit_s or cluster.max_walltime_s
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
        now=forecaster.forecast(None, within_s=within_s) if work.workers else None,
        choices=[
            choose(forecaster, node, count, limit_s=limit_s, within_s=within_s) for count in nodes
        ],
        ways=ways(forecaster, cluster, node, max(nodes)) if nodes else [],
        within_s=within_s,
    )


def _known(work: Work, guess: Guess | None) -> tuple[Work, list[str]]:
    """Drop stages of which no item was asked for and no duration is known.

    Return the rest of the work and the plan's assumptions, which name the dropped stages.
    """
    known = [one for one in work.stages if guess or one.seen or len(one.left) > one.coming]
    if len(known) in (0, len(work.stages)):
        return work, list(work.assumed)
    without = [stage.name for stage in work.stages if stage not in known]
    said = f"Left out, as nothing is known of how long their items take: {', '.join(without)}."
    return replace(work, stages=tuple(known), most_workers=None), [said]
