"""What is left of a run and what was seen of it: plain values, whoever made them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item


@dataclass(frozen=True, slots=True)
class Seen:
    """One item that ended or runs, and how long it took or has taken."""

    item: Item
    """As it was given."""
    group: str
    """Key of its group; "" without groups."""
    seconds: float
    """How long it took; of one that runs, how long it has run at least."""
    first: bool = False
    """Whether it was the first one after its worker loaded the group."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker spent on a pass beside its items: it loaded one or several groups for it."""

    group: str
    seconds: float
    """For one group."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that one worker does in a row: what is left of a unit."""

    group: str
    """Key of the group of the first one; "" without groups."""
    first: int
    """Its first item among :attr:`StageWork.left`; the others follow."""
    count: int
    """Number of items, at least 1."""
    loads: int = 1
    """How many groups are in it."""
    holder: str = ""
    """The living worker that has it now; "" if it waits."""
    age_s: float = 0.0
    """How long the holder has had its first item, at least."""
    loading: bool = False
    """Whether that time may have gone into loading the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One stage: what is left, and what was seen."""

    name: str
    group_by: str | None = None
    """The key of an item that names its group."""
    left: tuple[Item, ...]
    """Items without a result."""
    batches: tuple[Batch, ...]
    """The items left, in the order of the queue."""
    coming: int = 0
    """How many of them, the last ones, nobody has asked for yet."""
    seen: tuple[Seen, ...] = ()
    """Items that have a result."""
    loads: tuple[Load, ...] = ()
    overheads_s: tuple[float, ...] = ()
    """What passes took that loaded nothing, beside their items."""
    attempts: int = 0
    """Attempts that ended, however they did."""
    retried: int = 0
    """Those of them that failed and can be tried again."""

    @property
    def running(self) -> list[tuple[Batch, Item]]:
        """Batches that somebody holds, with the item that runs."""
        return [(batch, self.left[batch.first]) for batch in self.batches if batch.holder]

    def group_of(self, item: Item) -> str:
        """Key of an item's group."""
        from hpc_toolkit.queue.affinity import group_key

        return "" if self.group_by is None else group_key(item.get(self.group_by)) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is left of a run at one moment."""

    run: str
    """Its path as it was given; "" for a run that is not there yet."""
    at: float
    """When it was read: epoch seconds of this machine."""
    stages: tuple[StageWork, ...]
    """Those with items left."""
    workers: dict[str, str] = field(default_factory=dict)
    """Workers that live, with the stage and group that each has loaded, as :func:`context`."""
    done: int = 0
    """Items with a result, those that failed for good included."""
    sealed: bool = True
    """Whether no items can come any more; those that a campaign may ask for are in the stages."""
    most_workers: int | None = None
    """More workers than that find no work in the tasks of a campaign."""
    assumed: tuple[str, ...] = ()
    """What was assumed of items to come, in sentences."""

    @property
    def left(self) -> int:
        """Items without a result."""
        return sum(len(stage.left) for stage in self.stages)

    @property
    def coming(self) -> int:
        """Those of them that a campaign has not asked for yet."""
        return sum(stage.coming for stage in self.stages)


def context(stage: str, group: str) -> str:
    """The name of what a worker has loaded."""
    return f"{stage}/{group}"


def asked_more(stage: StageWork, items: list[Item]) -> StageWork:
    """A stage with items that nobody has asked for yet, one for each claim."""
    ordered = sorted(items, key=stage.group_of)
    at = len(stage.left)
    more = tuple(Batch(stage.group_of(item), at + n, 1) for n, item in enumerate(ordered))
    left, batches = (*stage.left, *ordered), (*stage.batches, *more)
    return replace(stage, left=left, batches=batches, coming=len(items))


def typed_work(items: int, groups: int = 1) -> Work:
    """A run that is not there yet: so many items in so many groups of about one size."""
    from hpc_toolkit.queue.units import plan_units

    of = sorted(number % groups for number in range(items))
    left = tuple({"group": f"#{group}", "item": n} for n, group in enumerate(of))
    cut = plan_units(of if groups > 1 else None, items)
    keys = [f'"#{group}"' if groups > 1 else "" for group in of]
    batches = tuple(Batch(keys[first], first, count) for first, count in cut)
    stage = StageWork(
        name="items", group_by="group" if groups > 1 else None, left=left, batches=batches
    )
    return Work(run="", at=0.0, stages=(stage,))
