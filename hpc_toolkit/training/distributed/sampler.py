"""Which samples each rank takes, from any sample of an epoch on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpc_toolkit.errors import HpcToolkitError, near_miss
from hpc_toolkit.training.distributed.place import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

REMAINDERS = ("pad", "drop", "uneven")


class ResumableSampler:
    """torch's DistributedSampler, which can begin in the middle of an epoch.

    The order is that of ``DistributedSampler(dataset, num_replicas=1, shuffle=..., seed=...)``, of
    which the ranks take every world_size-th sample in turn. So the position in an epoch is one
    number, how many samples *all* ranks took, and a training may go on with another number of
    ranks: it meets the same global batches. Give it to a DataLoader as ``sampler``.

    The training loop says what it took (`took`), since a DataLoader reads ahead.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Literal["pad", "drop", "uneven"] = "pad",
    ) -> None:
        """Sample ``dataset``, anything that has a length.

        ``remainder`` says what becomes of samples that the ranks cannot share evenly: "pad" repeats
        the first ones and "drop" leaves them out, as DistributedSampler does, and with "uneven"
        some ranks have one more, which needs `uneven_inputs`.
        """
        if remainder not in REMAINDERS:
            hint = near_miss(remainder, list(REMAINDERS))
            msg = f"no remainder {remainder!r}"
            raise HpcToolkitError(msg, hint=hint)
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._remainder = remainder
        self.epoch = 0
        """The epoch that is sampled, from 0."""
        self.taken = 0
        """Samples of it that all ranks together have taken."""

    def set_epoch(self, epoch: int) -> None:
        """Sample this epoch, in its own order; from the start, unless it is the present one."""
        if epoch != self.epoch:
            self.epoch, self.taken = epoch, 0

    def took(self, samples: int) -> None:
        """Note that all ranks together took so many more samples of this epoch."""
        self.taken = min(self.taken + samples, len(self._dataset))

    def state_dict(self) -> dict[str, int]:
        """Where in the samples the training is."""
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "seed": self._seed,
            "samples": len(self._dataset),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where another training was, also one with another number of ranks.

        Raises:
            HpcToolkitError: it sampled something else, so that its position means nothing here.
        """
        for name, own in (("seed", self._seed), ("samples", len(self._dataset))):
            if state[name] != own:
                msg = f"the checkpoint's sampler has {name} {state[name]}, this one {own}"
                raise HpcToolkitError(msg, hint="resume with the same data and seed")
        self.epoch, self.taken = state["epoch"], state["taken"]

    def __len__(self) -> int:
        """Samples that this rank has still to take in this epoch."""
        rank, size = rank_and_size()
        left = len(self._dataset) - self.taken
        if self._remainder == "drop":
            return left // size
        return (left - rank + size - 1) // size if self._remainder == "uneven" else -(-left // size)

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch for this rank."""
        from torch.utils.data import DistributedSampler

        torchs: DistributedSampler[int] = DistributedSampler(
            self._dataset,  # type: ignore[arg-type] # it asks for the length alone
            num_replicas=1,
            rank=0,
            shuffle=self._shuffle,
            seed=self._seed,
        )
        torchs.set_epoch(self.epoch)
        rank, size = rank_and_size()
        order = list(torchs)
        rest = order[self.taken :]
        if self._remainder == "drop":
            rest = rest[: len(rest) // size * size]
        elif self._remainder == "pad" and rest:
            missing = -len(rest) % size
            rest += (order * (missing // len(order) + 1))[:missing]
        return iter(rest[rank::size])
