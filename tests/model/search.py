"""Breadth first through all states of a model, checking each; and mistakes that it must find."""

from __future__ import annotations
import __future__

import inspect
import textwrap
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

from tests.model.checks import Checker
from tests.model.machine import Model
from tests.model.memorydisk import memory_instead_of_files

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from tests.model.values import Config


@dataclass(frozen=True)
class Found:
    """What a search saw."""

    states: int
    steps: int
    leaves: int
    complete: int
    """Leaves in which every item is finished and the stage is sealed."""
    seconds: float

    def check(self, least: int) -> None:
        """Print what it saw, which cannot be next to nothing."""
        print(
            f"{self.states} states, {self.steps} steps, {self.leaves} ends, "
            f"{self.complete} of them complete, {self.seconds:.1f} s"
        )
        assert self.complete > 0
        assert self.states > least


class ViolationError(AssertionError):
    """An invariant does not hold; says after which steps."""


def search(config: Config, *, limit: int = 10_000_000) -> Found:
    """Visit every state of workers and people, as :func:`explore` does."""
    with memory_instead_of_files():
        model = Model(config)
        return explore(model, Checker(model), limit=limit)


def explore(model: Any, checker: Any, *, limit: int = 10_000_000) -> Found:
    """Visit every state of a model, from ``initial`` by its ``steps``: (what happens, state after).

    The checker's ``state``, ``step`` and ``leaf`` fail where something does not hold; a leaf is a
    state in which nothing can happen any more, and tells whether all was complete there.

    Raises ViolationError: with the shortest way to the state that violates something.
    """
    began = time.monotonic()
    start = model.initial()
    parents: dict[Any, tuple[Any, str] | None] = {start: None}
    steps = leaves = complete = 0
    todo = deque([start])
    while todo:
        state = todo.popleft()
        what = "?"
        try:
            what = "in the state"
            checker.state(state)
            stuck = True
            for what, after in model.steps(state):
                steps += 1
                stuck = False
                if after not in parents:
                    parents[after] = (state, what)
                    todo.append(after)
                checker.step(state, after)
            what = "at the end"
            if stuck:
                leaves += 1
                complete += checker.leaf(state)
        except AssertionError as error:
            message = f"{error}\n{_way(parents, state)}\n  {what}"
            raise ViolationError(message) from error
        assert len(parents) <= limit, f"more than {limit} states"
    return Found(len(parents), steps, leaves, complete, time.monotonic() - began)


def _way(parents: dict[Any, tuple[Any, str] | None], state: Any) -> str:
    way = []
    at: Any = state
    while at is not None and (step := parents[at]) is not None:
        at, what = step
        way.append(f"  {what}")
    return "\n".join(reversed(way))


@dataclass(frozen=True)
class Mistake:
    """One changed line of one function, and how the search finds it."""

    what: str
    """What somebody might have written."""
    says: str
    """Pattern of the violation."""
    world: Any
    """A small one in which it shows."""
    owner: Any
    """The class or module that has the function."""
    old: str
    """Text that one function of the owner has."""
    new: str


def _cases(cases: Mapping[str, Any], late: Container[str]) -> list[Any]:
    """Cases of a test by their names; the late ones only for 'make soak'."""
    marks = [pytest.mark.soak, pytest.mark.timeout(1200)]
    return [pytest.param(one, id=name, marks=marks * (name in late)) for name, one in cases.items()]


def worlds(cases: Mapping[str, Any], late: Container[str]) -> pytest.MarkDecorator:
    """A test of each ``world``."""
    return pytest.mark.parametrize("world", _cases(cases, late))


def mistakes(cases: list[Mistake], late: Container[str] = ()) -> pytest.MarkDecorator:
    """A test of each ``mistake``."""
    return pytest.mark.parametrize("mistake", _cases({one.what: one for one in cases}, late))


def _functions(owner: Any) -> Iterator[tuple[str, Any, FunctionType]]:
    for name, found in vars(owner).items():
        function = found.fget if isinstance(found, property) else found
        function = getattr(function, "__func__", function)
        # What a dataclass makes has no source.
        if isinstance(function, FunctionType) and not name.startswith("__"):
            yield name, found, function


@contextmanager
def made(mistake: Mistake) -> Iterator[None]:
    """Have the function with its mistake, which a search in the block finds."""
    sources = [
        (name, found, function, textwrap.dedent(inspect.getsource(function)))
        for name, found, function in _functions(mistake.owner)
    ]
    places = [place for place in sources if place[3].count(mistake.old) == 1]
    assert len(places) == 1, f"cannot be made: {len(places)} functions have {mistake.old!r}"
    name, found, function, source = places[0]
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(mistake.old, mistake.new), "mistake", "exec", flags)
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    changed = namespace[function.__name__]
    if isinstance(found, staticmethod):
        changed = staticmethod(changed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mistake.owner, name, changed)
        with pytest.raises(ViolationError, match=mistake.says):
            yield
