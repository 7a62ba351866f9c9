"""Which items of a unit an executor is asked to run, and what it must know about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.control import OUT_OF_MEMORY
from hpc_toolkit.queue.state import is_killer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.queue.assignment import Assignment
    from hpc_toolkit.worker.membership import Drain
    from hpc_toolkit.worker.unitlines import UnitLines


def order_for(
    assignment: Assignment, lines: UnitLines, poll: Callable[[], None], holds: Callable[[int], bool]
) -> list[int]:
    """Journal what deaths say about items; return the pending ones in the order of the unit run.

    ``poll`` reads the worker's own journal; ``holds``: whether it has what a growth needs.
    """
    state, unit = assignment.stage.state, assignment.unit.name
    order = state.running_order(unit)
    died = assignment.died[1].evidence if assignment.died is not None else ""
    if order and ran_out(assignment, died):
        lines.out_of_memory(order.pop(0), f"worker died: {died}", 0.0)
    elif order and assignment.died is not None:
        lines.owner_died(order)
        poll()
        order = state.running_order(unit)
    suspects = state.suspects(unit)
    for item in [i for i in order if i in suspects and is_killer(suspects[i])]:
        lines.killer(item, len(suspects[item]), suspects[item][-1])
        order.remove(item)
    if assignment.stage.spec.retry:
        order = [i for i in order if holds(state.growth(state.units[unit], i))]
    return order


def is_last_attempt(assignment: Assignment, order: list[int]) -> bool:
    """Whether an item that failed before has one attempt left."""
    state, unit = assignment.stage.state, assignment.unit
    known, floor = state.units[unit.name].histories, state.floor
    spent = (known[item].attempts(floor(unit.entry, item)) for item in order if item in known)
    return any(0 < one == state.max_attempts - 1 for one in spent)


def request_for(
    assignment: Assignment, left: list[int], values: Path, drain: Drain
) -> dict[str, Any]:
    """What the executor needs to know to run the items ``left``, besides the items."""
    stage, durations = assignment.stage, assignment.stage.durations
    expected_s = durations.seconds_of(stage.group_of(assignment.unit)) if durations.known else 0.0
    return {
        "stage": stage.paths.name,
        "unit": assignment.unit.name,
        "generation": assignment.generation,
        "positions": left,
        "values": str(values),
        "deadline": drain.deadline,
        "no_retry": stage.spec.final,
        "expected_s": expected_s,
    }


def fragile_of(assignment: Assignment, left: list[int]) -> set[int]:
    """Items that a process does not run after a failure, which it may have caused.

    A CUDA error or a leak would use up all attempts of an item in one process.
    """
    state, entry = assignment.stage.state, assignment.unit.entry
    if state.max_attempts == 1:
        return set(left)
    known = state.units[assignment.unit.name].histories
    return {i for i in left if i in known and known[i].last_failure(state.floor(entry, i))}


def ran_out(assignment: Assignment, how: str) -> bool:
    """Whether a death shows that an item ran out of memory, and that it gets more (rule R18)."""
    retry = assignment.stage.specs.retry(assignment.unit)
    return retry is not None and retry.on == "oom" and how.endswith(OUT_OF_MEMORY)


def limits_of(assignment: Assignment, left: list[int]) -> dict[str, Any]:
    """What a stream knows of the items that get more when they run out of it (rule R18)."""
    stage, retry = assignment.stage, assignment.stage.specs.retry(assignment.unit)
    found: dict[str, Any] = {"limit_s": stage.spec.timeout_s}
    if retry is not None:
        unit = stage.state.units[assignment.unit.name]
        growths = {item: stage.state.growth(unit, item) for item in left}
        found["growing"] = {i: retry.on for i, number in growths.items() if number < retry.steps}
        if retry.on == "timeout":
            found["limits"] = {i: retry.amount(number) for i, number in growths.items()}
    return found
