"""Measure a training at one world size: its steps, its gradient exchange and its memory.

The models have random weights, so that none are downloaded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.training.distributed import accumulating, all_gather
from hpc_toolkit.training.distributed.group import DistributedInfo
from hpc_toolkit.training.scaling.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn


MIB = 2**20
_FIRST_BUCKET = MIB
"""Size of DistributedDataParallel's first bucket; it is small so that the exchange begins early."""


Steps = list[tuple[float, float]]
"""Consecutive steps of one rank: the seconds of each, and the part spent waiting for samples."""


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

    def buckets(self) -> list[int]:
        """Return the bytes of each message, as DistributedDataParallel first cuts its buckets."""
        size = sum(one.numel() * one.element_size() for one in self.trained)
        most = self.settings.bucket_cap_mb * MIB
        first = min(size, most, _FIRST_BUCKET)
        whole, rest = divmod(size - first, most)
        return [first, *[most] * whole, *([rest] if rest else [])]

    def steps(self, count: int, *, exchange: bool = True) -> Steps:
        """Take ``count`` steps; without ``exchange`` each rank keeps its gradients to itself."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            waited = self._step(exchange=exchange)
            _synchronize(self.device)
            times.append((time.perf_counter() - began, waited))
        return times

    def _step(self, *, exchange: bool) -> float:
        waited, passes = 0.0, self.settings.accumulate
        for number in range(passes):
            began = time.perf_counter()
            ids = next(self._samples)
            waited += time.perf_counter() - began
            # Gradients are exchanged in the last pass.
            with accumulating(self.wrapped, number, passes if exchange else passes + 1):
                self._loss(ids.to(self.device, non_blocking=True)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return waited

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        import torch

        half = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            output = self.wrapped(ids[:, :-1])
            scores = getattr(output, "logits", output)  # models of transformers have other outputs
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
            # CPU time, as decoding or tokenising would cost.
            end = time.thread_time() + settings.sample_cost_ms / 1000
            while time.thread_time() < end:
                pass
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


_ITERATIONS = 5

_WARMUP = 2
_LARGE = 16 * MIB
"""Message size for the bandwidth, in bytes; so large that latency does not matter."""


def measure(settings: Settings, info: DistributedInfo) -> dict[str, Any]:
    """Measure one repeat; every rank calls it and gets the same numbers. Raises ConfigError."""
    _forget_peaks(info.device)
    training = Training(settings, info)
    training.steps(settings.warmup)
    # Half of the steps without exchange run before the steps with exchange, and half after them.
    # A machine that becomes slower or faster then affects both kinds equally.
    half = max(1, settings.max_steps // 4) if info.world_size > 1 else 0
    before = training.steps(half, exchange=False)
    if info.world_size > 1:
        import torch.distributed as dist

        dist.barrier()
    steps, loading = _gathered(training.steps(settings.max_steps), training.device)
    without = before + training.steps(half, exchange=False)
    communication: dict[str, Any] = {}
    if info.world_size > 1:
        apart, _ = _gathered(without, training.device)
        communication = _exchange(training, median(steps), median(apart), info)
    samples = training.batch * settings.accumulate * info.world_size
    return {
        "samples_per_s": samples / mean(steps),
        "tokens_per_s": samples * settings.seq_length / mean(steps),
        "step_s": {
            "mean": mean(steps),
            "median": median(steps),
            # The smallest step that at least nine of ten steps do not exceed.
            "p90": sorted(steps)[math.ceil(0.9 * len(steps)) - 1],
        },
        "shares": {"loading": loading, "communication": communication.get("share", 0.0)},
        "communication": communication,
        "memory": _memory(info, training.device),
        "batch_per_rank": training.batch,
        "parameters": training.parameters,
        "trained_parameters": sum(one.numel() for one in training.trained),
    }


def _exchange(
    training: Training, typical_s: float, apart_s: float, info: DistributedInfo
) -> dict[str, Any]:
    """Return the cost of exchanging gradients, measured in three ways.

    ``typical_s`` are the median seconds of a step, ``apart_s`` those of a step without exchange.
    """
    buckets, ranks = training.buckets(), info.world_size
    large_s = _all_reduce_s([_LARGE], training.device)
    return {
        "gradient_bytes": sum(buckets),
        # The time that the exchange adds to a step; noise can make it negative.
        "exposed_s": typical_s - apart_s,
        "share": min(max(1 - apart_s / typical_s, 0.0), 1.0),
        "all_reduce_s": _all_reduce_s(buckets, training.device),
        # As nccl-tests counts: what each rank's link carries, to compare with the hardware.
        "bus_bytes_per_s": _LARGE * 2 * (ranks - 1) / ranks / large_s,
        "expected_s": sum(buckets) * large_s / _LARGE,
    }


def _all_reduce_s(sizes: Sequence[int], device: torch.device) -> float:
    """Return the median seconds of all-reduces of ``sizes`` bytes in turn, on the slowest rank."""
    import torch
    import torch.distributed as dist

    buffers = [torch.zeros(max(1, size // 4), device=device) for size in sizes]
    taken = []
    for number in range(_WARMUP + _ITERATIONS):
        dist.barrier()
        _synchronize(device)
        began = time.perf_counter()
        for buffer in buffers:
            dist.all_reduce(buffer)
        _synchronize(device)
        if number >= _WARMUP:
            taken.append(time.perf_counter() - began)
    slowest = torch.tensor(taken, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(median(slowest.tolist()))


def _synchronize(device: torch.device) -> None:
    """Wait for pending work on a GPU; a CPU has none."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _gathered(times: Steps, device: torch.device) -> tuple[list[float], float]:
    """Return the time of each step on its slowest rank, and the share of waiting for samples."""
    import torch

    ranks = all_gather(torch.tensor(times, dtype=torch.float64, device=device))
    waited = (ranks[..., 1].sum() / ranks[..., 0].sum()).item()
    return ranks[..., 0].max(dim=0).values.tolist(), float(waited)


def _forget_peaks(device: str) -> None:
    # proc(5): writing 5 resets the peak of resident memory; some systems do not allow it.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats()


def _memory(info: DistributedInfo, device: torch.device) -> dict[str, int]:
    """Return the highest memory peaks of any rank, in bytes."""
    import torch

    cuda = torch.cuda.max_memory_allocated() if info.device.startswith("cuda") else 0
    own = torch.tensor([peak_rss_bytes(), cuda], dtype=torch.int64, device=device)
    rss, gpu = all_gather(own).max(dim=0).values.tolist()
    return {"rss": int(rss), "cuda": int(gpu)}


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process since the last reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return 1024 * next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")
    )


VOCABULARY = 512

_HEAD = 32


def make_model(settings: Settings, device: torch.device) -> tuple[nn.Module, int]:
    """Return the model on its device, and the size of its vocabulary.

    Raises ConfigError if the model cannot be made, or a package that it needs is missing.
    """
    shape = settings.decoder()
    if shape is None:
        model, vocabulary = _of_transformers(settings.model)
    else:
        model, vocabulary = _decoder(*shape, settings.seq_length), VOCABULARY
    return model.to(device), vocabulary


def _decoder(layers: int, width: int, length: int) -> nn.Module:
    """Return a decoder in plain torch, since importing transformers takes seconds."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1 = nn.LayerNorm(width)
            self.norm_2 = nn.LayerNorm(width)
            self.attention_in = nn.Linear(width, 3 * width)
            self.attention_out = nn.Linear(width, width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            batch, tokens, _ = states.shape
            parts = self.attention_in(self.norm_1(states)).chunk(3, dim=-1)
            query, key, value = (
                part.view(batch, tokens, width // _HEAD, _HEAD).transpose(1, 2) for part in parts
            )
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            states = states + self.attention_out(seen.transpose(1, 2).reshape(batch, tokens, width))
            inner = nn.functional.gelu(self.up(self.norm_2(states)))
            summed: torch.Tensor = states + self.down(inner)
            return summed

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.places = nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            places = torch.arange(ids.shape[1], device=ids.device)
            states = self.tokens(ids) + self.places(places)
            for block in self.blocks:
                states = block(states)
            scores: torch.Tensor = self.head(self.norm(states))
            return scores

    return Decoder()


def _of_transformers(name: str) -> tuple[nn.Module, int]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        message = f"--model: {name!r} needs transformers, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="torch")) from error
    try:
        config = AutoConfig.from_pretrained(name)
        # The cache keeps keys and values for generating tokens, which a training does not do.
        config.use_cache = False
        return AutoModelForCausalLM.from_config(config), int(config.vocab_size)
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = f"--model: {name!r} is not a causal language model: {lines[0]}"
        hint = "decoder-4x128, a directory with a config.json, or a name on the hub"
        raise ConfigError(message, hint=hint) from error
