"""Real functions with one mistake in them, in this process and for a while."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

from tests.model.search import ViolationError

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping


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
