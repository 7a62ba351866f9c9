"""torch's DistributedDataParallel, and contexts for its forward and backward passes."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.training.distributed.group import get_distributed_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


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


def gradient_checkpointing(model: nn.Module) -> str:
    """Recompute activations in the backward pass instead of keeping them; return the method used.

    Call it before `wrap_model`. A model of transformers has ``gradient_checkpointing_enable``
    ("transformers"). In any other model, each module of the longest ModuleList runs under
    ``torch.utils.checkpoint.checkpoint`` ("torch"); its output must depend only on its arguments
    and weights. Both are non-reentrant, so that unused arguments and DDP work.

    Raises HpcToolkitError if the model has neither.
    """
    from torch import nn

    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return "transformers"
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=len, default=())
    if not len(blocks):
        msg = f"{type(model).__name__} has no list of blocks whose activations could be left out"
        raise HpcToolkitError(msg, hint="put its blocks into a torch.nn.ModuleList")
    for block in blocks:
        block.forward = partial(_recomputed, block, block.forward)
    return "torch"


def _recomputed(block: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if not block.training:
        return plain(*args, **kwargs)
    return checkpoint(plain, *args, use_reentrant=False, **kwargs)
