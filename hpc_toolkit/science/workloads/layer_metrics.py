"""The metrics stage: representation metrics of every layer, one forward pass per checkpoint.

Memory beyond the weights and `onepass`: while a layer is measured, some copies of its states in
float64. From the forward pass on, one mean row of ``8 d`` bytes per layer, prompt and view on the
host.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, PermanentError, near_miss
from hpc_toolkit.science.metrics import METRICS, STANDARD, Metric, masked_mean
from hpc_toolkit.science.metrics.matrix import anisotropy_of_sum, unit_row_sum
from hpc_toolkit.science.workloads import onepass
from hpc_toolkit.science.workloads.checkpoints import LoadedModel, require_layer, require_positive
from hpc_toolkit.science.workloads.embeddings import pooled
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from torch import Tensor


SHARE = 0.1
"""Share of the words that are changed; at least one word, if any word has two letters."""

_WORDS = re.compile(r"\S+")
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def augment(text: str, view: int) -> str:
    """Return view ``view`` of ``text``: the same for the same text and number, anywhere.

    Words keep their order and their number of letters, but may be split. A text without a word of
    two letters is unchanged.
    """
    digest = hashlib.sha256(f"0:{view}:{text}".encode("utf-8", "surrogatepass")).digest()
    draw = random.Random(digest)
    words = [match for match in _WORDS.finditer(text) if len(match.group()) > 1]
    count = min(len(words), max(1, round(SHARE * len(words))))
    parts, at = [], 0
    for match in sorted(draw.sample(words, count), key=lambda match: match.start()):
        change = draw.choice((_split, _swapped, _mistyped))
        parts += [text[at : match.start()], change(match.group(), draw)]
        at = match.end()
    return "".join([*parts, text[at:]])


def _split(word: str, draw: random.Random) -> str:
    at = draw.randrange(1, len(word))
    return f"{word[:at]} {word[at:]}"


def _swapped(word: str, draw: random.Random) -> str:
    pairs = [at for at in range(len(word) - 1) if word[at] != word[at + 1]]
    if not pairs:
        return _split(word, draw)
    at = draw.choice(pairs)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _mistyped(word: str, draw: random.Random) -> str:
    letters = [at for at, letter in enumerate(word) if any(letter in row for row in _ROWS)]
    if not letters:
        return _swapped(word, draw)
    at = draw.choice(letters)
    row = next(row for row in _ROWS if word[at] in row)
    key = row.index(word[at])
    beside = [row[near] for near in (key - 1, key + 1) if 0 <= near < len(row)]
    return word[:at] + draw.choice(beside) + word[at + 1 :]


class LayerMetrics(onepass.OfCheckpoints):
    """Workload: item ``{"checkpoint", "layer"}`` to ``{"layer", "<metric>": float, ...}``.

    A metric that is not defined for a layer is None, and the value also has
    ``{"undefined": {"<metric>": reason}}``. If no metric is defined, the item fails for good.

    Layer 0 is the embeddings and layer L the last block *after* the final norm. The option
    ``final_norm`` says how the layers below L are taken: see `FinalNorm`.
    """

    def __init__(
        self,
        *,
        prompts: str | Sequence[str],
        max_tokens: int = 256,
        batch_size: int = 16,
        metrics: Sequence[str] | None = None,
        views: int = 2,
        **options: Any,
    ) -> None:
        """Options of the workload, beside those of `OfCheckpoints`.

        Args:
            prompts: a list of texts, or the path of a file with one text per line.
            metrics: names in `METRICS`; `STANDARD` by default. A metric of views costs a forward
                pass over each view. ``module:name`` is a metric of the user's: a `Metric`, or a
                function of the prompts' means, shape (prompts, features), that returns a number.
            views: number of augmentations of each prompt, for the metrics that compare them.

        Raises ConfigError: an unknown metric or convention, no metric, or a number that is not
        positive.
        """
        super().__init__(max_tokens=max_tokens, batch_size=batch_size, **options)
        self._metrics = require_metrics(STANDARD if metrics is None else metrics)
        self._prompts = prompts
        self._views = self._require_views(views)
        self.forwards = 0
        """Number of forward passes over the prompts, or over a view of them, so far."""

    def load(self, group: str) -> MeasuredLayers:
        """Load a checkpoint and run its forward passes; the model is dropped afterwards.

        Raises PermanentError: the checkpoint or the prompts cannot be used, or a metric needs more
        prompts, or longer ones.
        """
        prompts = self._read_prompts()
        loaded = self.load_model(group)
        ids = self._tokenize(loaded, prompts)
        texts = ([augment(text, view) for text in prompts] for view in range(self._views))
        views = [onepass.tokenize(loaded, view, self._max_tokens) for view in texts]
        self.forwards += 1 + len(views)
        return MeasuredLayers(
            loaded, ids, self._metrics, size=self._size, final_norm=self._final_norm, views=views
        )

    def run(
        self, context: MeasuredLayers, items: Iterable[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Yield one result per item, in order; a layer is finished only when its item is taken."""
        for item in items:
            layer = require_layer(item, context.layers, context.name)
            yield {"layer": layer, **context.values(layer)}

    def on_oom(self, context: MeasuredLayers | None, items: list[dict[str, Any]]) -> bool:
        """Halve the batches if the forward pass did not fit; later metrics do not depend on them.

        Return False at one prompt each. Sums over prompts are then computed in another order, which
        can change their last digits.
        """
        return context is None and self.halve()

    def _require_views(self, views: int) -> int:
        """Return the number of views to make: 0 if no metric compares views."""
        require_positive("views", views)
        comparing = [name for name, one in self._metrics.items() if one.scope == "views"]
        if comparing and views < 2:
            raise ConfigError(f"views: {views}, but {comparing[0]} compares at least 2")
        return views if comparing else 0

    def _tokenize(self, loaded: LoadedModel, prompts: list[str]) -> list[list[int]]:
        ids = onepass.tokenize(loaded, prompts, self._max_tokens)
        for name, metric in self._metrics.items():
            fewest = metric.fewest if _of_tokens(metric) else 0
            for row, tokens in enumerate(ids):
                if len(tokens) < fewest:
                    count = counted(len(tokens), "token")
                    msg = f"prompt {row + 1} has {count}: {prompts[row][:40]!r}"
                    raise PermanentError(msg, hint=f"{name} needs at least {fewest} of each prompt")
        return ids

    def _read_prompts(self) -> list[str]:
        if isinstance(self._prompts, str):
            try:
                lines = Path(self._prompts).read_text(encoding="utf-8").splitlines()
            except FileNotFoundError:
                msg = f"{self._prompts}: no such file of prompts"
                raise PermanentError(msg, hint="write one prompt per line") from None
            where = self._prompts
        else:
            lines, where = list(self._prompts), "prompts"
        prompts = [line for line in lines if line.strip()]
        if len(prompts) < 2:
            msg = f"{where}: {counted(len(prompts), 'prompt')}, at least 2 are needed"
            raise PermanentError(msg)
        different = len(set(prompts))
        for name, metric in self._metrics.items():
            fewest = metric.fewest
            if different < fewest and not _of_tokens(metric):
                msg = (
                    f"{where}: {counted(different, 'different prompt')}, but {name} needs {fewest}"
                )
                raise PermanentError(msg, hint="remove it from metrics, or give more prompts")
        return prompts


def require_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """The metrics by their names in results."""
    if isinstance(names, str) or not names:
        msg = f"metrics: {names!r} is not a list of names"
        raise ConfigError(msg, hint=f"such as {json.dumps(STANDARD[:2])}")
    found: dict[str, Metric] = {}
    for name in names:
        own = str(name).rpartition(":")[2]
        if own != name:
            if own in METRICS or own in found:
                msg = f"metrics: {name!r} would be a second metric {own!r} in the results"
                raise ConfigError(msg, hint="rename the function")
            found[own] = _own_metric(name)
        elif name not in METRICS:
            msg = f"metrics: unknown metric {name!r}"
            raise ConfigError(msg, hint=near_miss(name, list(METRICS)))
        else:
            found[name] = METRICS[name]
    return found


def _own_metric(name: str) -> Metric:
    module, _, attribute = name.partition(":")
    try:
        own = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        msg = f"metrics: {name!r}: {error}"
        raise ConfigError(msg, hint="write module:function, in a module beside the run") from error
    if isinstance(own, Metric) and own.scope != "tokens":
        return own
    if isinstance(own, Metric):
        # Tokens are never kept together: the anisotropy of all prompts is computed from sums.
        msg = f"metrics: {name!r} has the scope 'tokens', which is for anisotropy only"
        raise ConfigError(msg, hint="use 'prompt' or 'dataset'")
    if not callable(own):
        msg = f"metrics: {name!r} is a {type(own).__name__}"
        raise ConfigError(msg, hint="name a function of the prompts' means, or a Metric")
    return Metric("dataset", own, own.__doc__ or name)


def _of_tokens(metric: Metric) -> bool:
    return metric.scope in ("prompt", "tokens")


class MeasuredLayers:
    """The context of one checkpoint: the data that the metrics of its layers need."""

    def __init__(
        self,
        loaded: LoadedModel,
        ids: list[list[int]],
        metrics: Mapping[str, Metric],
        *,
        size: onepass.BatchSize,
        final_norm: onepass.FinalNorm = "raw",
        views: Sequence[list[list[int]]] = (),
    ) -> None:
        """Run the model over the prompts, and over each of their ``views``.

        Prompts with the same tokens go through the model once, have the same states, and count as
        often as they occur. Raises PermanentError: the model cannot run on the prompts, or a state
        is not finite.
        """
        import torch

        self.name = loaded.name
        self.layers = onepass.layer_count(loaded)
        self._metrics = metrics
        self._device = loaded.device
        self._values: dict[int, dict[str, Any]] = {}
        self._sums = [_LayerSums(metrics) for _ in range(self.layers)]
        different, at = onepass.distinct(ids)
        times = torch.tensor(at).bincount()

        def measure(layer: int, states: Tensor, batch: onepass.Batch) -> None:
            self._sums[layer].add(states.double(), batch.lengths, times[batch.rows])

        onepass.forward(loaded, different, measure, size=size, final_norm=final_norm)
        self._views = [
            pooled(loaded, view, size=size, final_norm=final_norm, mean=masked_mean)
            for view in views
        ]

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
            raise PermanentError(f"{self.name}: layer {layer}: {next(iter(undefined.values()))}")
        self._values[layer] = {**values, "undefined": undefined} if undefined else values
        return self._values[layer]

    def _value(self, name: str, layer: int) -> float:
        import torch

        metric, sums = self._metrics[name], self._sums[layer]
        match metric.scope:
            case "prompt" | "tokens":
                return sums.of_tokens(name)
            case "dataset":
                given = sums.rows()
            case _:
                given = torch.stack([view[layer] for view in self._views])
        return float(metric.function(given.to(self._device)))


class _LayerSums:
    """The data that the metrics of one layer need from the batches so far."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._per_prompt: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._directions: list[tuple[Tensor, Tensor]] = []
        self._means: list[Tensor] = []

    def add(self, states: Tensor, lengths: Tensor, times: Tensor) -> None:
        """Add the states of texts, each of which counts ``times`` times."""
        scopes = {metric.scope for metric in self._metrics.values()}
        if "dataset" in scopes:
            self._means.append(masked_mean(states, lengths).cpu().repeat_interleave(times, dim=0))
        times = times.to(states.device)
        if "tokens" in scopes:
            total, count = unit_row_sum(states, lengths)
            weighted = total * times.unsqueeze(-1)
            self._directions.append((weighted.sum(0), (count * times).sum(0)))
        for name, metric in self._metrics.items():
            if metric.scope == "prompt":
                values = metric.function(states, lengths).repeat_interleave(times)
                self._per_prompt[name].append(values)

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
