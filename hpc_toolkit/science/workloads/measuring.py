"""Compute the metrics of all layers of one checkpoint during one forward pass.

Memory beyond the weights and `onepass`: while a layer is measured, some copies of its states in
float64. From the forward pass on, one mean row of ``8 d`` bytes per layer, prompt and view on the
host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.science.metrics import METRICS, masked_mean
from hpc_toolkit.science.metrics.geometry import anisotropy_of_sum, unit_row_sum
from hpc_toolkit.science.workloads.onepass import BatchSize, distinct, forward, layer_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hpc_toolkit.science.workloads.checkpoints import LoadedModel
    from hpc_toolkit.science.workloads.onepass import Batch, FinalNorm


class MeasuredLayers:
    """The context of one checkpoint: the data that the metrics of its layers need."""

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

        Prompts with the same tokens go through the model once, have the same states, and count as
        often as they occur. Raises PermanentError: the model cannot run on the prompts, or a state
        is not finite.
        """
        import torch

        self.name = loaded.name
        self.layers = layer_count(loaded)
        self._metrics = list(metrics)
        self._device = loaded.device
        self._values: dict[int, dict[str, Any]] = {}
        self._sums = [_LayerSums(self._metrics) for _ in range(self.layers)]
        different, at = distinct(ids)
        self._times = torch.tensor(at).bincount()
        forward(loaded, different, self._measure, size=size, final_norm=final_norm)
        self._views: list[list[Tensor]] = [[] for _ in range(self.layers)]
        for view in views:
            self._add_view(loaded, view, size, final_norm)

    def values(self, layer: int) -> dict[str, Any]:
        """Return every metric of a layer, computed once.

        A metric that is not defined for the layer is None, and ``undefined`` has the reason by its
        name. Raises PermanentError: no metric is defined.
        """
        if layer in self._values:
            return self._values[layer]
        values: dict[str, Any] = {}
        undefined: dict[str, str] = {}
        for name in self._metrics:
            try:
                values[name] = self._value(name, layer)
            except ValueError as error:
                values[name], undefined[name] = None, str(error)
        if len(undefined) == len(values):
            msg = f"{self.name}: layer {layer}: {next(iter(undefined.values()))}"
            raise PermanentError(msg)
        self._values[layer] = {**values, "undefined": undefined} if undefined else values
        return self._values[layer]

    def _measure(self, layer: int, states: Tensor, batch: Batch) -> None:
        self._sums[layer].add(states.double(), batch.lengths, self._times[batch.rows])

    def _add_view(
        self, loaded: LoadedModel, ids: list[list[int]], size: BatchSize, final_norm: FinalNorm
    ) -> None:
        import torch

        found: list[Tensor] = []
        different, at = distinct(ids)

        def pool(layer: int, states: Tensor, batch: Batch) -> None:
            if layer == len(found):
                found.append(torch.zeros(len(different), states.shape[-1]).double())
            found[layer][batch.rows] = masked_mean(states.double(), batch.lengths).cpu()

        forward(loaded, different, pool, size=size, final_norm=final_norm)
        for layer, means in zip(self._views, found, strict=True):
            layer.append(means[at])

    def _value(self, name: str, layer: int) -> float:
        import torch

        metric, sums = METRICS[name], self._sums[layer]
        match metric.scope:
            case "prompt" | "tokens":
                return sums.of_tokens(name)
            case "dataset":
                given = [sums.rows()]
            case "views":
                given = [torch.stack(self._views[layer])]
            case _:  # two layers
                given = [sums.rows(), self._sums[-1].rows()]
        return float(metric.function(*(one.to(self._device) for one in given)))


class _LayerSums:
    """The data that the metrics of one layer need from the batches so far."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self._per_prompt: dict[str, list[Tensor]] = {
            name: [] for name in metrics if METRICS[name].scope == "prompt"
        }
        self._direct = any(METRICS[name].scope == "tokens" for name in metrics)
        self._directions: list[tuple[Tensor, Tensor]] = []
        self._of_means = any(METRICS[name].scope in ("dataset", "layers") for name in metrics)
        self._means: list[Tensor] = []

    def add(self, states: Tensor, lengths: Tensor, times: Tensor) -> None:
        """Add the states of texts, each of which counts ``times`` times."""
        if self._of_means:
            self._means.append(masked_mean(states, lengths).cpu().repeat_interleave(times, dim=0))
        times = times.to(states.device)
        if self._direct:
            total, count = unit_row_sum(states, lengths)
            weighted = total * times.unsqueeze(-1)
            self._directions.append((weighted.sum(0), (count * times).sum(0)))
        for name, values in self._per_prompt.items():
            values.append(METRICS[name].function(states, lengths).repeat_interleave(times))

    def rows(self) -> Tensor:
        """Return the prompts' means ``(n, d)``."""
        import torch

        return torch.cat(self._means)

    def of_tokens(self, name: str) -> float:
        import torch

        if name in self._per_prompt:
            return float(torch.cat(self._per_prompt[name]).mean())
        total = [torch.stack(part).sum(0) for part in zip(*self._directions, strict=True)]
        return float(anisotropy_of_sum(*total))
