"""Random numbers of executors that are forked after an import: each has its own, unless seeded."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from hpc_toolkit.worker.code import is_installed

_LARGEST_GIVEN = (1 << 32) - 1
"""torch does not tell who chose its seed: those of the system have 53 or 64 bits."""


def is_users() -> bool:
    """Whether the import of a user's module, and not that of a library, called the caller."""
    frame: Any = sys._getframe(2)
    if frame.f_globals.get("__name__") == "logging":  # each record has the process id
        return False
    while frame.f_back and not frame.f_back.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return not is_installed(frame.f_code.co_filename)


class Numbers:
    """What imports do to the random numbers of Python, numpy and torch."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        """What the user's code has called that has other results in another process."""
        self._pythons: dict[int, tuple[random.Random, bool]] = {}
        """Generators of Python, and whether the user gave a seed or a state."""
        self._state: Any = None
        """State of the functions of ``random``, if the user gave it or a seed."""
        self._numpys: list[Any] = []
        """Generators of numpy whose seed came from the system."""
        self._drawn: dict[int, bool] = {}
        """Seeds that came from the system, and whether the user's code asked for them."""
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        seed, setstate = self._noting(random.Random.seed), self._noting(random.Random.setstate)
        common = vars(random)["_inst"]
        for place, name, function in (
            (random.Random, "seed", seed),
            (random.Random, "setstate", setstate),
            (random, "seed", partial(seed, common)),
            (random, "setstate", partial(setstate, common)),
            (random, "_urandom", self._draws(vars(random)["_urandom"])),
            (os, "urandom", self._naming("os.urandom", os.urandom)),
            (os, "getpid", self._naming("os.getpid", os.getpid)),
        ):
            self._replaced.append((place, name, vars(place)[name]))
            setattr(place, name, function)

    def __exit__(self, *_: object) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())
        common = vars(random)["_inst"]
        if id(common) in self._pythons:
            self._state = random.getstate() if self._pythons.pop(id(common))[1] else None
        numpy = sys.modules.get("numpy.random")
        found = [] if numpy is None else gc.get_objects()
        found = [one for one in found if issubclass(type(one), vars(numpy)["BitGenerator"])]
        # Numbers that numpy.random.seed() has seeded have no seed sequence.
        seeds = {id(one): getattr(one.seed_seq, "entropy", None) for one in found}
        self._numpys += [one for one in found if seeds[id(one)] in self._drawn]
        if any(self._drawn[one] for one in self._drawn.keys() - {*seeds.values()}):
            self.asked.add("os.urandom")

    def renew(self) -> None:
        """Seed the generators of this forked process anew; Python has seeded its functions."""
        if self._state is not None:
            random.setstate(self._state)
        for one, seeded in self._pythons.values():
            if not seeded:
                one.seed()
        for generator in self._numpys:
            generator.__init__()
        torch = getattr(sys.modules.get("torch"), "default_generator", None)
        if torch is not None and torch.initial_seed() > _LARGEST_GIVEN:
            torch.seed()

    def _noting(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(one: random.Random, a: Any = None, *others: Any, **named: Any) -> None:
            a = named.pop("a", a)
            self._pythons[id(one)] = one, a is not None
            real(one, a, *others, **named)

        return call

    def _draws(self, real: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def call(size: int) -> bytes:
            found = real(size)
            self._drawn[int.from_bytes(found, "big")] = is_users()
            return found

        return call

    def _naming(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            # Code that imported this function keeps it after the import.
            if self._replaced and is_users():
                self.asked.add(name)
            return real(*given)

        return call
