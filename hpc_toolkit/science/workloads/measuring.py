"""Compute the metrics of all layers of one checkpoint from the data of one forward pass.

Memory beyond the weights and `onepass`: while a layer is measured, some copies of its states in
float64. From the forward pass on, one mean row of ``8 d`` bytes per layer, prompt and view on the
host, or at most about ``2 d`` rows per layer if every metric depends only on singular values
(`RowStream`). For few prompts, also their states (`KEPT_BYTES`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.science.metrics import METRICS, masked_mean
from hpc_toolkit.science.metrics.geometry import anisotropy_of_sum, unit_row_sum
from hpc_toolkit.science.workloads.onepass import BatchSize, Distinct, forward, layer_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hpc_toolkit.science.workloads.checkpoints import LoadedModel
    from hpc_toolkit.science.workloads.onepass import Batch, FinalNorm


class RowStream:
    """Rows ``(n, d)`` in float64: all rows, or at most about ``2 d`` equivalent rows.

    Up to ``2 (d + 1)`` rows, or with ``whole``, `rows` returns the rows as they came. Of more rows
    it returns ``d + 1`` substitutes with the same singular values and the same direction of the
    mean, or, centred, the same singular values about the mean. A metric that depends only on these
    has the value of all rows, up to the float64 precision of each row relative to the mean. A
    metric that compares single rows needs ``whole``.

    The sum of squares about the mean is kept as a triangular factor, never multiplied out: squaring
    would lose half of the digits of the small singular values. Updates as in Chan, Golub & LeVeque
    1983, "Algorithms for computing the sample variance".
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._parts: list[Tensor] = []
        self._waiting = 0
        self._count = 0
        self._mean: Tensor | None = None
        self._factor: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add rows ``(m, d)``."""
        self._parts.append(rows.double())
        self._waiting += len(rows)
        if not self._whole and self._waiting > 2 * (rows.shape[-1] + 1):
            self._fold()

    def rows(self, *, centred: bool = False) -> Tensor:
        """Return all rows, or their substitutes.

        With ``centred``, for metrics that subtract the mean anyway, substitutes have mean zero:
        adding a mean that is large relative to the spread and subtracting it would lose digits.
        """
        import torch

        if self._factor is None:
            return torch.cat(self._parts)
        self._fold()
        assert self._mean is not None
        d = len(self._mean)
        spread: Tensor = _across_ones(d).to(self._mean.device) @ self._factor
        if centred:
            return spread
        standing: Tensor = spread + (self._count / (d + 1)) ** 0.5 * self._mean
        return standing

    def _fold(self) -> None:
        import torch

        if not self._parts:
            return
        rows = torch.cat(self._parts)
        self._parts, self._waiting = [], 0
        mean = rows.mean(0)
        about = rows - mean
        total = self._count + len(rows)
        if self._factor is None or self._mean is None:
            self._mean = mean
        else:
            apart = mean - self._mean
            weight = (self._count * len(rows) / total) ** 0.5
            about = torch.cat([self._factor, about, weight * apart.unsqueeze(0)])
            self._mean = self._mean + apart * (len(rows) / total)
        self._factor = torch.linalg.qr(about, mode="r").R
        self._count = total


def _across_ones(d: int) -> Tensor:
    """``(d + 1, d)`` orthonormal columns, each of which sums to zero (Helmert's)."""
    import torch

    k = torch.arange(1, d + 1, dtype=torch.float64)
    below: Tensor = torch.arange(d + 1).unsqueeze(1) < k.long()
    at = torch.arange(d + 1).unsqueeze(1) == k.long()
    columns: Tensor = (below.double() - at.double() * k) / (k * (k + 1)).sqrt()
    return columns


KEPT_BYTES = 2**29
"""Hidden states of all layers are kept up to this size, and each layer's metrics are computed when
its item runs. Beyond it, metrics of tokens are computed during the forward pass, layer by layer."""

CENTRED = frozenset({"effective_rank", "alpha_req"})
"""Metrics of the prompt means that depend only on the singular values about the mean."""

SINGULAR = CENTRED | {"rankme"}
"""Metrics of the prompt means that depend only on singular values."""


@dataclass(slots=True)
class _Kept:
    """A batch with its states at every layer."""

    states: list[Tensor]
    lengths: Tensor
    times: Tensor
    """Number of prompts with each text's tokens."""

    def halves(self) -> list[_Kept]:
        """Return two batches with the same states, or this batch if it holds one text. The states
        are not copied.
        """
        middle = len(self.lengths) // 2
        if middle == 0:
            return [self]
        return [
            _Kept([state[part] for state in self.states], self.lengths[part], self.times[part])
            for part in (slice(None, middle), slice(middle, None))
        ]


class MeasuredLayers:
    """The context of one checkpoint: the states of its layers, or the data that metrics need."""

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
        often as they occur.

        Raises:
            PermanentError: the model cannot run on the prompts, or a state is not finite.
        """
        import torch

        self.name = loaded.name
        self.layers = layer_count(loaded)
        self._metrics = list(metrics)
        self._device = loaded.device
        self._values: dict[int, dict[str, Any]] = {}
        self._kept: list[_Kept] = []
        self._sums = [_LayerSums(self._metrics) for _ in range(self.layers)]
        different = Distinct.of(ids)
        self._times = torch.tensor(different.at).bincount()
        state_bytes = 4 * self.layers * int(loaded.model.config.hidden_size)
        # Padding fills a batch up to its longest prompt, hence the factor of two.
        keep = 2 * sum(map(len, different.ids)) * state_bytes <= KEPT_BYTES
        consume = self._keep if keep else self._measure
        forward(loaded, different.ids, consume, size=size, final_norm=final_norm)
        self._views: list[list[Tensor]] = [[] for _ in range(self.layers)]
        for view in views:
            self._add_view(loaded, view, size, final_norm)

    def values(self, layer: int) -> dict[str, Any]:
        """Return every metric of a layer, computed once.

        A metric that is not defined for the layer is None, and ``undefined`` has the reason by its
        name.

        Raises:
            PermanentError: no metric is defined.
        """
        if layer not in self._values:
            self._values[layer] = self._finished(layer)
        return self._values[layer]

    def halve(self) -> bool:
        """Split the batches whose states are kept; return False if none holds two prompts."""
        before = len(self._kept)
        self._kept = [half for batch in self._kept for half in batch.halves()]
        return len(self._kept) > before

    def _keep(self, layer: int, states: Tensor, batch: Batch) -> None:
        if layer == 0:
            self._kept.append(_Kept([], batch.lengths, self._times[batch.rows]))
        self._kept[-1].states.append(states)

    def _measure(self, layer: int, states: Tensor, batch: Batch) -> None:
        self._sums[layer].add(states.double(), batch.lengths, self._times[batch.rows])

    def _add_view(
        self, loaded: LoadedModel, ids: list[list[int]], size: BatchSize, final_norm: FinalNorm
    ) -> None:
        import torch

        found: list[Tensor] = []
        different = Distinct.of(ids)

        def pool(layer: int, states: Tensor, batch: Batch) -> None:
            if layer == len(found):
                found.append(torch.zeros(len(different.ids), states.shape[-1]).double())
            found[layer][batch.rows] = masked_mean(states.double(), batch.lengths).cpu()

        forward(loaded, different.ids, pool, size=size, final_norm=final_norm)
        for layer, means in zip(self._views, found, strict=True):
            layer.append(means[different.at])

    def _finished(self, layer: int) -> dict[str, Any]:
        sums = self._complete(layer)
        values: dict[str, Any] = {}
        undefined: dict[str, str] = {}
        for name in self._metrics:
            try:
                values[name] = self._value(name, layer, sums)
            except ValueError as error:
                values[name], undefined[name] = None, str(error)
        if len(undefined) == len(values):
            msg = f"{self.name}: layer {layer}: {next(iter(undefined.values()))}"
            raise PermanentError(msg)
        return {**values, "undefined": undefined} if undefined else values

    def _value(self, name: str, layer: int, sums: _LayerSums) -> float:
        import torch

        metric = METRICS[name]
        match metric.scope:
            case "prompt" | "tokens":
                return sums.of_tokens(name)
            case "dataset":
                given = [sums.rows(centred=name in CENTRED)]
            case "views":
                given = [torch.stack(self._views[layer])]
            case _:  # two layers
                given = [sums.rows(), self._rows(self.layers - 1)]
        return float(metric.function(*(one.to(self._device) for one in given)))

    def _complete(self, layer: int) -> _LayerSums:
        """Return the sums over all batches; sums over kept states are computed now, not stored."""
        if not self._kept:
            return self._sums[layer]
        sums = _LayerSums(self._metrics)
        for batch in self._kept:
            sums.add(batch.states[layer].double(), batch.lengths, batch.times)
        return sums

    def _rows(self, layer: int) -> Tensor:
        import torch

        if not self._kept:
            return self._sums[layer].rows()
        means = [
            masked_mean(batch.states[layer].double(), batch.lengths)
            .cpu()
            .repeat_interleave(batch.times, dim=0)
            for batch in self._kept
        ]
        return torch.cat(means)


class _LayerSums:
    """The data that the metrics of one layer need from the batches so far."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self._per_prompt: dict[str, list[Tensor]] = {
            name: [] for name in metrics if METRICS[name].scope == "prompt"
        }
        self._direct = any(METRICS[name].scope == "tokens" for name in metrics)
        self._directions: list[tuple[Tensor, Tensor]] = []
        whole = {name for name in metrics if METRICS[name].scope in ("dataset", "layers")}
        self._rows: RowStream | None = RowStream(whole=not whole <= SINGULAR) if whole else None

    def add(self, states: Tensor, lengths: Tensor, times: Tensor) -> None:
        """Add the states of texts, each of which counts ``times`` times."""
        if self._rows is not None:
            self._rows.add(masked_mean(states, lengths).cpu().repeat_interleave(times, dim=0))
        times = times.to(states.device)
        if self._direct:
            total, count = unit_row_sum(states, lengths)
            weighted = total * times.unsqueeze(-1)
            self._directions.append((weighted.sum(0), (count * times).sum(0)))
        for name, values in self._per_prompt.items():
            values.append(METRICS[name].function(states, lengths).repeat_interleave(times))

    def rows(self, *, centred: bool = False) -> Tensor:
        """Return the prompts' means, or substitutes for them; see `RowStream.rows`."""
        assert self._rows is not None
        return self._rows.rows(centred=centred)

    def of_tokens(self, name: str) -> float:
        import torch

        if name in self._per_prompt:
            return float(torch.cat(self._per_prompt[name]).mean())
        total = [torch.stack(part).sum(0) for part in zip(*self._directions, strict=True)]
        return float(anisotropy_of_sum(*total))
