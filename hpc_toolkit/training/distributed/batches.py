"""The linear scaling rule for batches and learning rates of several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_toolkit.errors import HpcToolkitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A global batch and the learning rate for it."""

    global_batch: int
    """Samples per optimizer step, over all ranks and all accumulated passes."""
    learning_rate: float
    """The rate after the warm-up."""
    base_rate: float
    """The rate for the base batch, at which the warm-up begins."""

    def warmed_up(self, step: int, steps: int) -> float:
        """Return the rate of step ``step`` (from 0), which rises linearly for ``steps`` steps."""
        share = min(1.0, step / steps) if steps > 0 else 1.0
        return self.base_rate + (self.learning_rate - self.base_rate) * share


def scaled(
    batch_per_rank: int,
    base_rate: float,
    base_batch: int,
    world_size: int,
    *,
    accumulation: int = 1,
) -> Scaled:
    """Scale a learning rate with the batch: k times the batch, k times the rate.

    ``base_rate`` must be known to work for ``base_batch`` samples per step. The rule and the
    warm-up are from Goyal et al. 2017 (arXiv:1706.02677), who warm up over the first 5 epochs and
    tested SGD with momentum on ImageNet up to 8,192 images per step. It may not hold beyond that:
    larger batches and AdamW often need less than the linear rate.

    Raises:
        HpcToolkitError: a number is not positive.
    """
    sizes = {
        "batch_per_rank": batch_per_rank,
        "base_rate": base_rate,
        "base_batch": base_batch,
        "world_size": world_size,
        "accumulation": accumulation,
    }
    for name, value in sizes.items():
        if value <= 0:
            msg = f"{name} must be above 0, not {value}"
            raise HpcToolkitError(msg)
    batch = batch_per_rank * world_size * accumulation
    rate = base_rate * batch / base_batch
    return Scaled(global_batch=batch, learning_rate=rate, base_rate=base_rate)
