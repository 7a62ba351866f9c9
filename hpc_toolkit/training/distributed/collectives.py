"""Collectives that return their result, with or without a process group.

Each is one call of torch.distributed, which all ranks must make in the same order with tensors of
the same shape and dtype. The argument is not changed, no gradient flows through, and the result is
on the argument's device. Without a group they behave as with one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpc_toolkit.errors import HpcToolkitError, near_miss
from hpc_toolkit.training.distributed.place import world_size

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["sum", "average"]
"""How the tensors of several ranks are combined."""


def all_reduce(tensor: Tensor, op: Reduction = "sum") -> Tensor:
    """Return the sum or the average of the ranks' tensors (torch.distributed.all_reduce)."""
    _check(tensor, op)
    result = tensor.detach().clone()
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(result)
    return _averaged(result, op)


def all_gather(tensor: Tensor) -> Tensor:
    """Return the ranks' tensors, stacked in rank order (torch.distributed.all_gather)."""
    import torch

    own = tensor.detach().contiguous()
    if world_size() == 1:
        return own.clone().unsqueeze(0)
    import torch.distributed as dist

    parts = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(parts, own)
    return torch.stack(parts)


def broadcast(tensor: Tensor, source: int = 0) -> Tensor:
    """Return the tensor of rank ``source`` (torch.distributed.broadcast)."""
    result = tensor.detach().clone()
    if not 0 <= source < world_size():
        msg = f"rank {source} cannot send: there are {world_size()} ranks"
        raise HpcToolkitError(msg, hint="ranks are numbered from 0")
    if world_size() > 1:
        import torch.distributed as dist

        dist.broadcast(result, source)
    return result


def reduce_scatter(tensor: Tensor, op: Reduction = "sum") -> Tensor:
    """Return this rank's part of the reduced tensor (torch.distributed.reduce_scatter).

    The first dimension is divided into one equal part per rank.

    Raises:
        HpcToolkitError: the first dimension is not a multiple of the world size.
    """
    _check(tensor, op)
    size = world_size()
    if tensor.ndim == 0 or tensor.shape[0] % size:
        msg = f"a tensor of shape {tuple(tensor.shape)} has no equal part for each of {size} ranks"
        raise HpcToolkitError(msg, hint="make its first dimension a multiple of the world size")
    own = tensor.detach().contiguous()
    if size == 1:
        return own.clone()
    import torch
    import torch.distributed as dist

    parts = list(own.chunk(size))
    result = torch.empty_like(parts[0])
    dist.reduce_scatter(result, parts)
    return _averaged(result, op)


def _check(tensor: Tensor, op: str) -> None:
    if op not in ("sum", "average"):
        msg = f"no reduction {op!r}"
        raise HpcToolkitError(msg, hint=near_miss(op, ["sum", "average"]))
    if op == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
        msg = f"an average of {tensor.dtype} would be cut to whole numbers"
        raise HpcToolkitError(msg, hint="convert the tensor to float first")


def _averaged(total: Tensor, op: str) -> Tensor:
    # gloo before torch 2.12 cannot average, so the sum is divided for every backend.
    return total / world_size() if op == "average" else total
