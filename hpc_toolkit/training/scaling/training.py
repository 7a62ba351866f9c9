"""The training that is measured: timed steps of one rank."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_toolkit.training.scaling.bandwidth import MIB, synchronize
from hpc_toolkit.training.scaling.models import logits_of, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from hpc_toolkit.training.distributed.place import DistributedInfo
    from hpc_toolkit.training.scaling.settings import Settings

_FIRST_BUCKET = MIB
"""Size of DistributedDataParallel's first bucket; it is small so that the exchange begins early."""


@dataclass(slots=True)
class StepTimes:
    """Times of consecutive steps on this rank."""

    seconds: list[float] = field(default_factory=list)
    """Time of each complete step, from the first sample to the updated weights."""
    loading: list[float] = field(default_factory=list)
    """Part of each step in which the rank waited for samples."""


class Training:
    """One rank's model, optimizer and samples.

    With one rank there is no DistributedDataParallel: more ranks are compared with the training
    that a user would run on one rank.
    """

    def __init__(self, settings: Settings, info: DistributedInfo) -> None:
        import torch

        torch.manual_seed(1)  # the same weights on every rank
        self.settings = settings
        self.device = torch.device(info.device)
        self.batch = settings.batch_per_rank(info.world_size)
        model, vocabulary = make_model(settings, self.device)
        self.parameters = sum(one.numel() for one in model.parameters())
        self.trained = [one for one in model.parameters() if one.requires_grad]
        self.wrapped: Any = model
        if info.world_size > 1:
            from torch.nn.parallel import DistributedDataParallel

            self.wrapped = DistributedDataParallel(model, bucket_cap_mb=settings.bucket_cap_mb)
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self._samples = _samples(settings, vocabulary, self.batch, info.rank, self.device)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that the ranks exchange in a step."""
        return sum(one.numel() * one.element_size() for one in self.trained)

    def buckets(self) -> list[int]:
        """Return the bytes of each message, as DistributedDataParallel first cuts its buckets."""
        left, sizes = self.gradient_bytes, []
        limit = min(_FIRST_BUCKET, self.settings.bucket_cap_mb * MIB)
        while left > 0:
            sizes.append(min(left, limit))
            left -= sizes[-1]
            limit = self.settings.bucket_cap_mb * MIB
        return sizes

    def steps(self, count: int, *, exchange: bool = True) -> StepTimes:
        """Take ``count`` steps; without ``exchange`` each rank keeps its gradients to itself."""
        times = StepTimes()
        for _ in range(count):
            began = time.perf_counter()
            waited = self._step(exchange=exchange)
            synchronize(self.device)
            times.seconds.append(time.perf_counter() - began)
            times.loading.append(waited)
        return times

    def _step(self, *, exchange: bool) -> float:
        waited = 0.0
        last = self.settings.accumulate - 1
        for number in range(self.settings.accumulate):
            began = time.perf_counter()
            ids = next(self._samples)
            waited += time.perf_counter() - began
            with self._together(exchange=exchange and number == last):
                self._loss(ids.to(self.device, non_blocking=True)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return waited

    def _together(self, *, exchange: bool) -> AbstractContextManager[Any]:
        if exchange or not hasattr(self.wrapped, "no_sync"):
            return nullcontext()
        kept: AbstractContextManager[Any] = self.wrapped.no_sync()
        return kept

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        import torch

        half = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            scores = logits_of(self.wrapped(ids[:, :-1]))
            loss: torch.Tensor = torch.nn.functional.cross_entropy(
                scores.flatten(0, 1), ids[:, 1:].flatten()
            )
            return loss / self.settings.accumulate


def _samples(
    settings: Settings, vocabulary: int, batch: int, rank: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Return endless batches of random tokens; each row has one more token, for the targets."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[torch.Tensor]):
        """Samples that depend only on rank and number, not on the process that makes them."""

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, number: int) -> torch.Tensor:
            _burn(settings.sample_cost_ms / 1000)
            draw = torch.Generator().manual_seed(10**9 * rank + number)
            return torch.randint(vocabulary, (settings.seq_length + 1,), generator=draw)

    loader = DataLoader(
        Samples(),
        batch_size=batch,
        sampler=range(10**9),
        num_workers=settings.loader_workers,
        pin_memory=device.type == "cuda",
    )
    return iter(loader)


def _burn(seconds: float) -> None:
    """Use CPU time in this thread for a number of seconds."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
