"""The values of the model: what a state is, what may happen in a configuration, and choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hpc_toolkit.queue.units import parse_claim
from tests.model.memorydisk import ROOT, Content

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_toolkit.queue.leases import Verdict

T = TypeVar("T")
Claim = tuple[str, int, str]
"""(unit, generation, owner)."""
TORN = b'{"type":"done","unit":"items/000001-0","gen'
STAGE = f"{ROOT}/stages/items"


class Sees(NamedTuple):
    """How far one process has read."""

    log: int
    claims: frozenset[Claim]
    journals: tuple[int, ...]
    """Bytes of each worker's journal."""
    control: int
    told: int = 0
    """Of which log length ``head`` says that nothing is pending; 0 for none."""
    old: int = -1
    """What ``head`` said when this process began; -1 before it looked."""


class Take(NamedTuple):
    """A generation that a worker holds."""

    unit: str
    generation: int
    died: tuple[str, Verdict] | None


class Actor(NamedTuple):
    """One worker, or one person's commands."""

    phase: str
    """``idle``, ``pass``, ``again``, ``gone`` or ``dead``."""
    sees: Sees
    take: Take | None = None
    begun: Sees | None = None
    """What it saw when the pass began; None before."""
    script: tuple[str, ...] = ()
    """What happened in the pass so far."""
    positions: tuple[int, ...] = ()
    """What the executor was asked to run."""
    at: int = 0
    """The next of a person's commands."""
    code: int | None = None
    """How it left."""


class State(NamedTuple):
    """Everything."""

    log: tuple[str, ...]
    payloads: frozenset[tuple[str, bytes]]
    claims: frozenset[Claim]
    journals: tuple[bytes, ...]
    presence: tuple[str, ...]
    control: tuple[tuple[str, bytes], ...]
    actors: tuple[Actor, ...]
    told: int
    """Of which log length ``head`` says that nothing is pending; 0 for none."""
    left: tuple[int, ...]
    """How much evil may still happen, in the order of :data:`EVILS`."""


EVILS = ("crash", "false", "die", "lost", "error", "abort")
"""A worker is killed; one that lives is held for dead; an executor dies; a reply is lost; an item
fails; the grace of a drain is over."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One small world."""

    units: tuple[int, ...] = (1,)
    """Items of each unit of the first segment, all of one size but the last."""
    workers: int = 2
    people: tuple[tuple[str, ...], ...] = ()
    """Commands of each person: add, seal, gather, retry, drain-<worker number>; and slurm,
    Slurm's word that all ended, once somebody died; rumour, that word at any time."""
    sealed: bool = True
    max_attempts: int = 2
    kinds: tuple[str, ...] = ("done",)
    """How items end; all but ``done`` cost an ``error``. ``short``: they run out of memory."""
    steps: int = 0
    """How often an item that ran out of memory gets more; all workers have it."""
    evils: dict[str, int] = field(default_factory=dict)
    stale: frozenset[str] = frozenset({"log", "claims", "journals", "control", "head"})
    """What may be read as it was."""
    shared: bool = False
    """Whether workers spare the filesystem, as on one that other machines share."""
    deaths_by: str = "lease"
    """How a death is seen: by silence for the ``lease``; at once by a ``lock``, as all workers are
    on one host; or by what ``slurm`` said. A silence of who lives is seen in every world."""
    explained: str = "node failure"
    """How ``slurm`` explains a death."""
    torn: bool = True
    """Whether a crash may leave half a line."""


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    """The values, with another one in one place."""
    return (*values[:at], value, *values[at + 1 :])


def spend(left: tuple[int, ...], at: int, number: int = 1) -> tuple[int, ...]:
    """What is left of the evils; less than 0 if there was not so much of this one."""
    return put(left, at, left[at] - number)


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


def pay(state: Any, evils: tuple[str, ...], evil: str) -> Any:
    """A state in which an evil happened, if there is one; None if there is not so much left."""
    left = spend(state.left, evils.index(evil)) if evil else state.left
    return state._replace(left=left) if min(left) >= 0 else None


def replies(choices: Choices, left: int, lost: list[str]) -> Callable[[str], str]:
    """What becomes of the replies to calls that create a name, of which so many may be lost."""

    def reply(call: str) -> str:
        if left <= len(lost):
            return ""
        ways = ["", "repeated", "lost", "hidden", *(["refused"] if call == "link" else [])]
        how = choices.choice(ways)
        lost.extend([how] if how else [])
        return how

    return reply


def payloads_in(world: dict[str, Content]) -> Iterator[tuple[str, bytes]]:
    for path, data in world.items():
        name = path.removeprefix(f"{STAGE}/")
        if name.startswith(("items/", "retries/", "results/")):
            assert isinstance(data, bytes)
            yield name, data


def claims_in(files: dict[str, Content]) -> frozenset[Claim]:
    found = set()
    for path, owner in files.items():
        if path.startswith(f"{STAGE}/claims/"):
            parsed = parse_claim(path.rpartition("/")[2])
            assert parsed is not None
            found.add((*parsed, str(owner)))
    return frozenset(found)
