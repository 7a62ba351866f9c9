"""The process group of a training script, and its collectives."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NoReturn

from hpc_toolkit.errors import ConfigError, HpcToolkitError, near_miss
from hpc_toolkit.training.distributed import place
from hpc_toolkit.training.distributed.place import world_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from hpc_toolkit.training.distributed.place import DistributedInfo

BACKENDS = ("gloo", "nccl")
"""The supported backends: gloo for CPUs, nccl for NVIDIA GPUs."""
_LENDING_S = 0.05
"""How long gloo's threads may use the interpreter after the last collective.

These threads outlive the group. They release the collective's tensors some time after it has
returned, and torch 2.13 needs the interpreter for that. If a thread still waits for it when Python
shuts down, Python ends the thread inside a destructor, which is a SIGABRT ("terminate called
without an active exception"). Python 3.14 lets such threads wait instead.
"""


@contextlib.contextmanager
def process_group(
    backend: str | None = None, *, timeout_s: float | None = None
) -> Iterator[DistributedInfo]:
    """Run the block as one rank of a training (torch.distributed.init_process_group).

    The backend is ``backend``, else HPCTK_BACKEND, else nccl if torch sees a GPU, else gloo. With
    nccl the rank's device is ``cuda:LOCAL_RANK``, or the only GPU that it sees, and becomes torch's
    current device; with gloo it is the CPU. ``timeout_s`` is how long a collective may wait for
    the other ranks, by default torch's own limit.

    A process that was not launched has no group, and everything in this package works as with one
    rank. The group is destroyed at the end of the block, also after an error. The ranks do not wait
    for each other at the end.

    Raises ConfigError if a variable or the backend cannot be used here, or a group already exists.
    """
    import torch
    import torch.distributed as dist

    found = place.DistributedInfo.from_environ()
    chosen = _backend(backend)
    info = dataclasses.replace(found, device=_device(chosen, found))
    if dist.is_initialized():
        msg = "there is a process group already"
        raise ConfigError(msg, hint="use one of them at a time")
    cuda = torch.device(info.device) if chosen == "nccl" else None
    if cuda is not None:
        torch.cuda.set_device(cuda)
    if info.launched:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            msg = f"there are other ranks, and {' and '.join(missing)} does not say where they meet"
            raise ConfigError(msg, hint="start the script with 'hpctk launch', under srun as well")
        info = dataclasses.replace(info, backend=chosen)
        dist.init_process_group(
            chosen,
            rank=info.rank,
            world_size=info.world_size,
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            device_id=cuda,
        )
    place.entered.append(info)
    try:
        yield info
    except Exception:
        if chosen == "nccl":
            _abort()
        raise
    finally:
        place.entered.pop()
        if info.launched and dist.is_initialized():
            dist.destroy_process_group()
            if chosen == "gloo":
                # A sleeping thread releases the interpreter lock.
                time.sleep(_LENDING_S)


def leave(code: int) -> NoReturn:
    """Exit with ``code`` at once, after the rank's block; only logs and output are flushed.

    No thread can then crash in an interpreter that is shutting down (`process_group` prevents that
    for gloo's threads). Functions registered with atexit do not run.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _backend(asked: str | None) -> str:
    import torch

    chosen = asked or os.environ.get("HPCTK_BACKEND") or ""
    if not chosen:
        return "nccl" if torch.cuda.is_available() else "gloo"
    if chosen not in BACKENDS:
        msg = f"no backend {chosen!r}" + ("" if asked else " (HPCTK_BACKEND)")
        raise ConfigError(msg, hint=near_miss(chosen, list(BACKENDS)))
    if chosen == "nccl" and not torch.cuda.is_available():
        msg = "backend nccl needs a GPU, and torch sees none"
        raise ConfigError(msg, hint="use gloo")
    return chosen


def _device(backend: str, info: DistributedInfo) -> str:
    import torch

    if backend != "nccl":
        return "cpu"
    count = torch.cuda.device_count()
    # A rank that sees only one GPU was given that one, whatever its local rank is.
    if info.local_rank >= count > 1:
        msg = f"rank {info.local_rank} of this node has no GPU of its own among {count}"
        raise ConfigError(msg, hint="start as many ranks on a node as it has GPUs, or use gloo")
    return f"cuda:{info.local_rank % count}"


def _abort() -> None:
    """Abort nccl's group and its pending collectives, which other ranks may never join."""
    from torch.distributed import distributed_c10d

    # New in torch 2.6; in earlier versions, destroying a group aborted it.
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    if abort is not None and distributed_c10d.is_initialized():
        abort()


def all_reduce(tensor: Tensor, op: Literal["sum", "average"] = "sum") -> Tensor:
    """Return the sum or the average of the ranks' tensors (torch.distributed.all_reduce)."""
    if op not in ("sum", "average"):
        msg = f"no reduction {op!r}"
        raise HpcToolkitError(msg, hint=near_miss(op, ["sum", "average"]))
    if op == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
        msg = f"an average of {tensor.dtype} would be cut to whole numbers"
        raise HpcToolkitError(msg, hint="convert the tensor to float first")
    result = tensor.detach().clone()
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(result)
    # gloo before torch 2.12 cannot average, so the sum is divided for every backend.
    return result / world_size() if op == "average" else result


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
