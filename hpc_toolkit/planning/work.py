"""The items left of a run and the durations of the finished ones, as plain values."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.queue.items import Item

SURE = 0.95
"""Probability with which a recommended time limit or number of nodes must be enough."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One item that has a result, and how long it took."""

    item: Item
    group: str
    """Key of its group; "" without groups."""
    seconds: float
    worker: str = ""
    load: int = 0
    """Number of contexts that its worker had loaded by then."""
    place: int = 0
    """Its place in the list of the stage."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that one worker runs in a row: the rest of a unit."""

    group: str
    """Key of the first item's group; "" without groups."""
    first: int
    """Index of its first item in :attr:`StageWork.left`; the others follow."""
    count: int
    loads: int = 1
    """Number of groups to load."""
    holder: str = ""
    """The living worker that holds it now; "" if it waits."""
    age_s: float = 0.0
    """Seconds that the holder has spent on its first item, at least."""
    loading: bool = False
    """Whether these seconds may have gone into loading the group."""
    place: int = 0
    """Place of the first item in the list of the stage; the others follow, nearly without gaps."""
    round: int = 0
    """The round of a search in which it will come, from 1; 0: the search has requested it."""

    @property
    def is_running(self) -> bool:
        """Whether its holder is known to have spent time on its first item."""
        return bool(self.holder) and not self.loading and self.age_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One stage: the items left, and the finished items."""

    name: str
    group_by: str | None = None
    """The key of an item that names its group."""
    kind_by: str = ""
    """The key that names the task of an item of a search; "" in a list."""
    left: tuple[Item, ...]
    """Items without a result."""
    batches: tuple[Batch, ...]
    """The items left, in the order of the queue."""
    coming: int = 0
    """How many of these items, the last ones, a campaign has not requested yet."""
    most_workers: int | None = None
    """The most workers that a search keeps busy; None: not limited."""
    between_s: float = 0.0
    """Seconds from the last result of a round to the first item of the next one."""
    seen: tuple[Seen, ...] = ()
    loads_s: tuple[float, ...] = ()
    """Times that workers spent in unit runs besides their items, to load a group."""
    overheads_s: tuple[float, ...] = ()
    """For each unit run that loaded nothing, its seconds besides its items."""
    attempts: int = 0
    """Number of ended attempts, successful or not."""
    retried: int = 0
    """Number of these attempts that failed and can be repeated."""

    def group_of(self, item: Item) -> str:
        from hpc_toolkit.queue.affinity import group_key

        return "" if self.group_by is None else group_key(item.get(self.group_by)) or ""

    def with_rounds(self, rounds: Sequence[Sequence[Item]]) -> StageWork:
        """Return the stage with items added that a campaign has not requested yet, one a batch."""
        left, batches = list(self.left), list(self.batches)
        for number, items in enumerate(rounds, 1):
            for item in sorted(items, key=self.group_of):
                batches.append(Batch(self.group_of(item), len(left), 1, round=number))
                left.append(item)
        coming = len(left) - len(self.left)
        return replace(self, left=tuple(left), batches=tuple(batches), coming=coming)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The rest of a run at one moment."""

    run: str
    """The run's path as it was given; "" for a run that does not exist yet."""
    at: float
    """When the run was read: epoch seconds of this machine."""
    stages: tuple[StageWork, ...]
    """The stages with items left."""
    workers: dict[str, str] = field(default_factory=dict)
    """Living workers, with the stage and group that each has loaded, as from :func:`context`."""
    done: int = 0
    """Number of items that have a result or failed for good."""
    sealed: bool = True
    """Whether no further items can come; items that a campaign may request are in the stages."""
    ends_s: float | None = None
    """Seconds after which a search requests nothing more; None: no such limit."""
    may_stop: bool = False
    """Whether the search may end before it has requested everything that it may request."""
    assumed: tuple[str, ...] = ()
    """Assumptions about items to come, in sentences."""

    @property
    def left(self) -> int:
        return sum(len(stage.left) for stage in self.stages)

    @property
    def most_workers(self) -> int | None:
        """The most workers that find work in the tasks of a campaign; None: not limited."""
        return next((one.most_workers for one in self.stages if one.most_workers), None)

    @property
    def coming(self) -> int:
        """Items left that a campaign has not requested yet."""
        return sum(stage.coming for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Guess:
    """The user's guess of durations before any item has ended."""

    seconds_per_item: float
    load_s: float = 0.0
    factor: float = 1.5
    """In 9 of 10 cases the true means are within this factor, up or down; at least 1."""
    spread: float = 0.5
    """How much items differ: standard deviation of the logarithms of their seconds."""


def context(stage: str, group: str) -> str:
    """Return the name of the context that a worker has loaded."""
    return f"{stage}/{group}"


def typed_work(items: int, groups: int = 1) -> Work:
    """Return the work of a run that does not exist yet, with groups of about equal size."""
    from hpc_toolkit.queue.units import cut_spans

    size, more = divmod(items, groups)
    ends = [size * number + min(number, more) for number in range(1, groups + 1)]
    spans = [(first, end - first) for first, end in zip([0, *ends], ends, strict=False)]
    batches = []
    for first, count in cut_spans(spans if groups > 1 else None, items):
        group = bisect_right(ends, first)
        loads = bisect_right(ends, first + count - 1) - group + 1
        batches.append(Batch(f'"#{group}"' if groups > 1 else "", first, count, loads))
    stage = StageWork(
        name="items",
        group_by="group" if groups > 1 else None,
        left=({},) * items,  # one object, since a list may have millions of items
        batches=tuple(batches),
    )
    return Work(run="", at=0.0, stages=(stage,))
