"""Runs a function once for every way in which its free choices can fall."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


class Choices:
    """One run's choices; also a random generator for code that asks one."""

    def __init__(self, plan: list[int]) -> None:
        self._plan = plan
        self.made: list[tuple[int, int]] = []
        """(choice, how many there were)."""

    def of(self, count: int) -> int:
        """A number below ``count``."""
        if count == 1:
            return 0
        at = len(self.made)
        choice = self._plan[at] if at < len(self._plan) else 0
        self.made.append((choice, count))
        return choice

    randrange = of

    def choice(self, options: list[T]) -> T:
        return options[self.of(len(options))]

    def shuffle(self, options: list[Any]) -> None:
        for at in range(len(options) - 1):
            other = at + self.of(len(options) - at)
            options[at], options[other] = options[other], options[at]


def every(run: Callable[[Choices], T]) -> Iterator[T]:
    """The results of ``run`` for all choices."""
    plan: list[int] = []
    while True:
        choices = Choices(plan)
        yield run(choices)
        made = choices.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return
        plan = [choice for choice, _ in made]
        plan[-1] += 1
