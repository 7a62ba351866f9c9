"""The metrics stage on a GPU: what a checkpoint takes, what bounds it, and whether it agrees.

    python benchmarks/cuda.py [--write] [--device cpu --tiny]

A GPT-NeoX of the size of Pythia 410m with random weights is written to a temporary directory,
loaded and measured as the metrics stage does, on the GPU and, over fewer prompts, on the CPU.
Prompts are random tokens of one length. Without a GPU nothing is measured unless --device says cpu;
with --tiny the model is small enough for a test. --write leaves what a GPU gave as it is unless a
GPU gives something else, and says that none was at hand where nothing is written yet.

load      from the files, which the page cache holds, to the device
forward   one pass that hands each layer's states to nobody
metrics   the same pass with the standard metrics, less the one without, and what is computed after

Takes some minutes, and seconds with --tiny. Needs the extra ``torch``, and but for --device a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resultsfile import RESULTS, facts, table, write_section

from hpc_toolkit.science.metrics import METRICS, STANDARD
from hpc_toolkit.science.workloads.checkpoints import LoadedModel, quiet_transformers
from hpc_toolkit.science.workloads.layer_metrics import MeasuredLayers, require_metrics
from hpc_toolkit.science.workloads.onepass import BatchSize, forward

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

TITLE = "The metrics stage on a GPU"

ABSENT = (
    "Not measured yet: the machine of the other sections has no GPU. "
    "Run `python benchmarks/cuda.py --write` on a machine with a GPU to replace this line."
)


@dataclass(frozen=True)
class Shape:
    """A model and the prompts that it is run over."""

    width: int
    blocks: int
    heads: int
    vocabulary: int
    prompts: int
    tokens: int
    batch: int
    compared: int
    """Prompts over which CPU and GPU are compared."""


PYTHIA_410M = Shape(1024, 24, 16, 50304, prompts=512, tokens=256, batch=64, compared=4)
TINY = Shape(32, 3, 2, 50, prompts=6, tokens=8, batch=4, compared=3)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a model of three narrow blocks")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    chosen = parser.parse_args()
    on_gpu = chosen.device == "cuda" and torch.cuda.is_available()
    if chosen.write and not on_gpu:
        write_absence(RESULTS)
    if chosen.device == "cuda" and not on_gpu:
        sys.exit("error: torch sees no GPU here\nhint: --device cpu --tiny shows that this runs")
    shape = TINY if chosen.tiny else PYTHIA_410M
    lines = [facts(), "", *measured(shape, torch.device(chosen.device))]
    print("\n".join(lines))
    if chosen.write and on_gpu:
        write_section(TITLE, lines)


def write_absence(path: Path) -> None:
    """Say that no GPU was at hand, unless the section is there: a GPU may have given it."""
    if f"## {TITLE}\n" not in path.read_text(encoding="utf-8"):
        write_section(TITLE, [ABSENT], path)


def measured(shape: Shape, device: torch.device) -> list[str]:
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(shape.vocabulary, (shape.prompts, shape.tokens), generator=generator)
    ids: list[list[int]] = drawn.tolist()
    size = BatchSize(shape.batch)
    with tempfile.TemporaryDirectory() as scratch:
        save(Path(scratch), shape)
        load_s, loaded = timed(device, lambda: load(Path(scratch), device))
        few = ids[: shape.compared]
        here = values(load(Path(scratch), torch.device("cpu")), few, size)
    there = values(loaded, few, size)  # wakes the kernels as well
    forward_s, _ = timed(device, lambda: forward(loaded, ids, nobody, size=size))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    both_s, _ = timed(device, lambda: values(loaded, ids, size))
    parts = {"load": load_s, "forward": forward_s, "metrics": max(0.0, both_s - forward_s)}
    total = sum(parts.values())
    count = sum(each.numel() for each in loaded.model.parameters())
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    what = f"GPT-NeoX of {count / 1e6:.0f} M parameters, random weights, float32, on {name}"
    rate = shape.prompts * shape.tokens * (shape.blocks + 1) / both_s
    largest = max(parts, key=lambda part: parts[part])
    lines = [
        f"{what}; {shape.prompts} prompts of {shape.tokens} tokens, batches of {shape.batch}.",
        "",
        *table(
            ["part", "s", "share"],
            [[part, f"{s:.2f}", f"{s / total:.0%}"] for part, s in parts.items()],
        ),
        "",
        f"Bound by: {largest}. {rate:,.0f} tokens times layers a second.",
        f"Largest relative difference of a value from the CPU: {difference(here, there):.0e}.",
    ]
    if device.type == "cuda":
        lines.append(f"Peak of GPU memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB.")
    return [*lines, "", *metric_table(shape, device)]


def save(directory: Path, shape: Shape) -> None:
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXModel

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        bos_token_id=0,
        eos_token_id=0,
    )
    with quiet_transformers():
        GPTNeoXModel(config).save_pretrained(directory)


def load(directory: Path, device: torch.device) -> LoadedModel:
    import torch
    from transformers import AutoModel

    with quiet_transformers():
        model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    return LoadedModel(model.eval().to(device), None, device, "random")


def nobody(*_: object) -> None:
    """Takes a layer's states and does nothing with them."""


def values(loaded: LoadedModel, ids: list[list[int]], size: BatchSize) -> list[dict[str, float]]:
    measured = MeasuredLayers(loaded, ids, require_metrics(STANDARD), size=size)
    return [measured.values(layer) for layer in range(measured.layers)]


def timed(device: torch.device, run: Callable[[], Any]) -> tuple[float, Any]:
    import torch

    started = time.perf_counter()
    returned = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, returned


def difference(a: list[dict[str, float]], b: list[dict[str, float]]) -> float:
    return max(
        abs(one[name] - other[name]) / max(1e-3, abs(one[name]))
        for one, other in zip(a, b, strict=True)
        for name in one
    )


def metric_table(shape: Shape, device: torch.device) -> list[str]:
    """Each metric alone, over random states of one layer and batch, on the device and the CPU."""
    import torch

    generator = torch.Generator().manual_seed(1)
    states = torch.randn(shape.batch, shape.tokens, shape.width, generator=generator).double()
    rows = []
    for name in STANDARD:
        metric = METRICS[name]
        # The rows of a data set: as many as a prompt has tokens.
        z = states[0] if metric.scope == "dataset" else states
        seconds, results = [], []
        for where in dict.fromkeys((device, torch.device("cpu"))):
            moved = z.to(where)
            metric.function(moved)
            took, result = timed(where, lambda m=metric, z=moved: m.function(z))  # type: ignore[misc]
            seconds.append(took)
            results.append(result.cpu())
        apart = float((results[0] - results[-1]).abs().max() / results[-1].abs().max())
        rows.append([name, f"{1000 * seconds[0]:.2f}", f"{1000 * seconds[-1]:.2f}", f"{apart:.0e}"])
    return table(["metric", f"{device.type}, ms", "cpu, ms", "relative difference"], rows)


if __name__ == "__main__":
    main()
