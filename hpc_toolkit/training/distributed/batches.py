"""Batches of several ranks: their samples, and torch's DistributedDataParallel for their passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import HpcToolkitError, near_miss
from hpc_toolkit.training.distributed.group import get_distributed_info, rank_and_size

if TYPE_CHECKING:
    from torch import nn


class ResumableSampler:
    """torch's DistributedSampler, which can begin in the middle of an epoch.

    The order is the one of ``DistributedSampler(dataset, num_replicas=1, shuffle=..., seed=...)``;
    each rank takes every world_size-th sample of it. So the position in an epoch is one number: how
    many samples *all* ranks took. A training can therefore resume with another number of ranks and
    sees the same global batches. Pass it to a DataLoader as ``sampler``.

    The training loop reports the samples that it took (`took`), since a DataLoader reads ahead.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Literal["pad", "drop"] = "pad",
    ) -> None:
        """Sample ``dataset``, which can be anything that has a length.

        ``remainder`` decides about samples that the ranks cannot share evenly. "pad" repeats
        samples from the start and "drop" omits the last ones, as DistributedSampler does.
        """
        if remainder not in ("pad", "drop"):
            msg = f"no remainder {remainder!r}"
            raise HpcToolkitError(msg, hint=near_miss(remainder, ["pad", "drop"]))
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._remainder = remainder
        self.epoch = 0
        """The epoch that is sampled, from 0."""
        self.taken = 0
        """Samples of this epoch that all ranks together have taken."""

    def set_epoch(self, epoch: int) -> None:
        """Sample ``epoch`` in its own order, from the start unless it is the current epoch."""
        if epoch != self.epoch:
            self.epoch, self.taken = epoch, 0

    def took(self, samples: int) -> None:
        """Record that all ranks together took ``samples`` more samples of this epoch."""
        self.taken = min(self.taken + samples, len(self._dataset))

    def state_dict(self) -> dict[str, int]:
        """Return the position of the training in the samples."""
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "seed": self._seed,
            "samples": len(self._dataset),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume at the position of another training, also one with another number of ranks.

        Raises HpcToolkitError: its seed or its number of samples differ.
        """
        for name, own in (("seed", self._seed), ("samples", len(self._dataset))):
            if state[name] != own:
                msg = f"the checkpoint's sampler has {name} {state[name]}, this one {own}"
                raise HpcToolkitError(msg, hint="resume with the same data and seed")
        self.epoch, self.taken = state["epoch"], state["taken"]

    def __len__(self) -> int:
        """Return the number of samples that this rank has left in this epoch."""
        size = rank_and_size()[1]
        left = len(self._dataset) - self.taken
        return left // size if self._remainder == "drop" else -(-left // size)

    def __iter__(self) -> Iterator[int]:
        """Iterate over this rank's samples in the rest of the epoch."""
        from torch.utils.data import DistributedSampler

        torchs: DistributedSampler[int] = DistributedSampler(
            self._dataset,  # type: ignore[arg-type] # only its length is used
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
        elif rest:
            missing = -len(rest) % size
            rest += (order * (missing // len(order) + 1))[:missing]
        return iter(rest[rank::size])


def wrap_model(model: nn.Module, **options: Any) -> nn.Module:
    """Move a model to this rank's device and average its gradients over the ranks.

    With a process group the result is a ``torch.nn.parallel.DistributedDataParallel`` with these
    options, which also sends rank 0's weights to all ranks; without one it is the model itself.
    Gradients are reduced in buckets of ``bucket_cap_mb`` MiB (25) during the backward pass. If a
    forward pass uses only some parameters, set ``find_unused_parameters``, which traverses the
    graph in each pass. ``gradient_as_bucket_view`` is True here, which saves memory.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    info = get_distributed_info()
    model = model.to(info.device)
    if not (dist.is_available() and dist.is_initialized()):
        return model
    device_ids = [info.device] if info.device.startswith("cuda") else None
    options = {"gradient_as_bucket_view": True, **options}
    return DistributedDataParallel(model, device_ids=device_ids, **options)


def unwrapped(model: Any) -> Any:
    """Return the model that `wrap_model` wrapped; anything else as it is."""
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model


def accumulating(
    model: nn.Module, passed: int, every: int
) -> contextlib.AbstractContextManager[Any]:
    """Return a context for a forward and backward pass; only the last of ``every`` syncs gradients.

    ``passed`` is the number of the pass within its optimizer step, from 0. All but the last run
    under DistributedDataParallel.no_sync. Divide each loss by ``every``.
    """
    if not 0 <= passed < every:
        msg = f"pass {passed} is not one of the {every} passes of a step, numbered from 0"
        raise HpcToolkitError(msg)
    no_sync = getattr(model, "no_sync", None)
    return no_sync() if no_sync is not None and passed < every - 1 else contextlib.nullcontext()
