"""The ranks of a training: this process's rank, its group, sums over all ranks, and batches."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from hpc_toolkit.errors import ConfigError, HpcToolkitError, near_miss
from hpc_toolkit.system.ranks import RankInfo

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedInfo:
    """Position of one process in a training, in torch.distributed's terms."""

    rank: int = 0
    """Number of the process in the training, from 0."""
    local_rank: int = 0
    """Number of the process on its node, from 0."""
    world_size: int = 1
    """Number of processes of the training."""
    local_world_size: int = 1
    """Number of processes on this node; 1 under plain srun, which does not set it as a number."""
    node_rank: int = 0
    """Number of the node, from 0."""
    backend: str = ""
    """Backend of the process group, such as "gloo"; "" without a group."""
    device: str = "cpu"
    """Device of this rank's model and batches, such as "cuda:1"."""
    restart: int = 0
    """How often the launcher restarted these ranks within their job."""
    requeue: int = 0
    """How often Slurm restarted the job."""
    launched: bool = False
    """Whether a launcher or srun set the rank; otherwise this process is alone."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only rank that writes shared files."""
        return self.rank == 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> DistributedInfo:
        """Read a launcher's variables (RANK, WORLD_SIZE, ...), else srun's, else assume one rank.

        A launcher inside a Slurm step takes precedence, since Slurm's task is the launcher itself.
        torch is not asked: ``backend`` and ``device`` keep their defaults.

        Raises ConfigError if a variable is missing or invalid.
        """
        slurm = RankInfo.from_environ(environ, others=False)
        if "RANK" in environ or "WORLD_SIZE" in environ:
            place = cls(
                rank=_number(environ, "RANK"),
                world_size=_number(environ, "WORLD_SIZE"),
                local_rank=_number(environ, "LOCAL_RANK", 0),
                local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
                node_rank=_number(environ, "GROUP_RANK", 0),
                restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
                requeue=slurm.restart,
                launched=True,
            )
        else:
            place = cls(
                rank=slurm.rank,
                world_size=slurm.world_size,
                local_rank=slurm.local_rank,
                node_rank=_number(environ, "SLURM_NODEID", 0) if slurm.in_step else 0,
                requeue=slurm.restart,
                launched=slurm.in_step and slurm.world_size > 1,
            )
        if not 0 <= place.rank < place.world_size:
            msg = f"rank {place.rank} is not one of {place.world_size} ranks"
            raise ConfigError(msg, hint="ranks are numbered from 0; check RANK and WORLD_SIZE")
        return place


def get_distributed_info() -> DistributedInfo:
    """Return this process's position in the training, inside or outside a process group.

    Inside `process_group` it is the value that the block received.
    """
    return _entered[-1] if _entered else DistributedInfo.from_environ()


_entered: list[DistributedInfo] = []
"""What the blocks of `process_group` that are running received."""


def world_size() -> int:
    """Return the number of ranks of any process group of torch; 1 without a group."""
    return rank_and_size()[1]


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank in the process group and its size; 0 and 1 without a group.

    Imports nothing: a process that never imported torch.distributed has no group.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is not None and text.isdigit():
        return int(text)
    msg = f"{name} is {text!r}, which is not a valid rank"
    if text is None:
        msg = f"{name} is not set, although another launcher variable is"
    raise ConfigError(msg, hint="start the script with 'hpctk launch' or torchrun")


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

    found = DistributedInfo.from_environ()
    chosen = _backend(backend)
    info = replace(found, device=_device(chosen, found))
    if dist.is_initialized():
        raise ConfigError("a process group exists already", hint="use one process group at a time")
    cuda = torch.device(info.device) if chosen == "nccl" else None
    if cuda is not None:
        torch.cuda.set_device(cuda)
    if info.launched:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            msg = f"there are other ranks, and {' and '.join(missing)} does not say where they meet"
            raise ConfigError(msg, hint="start the script with 'hpctk launch', also under srun")
        info = replace(info, backend=chosen)
        dist.init_process_group(
            chosen,
            rank=info.rank,
            world_size=info.world_size,
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            device_id=cuda,
        )
    _entered.append(info)
    try:
        yield info
    except Exception:
        if chosen == "nccl" and dist.is_initialized():
            # Other ranks may never join the pending collectives, for which destroying would wait.
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        _entered.pop()
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
        raise ConfigError("backend nccl needs a GPU, and torch sees none", hint="use gloo")
    return chosen


def _device(backend: str, info: DistributedInfo) -> str:
    import torch

    if backend != "nccl":
        return "cpu"
    count = torch.cuda.device_count()
    # A rank that sees only one GPU was given that one, whatever its local rank is.
    if info.local_rank >= count > 1:
        msg = f"rank {info.local_rank} of this node has no GPU to itself among {count}"
        raise ConfigError(msg, hint="start one rank per GPU on each node, or use gloo")
    return f"cuda:{info.local_rank % count}"


def all_reduce(tensor: Tensor, op: Literal["sum", "average"] = "sum") -> Tensor:
    """Return the sum or the average of the ranks' tensors (torch.distributed.all_reduce)."""
    if op not in ("sum", "average"):
        raise HpcToolkitError(f"no reduction {op!r}", hint=near_miss(op, ["sum", "average"]))
    if op == "average" and not (tensor.is_floating_point() or tensor.is_complex()):
        msg = f"an average of {tensor.dtype} would be cut to whole numbers"
        raise HpcToolkitError(msg, hint="convert the tensor to float first")
    result = tensor.detach().clone()
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_reduce(result)
    # gloo before torch 2.12 cannot average, so the sum is divided for every backend.
    return result / world_size() if op == "average" else result


LOGGER = "hpc_toolkit.training.distributed"
"""The logger for this package's messages about checkpoints and signals."""


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
