"""What the workloads of evaluation harnesses share: items, one model per group, and values."""

from __future__ import annotations

import importlib
import math
import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from hpc_toolkit.errors import ConfigError, PermanentError, near_miss
from hpc_toolkit.science.workloads import fetching
from hpc_toolkit.science.workloads.checkpoints import (
    Dtype,
    LoadedModel,
    load_checkpoint,
    prefetch_checkpoint,
    require_positive,
)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A task's results, as a harness has them."""

    metrics: Mapping[str, tuple[float, float | None]]
    """Numbers with their standard errors, the task's main metric first."""
    less_is_better: Collection[str]
    """Names of metrics."""
    counts: Mapping[str, Any]
    """Further keys of the value: ``n``, ``documents``, ``num_fewshot``, ``version``."""


class HarnessTasks:
    """Workload: item ``{"checkpoint", "task"}`` to the metrics of a task of a harness.

    A group of items, which are those of a checkpoint, uses one model. An item may have
    ``num_fewshot``. Each item loads its task anew after the same seeds, so a value does not depend
    on earlier items.
    """

    harness: ClassVar[str]
    extra: ClassVar[str]
    """The extra of this project that installs the harness."""
    package: ClassVar[str]

    def __init__(
        self,
        *,
        root: str = ".",
        dtype: Dtype = "auto",
        batch_size: int = 16,
        metric: str | Mapping[str, str] = "",
        num_fewshot: int | None = None,
    ) -> None:
        """Options of all harnesses.

        Args:
            root: the directory that contains the checkpoints.
            dtype: the type of the weights: ``auto`` is the one in which they were saved.
            batch_size: the most requests that go through the model together.
            metric: the metric that becomes ``score``: a name for all tasks, or a table of names by
                task. Without it, the first metric of the task.
            num_fewshot: examples in each prompt, unless the item has a number. Without it, the
                harness's default.

        Raises ConfigError: an option is invalid.
        """
        if dtype not in get_args(Dtype):
            raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(get_args(Dtype))}")
        self._root, self._dtype, self._metric = root, dtype, metric
        self._batch_size = require_positive("batch_size", batch_size)
        self._num_fewshot = num_fewshot
        self.loads = 0
        """Models loaded so far."""

    def load_task(self, name: object) -> Any:
        """Return the harness's record of a task with its data set.

        Raises PermanentError: there is no such task, or its data set is not available.
        """
        raise NotImplementedError

    def _import(self) -> None:
        with fetching.harness_package(self.harness, self.extra):
            importlib.import_module(self.package)

    def _wrap(self, loaded: LoadedModel) -> Any:
        """Return a loaded model as a model of the harness, which knows no other ranks."""
        raise NotImplementedError

    def _evaluate(self, context: Any, task: object, shots: int | None) -> Evaluated:
        """Raises PermanentError: as `load_task`, or the task has no value of its own."""
        raise NotImplementedError

    def prefetch(self, group: str) -> None:
        """Prefetch the files of a checkpoint; see `prefetch_checkpoint`."""
        prefetch_checkpoint(self._root, group)

    def fetch(self, items: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """As `fetch_data`."""
        return fetching.fetch_data(items, self.load_task)

    def load(self, group: str) -> Any:
        """Load a checkpoint as a model of the harness.

        Raises PermanentError: it cannot be used. Raises WorkloadError: no harness is installed.
        """
        fetching.no_network_in_jobs()
        # A worker's log needs a line each half minute, not ten each second.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
        self._import()
        loaded = load_checkpoint(self._root, group, head=True, dtype=self._dtype)
        self.loads += 1
        return self._wrap(loaded)

    def on_oom(self, context: Any, items: list[dict[str, Any]]) -> bool:
        """Halve the batches, for this and later checkpoints.

        Return False at one request each, and if the model alone does not fit.
        """
        import torch

        if context is None or self._batch_size == 1:
            return False
        torch.cuda.empty_cache()  # does nothing if CUDA was not used
        self._batch_size //= 2
        return True

    def run(self, context: Any, items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield one value per item, in order.

        Raises PermanentError: the task does not exist, its data set is not available, or it has no
        value of its own.
        """
        for item in items:
            last = context.model.config.num_hidden_layers
            # Of a layer below the last, the score would be that of the complete model.
            if item.get("layer", last) != last:
                msg = f"layer {item['layer']!r}: the harness evaluates complete models"
                hint = f"leave the layer out, or choose the last one, {last}"
                raise PermanentError(msg, hint=hint)
            _seed()
            task = item.get(fetching.TASK)
            shots = item.get("num_fewshot", self._num_fewshot)
            yield self._value(task, self._evaluate(context, task, shots))

    def _value(self, task: Any, found: Evaluated) -> dict[str, Any]:
        name = self._metric if isinstance(self._metric, str) else self._metric.get(task, "")
        name = name or next(iter(found.metrics), "")
        if name not in found.metrics:
            hint = near_miss(name, list(found.metrics))
            raise PermanentError(f"task {task!r} has no metric {name!r}", hint=hint)
        score, stderr = found.metrics[name]
        if not math.isfinite(score):
            raise PermanentError(f"task {task!r}: the metric {name!r} is {score}")
        score = -score if name in found.less_is_better else score
        value = {"score": score, "stderr": stderr, "metric": name, **found.counts}
        for name, (number, error) in found.metrics.items():
            value.setdefault(name, number if math.isfinite(number) else None)
            value.setdefault(f"{name}_stderr", error)
        return value


def _seed() -> None:
    """As ``lm_eval.simple_evaluate``, so that no value depends on the items before."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)


def is_number(value: object) -> bool:
    """Whether a value is a number of Python or of NumPy."""
    import numpy as np

    return isinstance(value, int | float | np.number)
