"""The metrics of all layers of one checkpoint: what one pass gathers, and what it makes of it.

Memory beyond the weights and `onepass`: while a layer is looked at, some copies of its states in
float64; from the pass on, one mean row of ``8 d`` bytes a layer, prompt and view, on the host, or
at most about ``2 d`` rows a layer where every metric reads the singular values alone (`streams`);
and for few prompts their states (`KEPT_BYTES`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.metrics import METRICS, masked_mean
from hpc_toolkit.metrics.geometry import anisotropy_of_sum, unit_row_sum
from hpc_toolkit.workloads.onepass import BatchSize, forward, layer_count
from hpc_toolkit.workloads.streams import RowStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hpc_toolkit.workloads.checkpoints import LoadedModel
    from hpc_toolkit.workloads.onepass import Batch, FinalNorm

KEPT_BYTES = 2**29
"""Hidden states of all layers are kept up to this size, and each layer's metrics are computed when
its item runs. Beyond it, what needs the tokens is computed during the pass, layer by layer."""

SINGULAR = frozenset({"effective_rank", "rankme", "alpha_req"})
"""Metrics of the prompt means that depend on nothing but singular values."""


@dataclass(slots=True)
class _Kept:
    """A batch with its states at every layer."""

    states: list[Tensor]
    lengths: Tensor

    def halves(self) -> list[_Kept]:
        """The same states in two batches, or in this one if it holds one text; copies nothing."""
        middle = len(self.lengths) // 2
        if middle == 0:
            return [self]
        return [
            _Kept([state[part] for state in self.states], self.lengths[part])
            for part in (slice(None, middle), slice(middle, None))
        ]


class MeasuredLayers:
    """The context of one checkpoint: its layers' states, or what the metrics need of them."""

    def __init__(
        self,
        loaded: LoadedModel,
        ids: list[list[int]],
        metrics: Sequence[str],
        *,
        size: BatchSize,
        final_norm: FinalNorm = "raw",
        views: Sequence[list[list[int]]] = (),
    ) -> None:
        """Run the model over the prompts, and over each of their ``views``.

        Raises:
            PermanentError: the model cannot be run on them, or a state is not finite.
        """
        self.name = loaded.name
        self.layers = layer_count(loaded)
        self._metrics = list(metrics)
        self._device = loaded.device
        self._values: dict[int, dict[str, float]] = {}
        self._kept: list[_Kept] = []
        self._sums = [_LayerSums(self._metrics) for _ in range(self.layers)]
        state_bytes = 4 * self.layers * int(loaded.model.config.hidden_size)
        # Padding fills a batch up to its longest prompt, hence the factor of two.
        keep = 2 * sum(map(len, ids)) * state_bytes <= KEPT_BYTES
        forward(
            loaded, ids, self._keep if keep else self._measure, size=size, final_norm=final_norm
        )
        self._views: list[list[Tensor]] = [[] for _ in range(self.layers)]
        for view in views:
            self._add_view(loaded, view, size, final_norm)

    def values(self, layer: int) -> dict[str, float]:
        """Every metric of a layer; computed once.

        Raises:
            PermanentError: a metric is not defined for these prompts.
        """
        if layer not in self._values:
            try:
                self._values[layer] = self._finished(layer)
            except ValueError as error:
                msg = f"{self.name}: layer {layer}: {error}"
                raise PermanentError(msg) from error
        return self._values[layer]

    def halve(self) -> bool:
        """Split the batches whose states are kept; False where none holds two prompts."""
        before = len(self._kept)
        self._kept = [half for batch in self._kept for half in batch.halves()]
        return len(self._kept) > before

    def _keep(self, layer: int, states: Tensor, batch: Batch) -> None:
        if layer == 0:
            self._kept.append(_Kept([], batch.lengths))
        self._kept[-1].states.append(states)

    def _measure(self, layer: int, states: Tensor, batch: Batch) -> None:
        self._sums[layer].add(states.double(), batch.lengths)

    def _add_view(
        self, loaded: LoadedModel, ids: list[list[int]], size: BatchSize, final_norm: FinalNorm
    ) -> None:
        import torch

        found: list[Tensor] = []

        def pool(layer: int, states: Tensor, batch: Batch) -> None:
            if layer == len(found):
                found.append(torch.zeros(len(ids), states.shape[-1], dtype=torch.float64))
            found[layer][batch.rows] = masked_mean(states.double(), batch.lengths).cpu()

        forward(loaded, ids, pool, size=size, final_norm=final_norm)
        for layer, means in zip(self._views, found, strict=True):
            layer.append(means)

    def _finished(self, layer: int) -> dict[str, float]:
        import torch

        sums = self._complete(layer)
        values: dict[str, float] = {}
        for name in self._metrics:
            metric = METRICS[name]
            match metric.scope:
                case "prompt" | "tokens":
                    values[name] = sums.of_tokens(name)
                case "dataset":
                    values[name] = float(metric.function(sums.rows().to(self._device)))
                case "views":
                    views = torch.stack(self._views[layer]).to(self._device)
                    values[name] = float(metric.function(views))
                case "layers":
                    rows, last = sums.rows(), self._rows(self.layers - 1)
                    values[name] = float(
                        metric.function(rows.to(self._device), last.to(self._device))
                    )
        return values

    def _complete(self, layer: int) -> _LayerSums:
        """The sums over all batches; those over kept ones are taken now, and not kept."""
        if not self._kept:
            return self._sums[layer]
        sums = _LayerSums(self._metrics)
        for batch in self._kept:
            sums.add(batch.states[layer].double(), batch.lengths)
        return sums

    def _rows(self, layer: int) -> Tensor:
        import torch

        if not self._kept:
            return self._sums[layer].rows()
        means = [masked_mean(batch.states[layer].double(), batch.lengths) for batch in self._kept]
        return torch.cat(means).cpu()


class _LayerSums:
    """What the metrics of one layer need of the batches seen so far."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self._per_prompt: dict[str, list[Tensor]] = {
            name: [] for name in metrics if METRICS[name].scope == "prompt"
        }
        self._direct = any(METRICS[name].scope == "tokens" for name in metrics)
        self._directions: list[tuple[Tensor, Tensor]] = []
        whole = {name for name in metrics if METRICS[name].scope in ("dataset", "layers")}
        self._rows: RowStream | None = RowStream(whole=not whole <= SINGULAR) if whole else None

    def add(self, states: Tensor, lengths: Tensor) -> None:
        if self._rows is not None:
            self._rows.add(masked_mean(states, lengths).cpu())
        if self._direct:
            total, count = unit_row_sum(states, lengths)
            self._directions.append((total.sum(0), count.sum(0)))
        for name, values in self._per_prompt.items():
            values.append(METRICS[name].function(states, lengths))

    def rows(self) -> Tensor:
        """The prompts' means, or rows that stand for them."""
        assert self._rows is not None
        return self._rows.rows()

    def of_tokens(self, name: str) -> float:
        import torch

        if name in self._per_prompt:
            return float(torch.cat(self._per_prompt[name]).mean())
        total = [torch.stack(part).sum(0) for part in zip(*self._directions, strict=True)]
        return float(anisotropy_of_sum(*total))
