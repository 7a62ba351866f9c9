"""What in a run cost the most time, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.results import activity as states
from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.results.activity import Activity
    from hpc_toolkit.results.loads import Loads

_LEAST_S = 60.0
"""Worker time below which shares say little."""
_ADVICE = {
    states.LOAD: (
        0.15,
        (
            "give each claim more items (--items-per-claim), or group them by the model"
            " that they load (--group-by)"
        ),
    ),
    states.WAIT: (
        0.15,
        (
            "the workers had too little to claim, or their jobs started slowly; in a"
            " campaign, raise 'pending'"
        ),
    ),
    states.TAIL: (0.10, "put the longest items first, make claims smaller, or use fewer workers"),
    states.FAILED: (0.05, "see the failures below; 'hpctk try --item N' runs one item here"),
    states.DUPLICATE: (
        0.01,
        (
            "workers were taken for dead while they lived, for example because"
            " their filesystem hung: see the deaths below"
        ),
    ),
}
"""From which share of the worker time on a state is worth a word, and which."""
_BUSY_PERCENT = 50.0
_LONG = 5.0


def findings(found: Activity | None, loads: Loads | None) -> list[str]:
    """Sentences with numbers, the costliest first."""
    if found is None or found.lives_s < _LEAST_S:
        return []
    return [*_lost(found), *_longest(found), *_idle_gpus(loads)]


def _lost(found: Activity) -> Iterator[str]:
    shares = {state: found.seconds[state] / found.lives_s for state in _ADVICE}
    for state in sorted(shares, key=lambda one: -shares[one]):
        least, advice = _ADVICE[state]
        if shares[state] >= least:
            spent = format_duration(found.seconds[state])
            yield f"{shares[state]:.0%} of the worker time ({spent}) went into '{state}': {advice}."


def _longest(found: Activity) -> Iterator[str]:
    """An item that is long for its group delays the end, because one worker runs it alone."""
    if not found.longest or not found.seconds[states.TAIL]:
        return
    one = found.longest[0]
    group = found.groups.of(one.stage, one.group)
    spent, median = one.seconds or 0.0, group.quantile(0.5) if group is not None else 0.0
    span_s = found.timeline.end - found.timeline.begin
    if median and spent > _LONG * median and spent > 0.1 * span_s:
        times = f"{spent / median:.0f} times the median of its group"
        yield f"Item {one.item} alone took {format_duration(spent)}, {times}."


def _idle_gpus(loads: Loads | None) -> Iterator[str]:
    hosts = loads.hosts.values() if loads is not None else ()
    values = sum(host.gpu_values for host in hosts)
    if values:
        busy = sum(host.gpu for host in hosts) / values
        if busy < _BUSY_PERCENT:
            advice = "larger batches, or several workers on a GPU (--gpus-per-worker 0.5), may help"
            yield f"The GPUs were busy for {busy:.0f}% of the sampled time: {advice}."
