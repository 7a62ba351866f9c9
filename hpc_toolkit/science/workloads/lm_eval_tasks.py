"""Tasks of EleutherAI's lm-evaluation-harness on the language models of checkpoints.

The harness is imported when the first checkpoint is loaded, only in an executor. Tasks are its own
or YAML files of the user, in directories of the option ``include_path``.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from hpc_toolkit.errors import ConfigError, PermanentError, near_miss
from hpc_toolkit.science.workloads import (
    TASK,
    data_of,
    fetch_data,
    harness_package,
    no_network_in_jobs,
)
from hpc_toolkit.science.workloads.checkpoints import (
    Dtype,
    load_checkpoint,
    prefetch_checkpoint,
    require_positive,
)

_HARNESS, _EXTRA = "lm-evaluation-harness", "harness"


class LmEvalTasks:
    """Workload: item ``{"checkpoint", "task"}`` to the metrics of a task of lm-evaluation-harness.

    ``task`` is a name that the harness or a YAML file below ``include_path`` defines. A group of
    the harness, such as ``mmlu``, has the value that the harness aggregates. An item may have
    ``num_fewshot``.

    The value is ``{"score", "stderr", "metric", "n", "documents", "num_fewshot", "version"}`` and
    every metric of the task with its standard error, such as ``acc`` and ``acc_stderr``, under the
    harness's names: ``exact_match:strict-match`` is the metric ``exact_match`` after the filter
    ``strict-match``. ``n`` documents of all ``documents`` were evaluated. Standard errors are None
    where the harness has none.

    Numbers are those of ``lm_eval`` with the same options; bootstrapped standard errors use fewer
    draws. A task whose own number of examples is 0 keeps it. A group of items, which are those of a
    checkpoint, uses one model. Each item loads its task anew after the same seeds, so a value does
    not depend on earlier items.
    """

    def __init__(
        self,
        *,
        root: str = ".",
        dtype: Dtype = "auto",
        batch_size: int = 16,
        metric: str | Mapping[str, str] = "",
        num_fewshot: int | None = None,
        limit: float | None = None,
        include_path: str | Iterable[str] = (),
        apply_chat_template: bool = False,
        system_instruction: str | None = None,
        max_length: int | None = None,
        bootstrap_iters: int = 1000,
        confirm_run_unsafe_code: bool = False,
    ) -> None:
        """Options of the workload.

        Args:
            root: the directory that contains the checkpoints.
            dtype: the type of the weights: ``auto`` is the one in which they were saved.
            batch_size: the most requests that go through the model together.
            metric: the metric that becomes ``score``: a name for all tasks, or a table of names by
                task. Without it, the first metric of the task.
            num_fewshot: examples in each prompt, unless the item has a number. Without it, the
                harness's default.
            limit: evaluate only the first documents of a task: a number, or a share below 1.
            include_path: directories with YAML files of tasks. Their functions run as your code.
            apply_chat_template: format prompts by the tokenizer's chat template.
            system_instruction: text before each prompt.
            max_length: longer prompts lose their beginning. Without it, the model's own limit.
            bootstrap_iters: draws for standard errors that have no formula; 0: no standard errors.
            confirm_run_unsafe_code: allow tasks that run code which the model wrote.

        Raises ConfigError: an option is invalid.
        """
        if dtype not in get_args(Dtype):
            raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(get_args(Dtype))}")
        if limit is not None and (isinstance(limit, str | bool) or not 0 < limit < math.inf):
            raise ConfigError(f"limit: {limit!r} is not a positive number")
        paths = [include_path] if isinstance(include_path, str) else list(include_path)
        for path in paths:
            if not Path(path).is_dir():
                msg = f"include_path: {path} is not a directory"
                raise ConfigError(msg, hint="name directories with YAML files, by absolute paths")
        self._root, self._dtype, self._metric = root, dtype, metric
        self._batch_size = require_positive("batch_size", batch_size)
        self._num_fewshot = num_fewshot
        self._include_path = tuple(paths)
        self._max_length = max_length
        self._unsafe = confirm_run_unsafe_code
        self._options = {
            "limit": limit,
            "apply_chat_template": apply_chat_template,
            "system_instruction": system_instruction,
            "fewshot_as_multiturn": apply_chat_template,
            "bootstrap_iters": bootstrap_iters,
            "confirm_run_unsafe_code": confirm_run_unsafe_code,
        }
        self.loads = 0
        """Models loaded so far."""

    def prefetch(self, group: str) -> None:
        """Prefetch the files of a checkpoint; see `prefetch_checkpoint`."""
        prefetch_checkpoint(self._root, group)

    def fetch(self, items: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """As `fetch_data`."""
        return fetch_data(items, self.load_task)

    def load(self, group: str) -> Any:
        """Load a checkpoint as a model of the harness.

        Raises PermanentError: it cannot be used. Raises WorkloadError: no harness is installed.
        """
        no_network_in_jobs()
        # A worker's log needs a line each half minute, not ten each second.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
        # Otherwise each rank starts a process on every core of the node to draw samples.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        with harness_package(_HARNESS, _EXTRA):
            from lm_eval.models.huggingface import HFLM
        loaded = load_checkpoint(self._root, group, head=True, dtype=self._dtype)
        self.loads += 1
        return HFLM(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            batch_size=self._batch_size,
            max_length=self._max_length,
        )

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
            shots = item.get("num_fewshot", self._num_fewshot)
            yield self._evaluate(context, item.get(TASK), shots)

    def _evaluate(self, context: Any, task: Any, shots: int | None) -> dict[str, Any]:
        from lm_eval.evaluator import evaluate

        tasks = self.load_task(task)
        _set_fewshot(tasks, shots)
        context.batch_size_per_gpu = self._batch_size
        found = evaluate(context, tasks, log_samples=False, **self._options)
        own = found["results"][task]
        metrics = dict(_metrics(own))
        name = self._metric if isinstance(self._metric, str) else self._metric.get(task, "")
        name = name or next(iter(metrics), "")
        if name not in metrics:
            hint = near_miss(name, list(metrics))
            raise PermanentError(f"task {task!r} has no metric {name!r}", hint=hint)
        score, stderr = metrics[name]
        if not math.isfinite(score):
            raise PermanentError(f"task {task!r}: the metric {name!r} is {score}")
        better = found["higher_is_better"].get(task, {})
        value = {
            "score": -score if better.get(name.partition(":")[0]) is False else score,
            "stderr": stderr,
            "metric": name,
            "n": own["sample_len"],
            "documents": sum(one["original"] for one in found["n-samples"].values()),
            "num_fewshot": found["n-shot"].get(task),
            "version": found["versions"].get(task),
        }
        for name, (number, error) in metrics.items():
            value.setdefault(name, number if math.isfinite(number) else None)
            value.setdefault(f"{name}_stderr", error)
        return value

    def load_task(self, name: object) -> Any:
        """Return the harness's record of a task or group with all data sets.

        Raises PermanentError: there is no such task, it has no value, its data is not available, or
        it runs code of the model.
        """
        known = self._known(name)
        # Only names: a path of a YAML file would let an item choose code that runs.
        if not isinstance(name, str) or name not in known.task_index:
            hint = near_miss(str(name), known.all_tasks)
            raise PermanentError(f"lm-evaluation-harness has no task {name!r}", hint=hint)
        entry = known.task_index[name]
        if members := _members(entry):
            msg = f"task {name!r} is a name for several tasks without a common value"
            raise PermanentError(msg, hint=f"write an item for each: {', '.join(members):.400}")
        with data_of(name):
            tasks = known.load([name])
        unsafe = any(getattr(task, "UNSAFE_CODE", False) for task in tasks["tasks"].values())
        if unsafe and not self._unsafe:
            msg = f"task {name!r} runs code that the model wrote"
            hint = "allow it by the option confirm_run_unsafe_code, and HF_ALLOW_CODE_EVAL=1"
            raise PermanentError(msg, hint=hint)
        return tasks

    def _known(self, name: object) -> Any:
        """An index that has the task and its members, if there is one.

        The index of all of the harness's own tasks reads 14,000 files in 15 s. Those in directories
        that the name begins with are enough for most.
        """
        with harness_package(_HARNESS, _EXTRA):
            from lm_eval.tasks import manager
        own = Path(manager.__file__).parent
        near = [
            str(own / one)
            for one in sorted(os.listdir(own))
            if str(name).startswith(one) and (own / one).is_dir()
        ]
        some = _index((*near, *self._include_path), defaults=False)
        return some if _has(some, name) else _index(self._include_path, defaults=True)


def _seed() -> None:
    """As ``lm_eval.simple_evaluate``, so that no value depends on the items before."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)


def _is_number(value: object) -> bool:
    """Whether a value is a number of Python or of NumPy."""
    import numpy as np

    return isinstance(value, int | float | np.number)


def _set_fewshot(tasks: Mapping[str, Any], wanted: int | None) -> None:
    """As ``lm_eval.simple_evaluate``: a task whose own number is 0 keeps it."""
    for task in tasks["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (wanted is not None and own != 0):
            task.set_config(key="num_fewshot", value=wanted or 0)
        task.set_fewshot_seed(seed=1234)


@cache
def _index(include_path: tuple[str, ...], *, defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(include_path) or None, include_defaults=defaults)


def _has(index: Any, name: object) -> bool:
    """Whether an index has a task, or a group with all of its members."""
    entry = index.task_index.get(name)
    if entry is None or entry.kind.name != "GROUP":
        return entry is not None
    return all(_has(index, one) for one in _names(entry))


def _names(group: Any) -> list[str]:
    names = group.cfg["task"]
    return [str(one.get("task", one)) if isinstance(one, dict) else one for one in names]


def _members(entry: Any) -> list[str]:
    """Return the tasks of a tag, or of a group without a value of its own; else nothing."""
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    if entry.kind.name == "GROUP" and not entry.cfg.get("aggregate_metric_list"):
        return _names(entry)
    return []


def _metrics(own: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, float | None]]]:
    """Yield each number of a task's results, with its standard error; the filter ``none`` is left
    out of names.
    """
    for key, value in own.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not _is_number(value):
            continue
        error: Any = own.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric}:{kind}"
        yield name, (float(value), float(error) if _is_number(error) else None)
