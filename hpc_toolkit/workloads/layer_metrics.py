"""The metrics stage: representation metrics of every layer from one forward pass a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, PermanentError, near_miss
from hpc_toolkit.metrics import METRICS, STANDARD, masked_mean
from hpc_toolkit.metrics.geometry import CURVATURE_ROWS, anisotropy_of_sum, unit_row_sum
from hpc_toolkit.workloads.checkpoints import free_cached_memory, load_checkpoint
from hpc_toolkit.workloads.embeddings import Batch, forward, layer_count, tokenize
from hpc_toolkit.workloads.requirements import require_layer, require_positive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from hpc_toolkit.workloads.checkpoints import LoadedModel

KEPT_BYTES = 4 * 2**30
"""Hidden states of all layers are kept up to this size, and each layer's metrics are computed when
its item runs. Beyond it, all metrics are computed during the forward pass, batch by batch."""

SHORTEST_PROMPT = CURVATURE_ROWS
"""Fewest tokens of a prompt: the metrics of shorter ones are not defined."""


class LayerMetrics:
    """Workload: item ``{"checkpoint", "layer"}`` to ``{"layer", "<metric>": float, ...}``.

    Layer 0 is the embeddings and layer L the last block *after* the final norm, as transformers
    returns them; the layers between are before any final norm (``final_norm: raw``). Models cut
    off after k blocks put the norm there too and give other numbers.
    """

    def __init__(
        self,
        *,
        prompts: str | Sequence[str],
        root: str = ".",
        max_prompts: int | None = None,
        max_tokens: int = 256,
        batch_size: int = 16,
        metrics: Sequence[str] | None = None,
    ) -> None:
        """``prompts`` is a list of texts, or the path of a file with one a line.

        Raises:
            ConfigError: an unknown metric, or a number that is not positive.
        """
        self._metrics = list(STANDARD if metrics is None else metrics)
        for name in self._metrics:
            if name not in METRICS:
                msg = f"metrics: unknown metric {name!r}"
                raise ConfigError(msg, hint=near_miss(name, list(METRICS)))
            if METRICS[name].scope in ("views", "layers"):
                msg = f"metrics: {name!r} needs more than one pass over the prompts of one layer"
                raise ConfigError(msg, hint=f"without it, or call hpc_toolkit.metrics.{name}")
        self._root = root
        self._prompts = prompts
        if max_prompts is not None:
            require_positive("max_prompts", max_prompts)
        self._max_prompts = max_prompts
        self._max_tokens = require_positive("max_tokens", max_tokens)
        self._batch_size = require_positive("batch_size", batch_size)
        self.loads = 0
        """Models loaded so far."""
        self.forwards = 0
        """Passes over the prompts so far."""

    def load(self, group: str) -> MeasuredLayers:
        """Load a checkpoint and run its one forward pass; the model is dropped afterwards.

        Raises:
            PermanentError: the checkpoint or the prompts cannot be used.
        """
        prompts = self._read_prompts()
        loaded = load_checkpoint(self._root, group)
        self.loads += 1
        ids = tokenize(loaded, prompts, self._max_tokens)
        for row, tokens in enumerate(ids):
            if len(tokens) < SHORTEST_PROMPT:
                msg = f"prompt {row + 1} has {len(tokens)} token(s): {prompts[row][:40]!r}"
                raise PermanentError(msg, hint=f"prompts need at least {SHORTEST_PROMPT} tokens")
        self.forwards += 1
        return MeasuredLayers(loaded, ids, self._batch_size, self._metrics)

    def run(
        self, context: MeasuredLayers, items: Iterable[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """One result per item, in order; no layer is measured before its item is taken."""
        for item in items:
            layer = require_layer(item, context.layers, context.name)
            yield {"layer": layer, **context.values(layer)}

    def on_oom(self, context: MeasuredLayers | None, items: list[dict[str, Any]]) -> bool:
        """Halve the batches, for this checkpoint and those to come; False at one prompt each.

        Sums over prompts are then taken in another order, which can change their last digits.
        """
        smaller = self._batch_size > 1 if context is None else context.halve()
        self._batch_size = max(1, self._batch_size // 2)
        free_cached_memory()
        return smaller

    def _read_prompts(self) -> list[str]:
        if isinstance(self._prompts, str):
            try:
                lines = Path(self._prompts).read_text(encoding="utf-8").splitlines()
            except FileNotFoundError:
                msg = f"{self._prompts}: no such file of prompts"
                raise PermanentError(msg, hint="one prompt a line") from None
            where = self._prompts
        else:
            lines, where = list(self._prompts), "prompts"
        prompts = [line for line in lines if line.strip()][: self._max_prompts]
        if len(prompts) < 2:
            msg = f"{where}: {len(prompts)} prompt(s), at least 2 are needed"
            raise PermanentError(msg)
        return prompts


class MeasuredLayers:
    """The context of one checkpoint: its layers' states, or their metrics already."""

    def __init__(
        self, loaded: LoadedModel, ids: list[list[int]], batch_size: int, metrics: list[str]
    ) -> None:
        self.name = loaded.name
        self.layers = layer_count(loaded)
        self._metrics = metrics
        self._values: dict[int, dict[str, float]] = {}
        self._batches: list[Batch] = []
        state_bytes = 4 * self.layers * int(loaded.model.config.hidden_size)
        # Padding fills a batch up to its longest prompt, hence the factor of two.
        keep = 2 * sum(map(len, ids)) * state_bytes <= KEPT_BYTES
        sums = [_LayerSums(metrics) for _ in range(self.layers)]
        for batch in forward(loaded, ids, batch_size):
            if keep:
                self._batches.append(batch)
                continue
            for layer, layer_sums in enumerate(sums):
                layer_sums.add(batch, layer)
        if not keep:
            self._values = {layer: self._finish(layer, s) for layer, s in enumerate(sums)}

    def values(self, layer: int) -> dict[str, float]:
        """Every metric of a layer; computed once."""
        if layer not in self._values:
            sums = _LayerSums(self._metrics)
            for batch in self._batches:
                sums.add(batch, layer)
            self._values[layer] = self._finish(layer, sums)
        return self._values[layer]

    def halve(self) -> bool:
        """Split the batches whose states are kept; False where none holds two prompts."""
        before = len(self._batches)
        self._batches = [half for batch in self._batches for half in batch.halves()]
        return len(self._batches) > before

    def _finish(self, layer: int, sums: _LayerSums) -> dict[str, float]:
        try:
            return sums.finish()
        except ValueError as error:
            msg = f"{self.name}: layer {layer}: {error}"
            raise PermanentError(msg) from error


class _LayerSums:
    """What the metrics of one layer need of the batches seen so far."""

    def __init__(self, metrics: list[str]) -> None:
        self._metrics = metrics
        self._per_prompt: dict[str, list[Tensor]] = {
            name: [] for name in metrics if METRICS[name].scope == "prompt"
        }
        self._means: list[Tensor] = []
        self._directions: list[tuple[Tensor, Tensor]] = []

    def add(self, batch: Batch, layer: int) -> None:
        states = batch.states[layer].double()
        self._means.append(masked_mean(states, batch.lengths))
        if any(METRICS[name].scope == "tokens" for name in self._metrics):
            self._directions.append(_summed(unit_row_sum(states, batch.lengths)))
        for name, values in self._per_prompt.items():
            values.append(METRICS[name].function(states, batch.lengths))

    def finish(self) -> dict[str, float]:
        import torch

        means = torch.cat(self._means)
        values: dict[str, float] = {}
        for name in self._metrics:
            match METRICS[name].scope:
                case "prompt":
                    values[name] = float(torch.cat(self._per_prompt[name]).mean())
                case "tokens":
                    total = [
                        torch.stack(part).sum(0) for part in zip(*self._directions, strict=True)
                    ]
                    values[name] = float(anisotropy_of_sum(*total))
                case "dataset":
                    values[name] = float(METRICS[name].function(means))
        return values


def _summed(parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return parts[0].sum(0), parts[1].sum(0)
