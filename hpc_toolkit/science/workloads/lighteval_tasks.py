"""Tasks of Hugging Face's lighteval on the language models of checkpoints.

lighteval is imported when the first checkpoint is loaded, only in an executor. Tasks are its own or
those of the Python file or module ``custom_tasks``.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hpc_toolkit.errors import ConfigError, PermanentError, near_miss
from hpc_toolkit.science.workloads import fetching
from hpc_toolkit.science.workloads.checkpoints import LoadedModel, locate, require_positive
from hpc_toolkit.science.workloads.harness import Evaluated, HarnessTasks, is_number


class LightevalTasks(HarnessTasks):
    """Workload: item ``{"checkpoint", "task"}`` to the metrics of a task of lighteval.

    ``task`` is a name that lighteval or ``custom_tasks`` defines, or the common part of several
    names: ``mmlu`` stands for ``mmlu:anatomy`` and the others. Its metrics are their means, and the
    standard errors those of means of independent tasks. An item may have ``num_fewshot``.

    The value has the keys that `LmEvalTasks` has, with lighteval's names of metrics. Numbers are
    those of ``lighteval accelerate`` with the same options.
    """

    harness, extra, package = "lighteval", "lighteval", "lighteval.pipeline"

    def __init__(
        self,
        *,
        limit: int | None = None,
        custom_tasks: str = "",
        multilingual: bool = False,
        system_prompt: str | None = None,
        max_length: int | None = None,
        bootstrap_iters: int = 1000,
        **options: Any,
    ) -> None:
        """lighteval's own options, and those of `HarnessTasks`.

        Args:
            limit: evaluate only so many documents of a task, which lighteval draws.
            custom_tasks: a Python file or module with a ``TASKS_TABLE``. It runs as your code.
            multilingual: know lighteval's multilingual tasks as well.
            system_prompt: text before each prompt of models with a chat template.
            max_length: longer prompts lose their beginning. Without it, the model's own limit.
            bootstrap_iters: draws for standard errors that have no formula; 0: no standard errors.
            options: those of `HarnessTasks`.

        Raises ConfigError: an option is invalid.
        """
        super().__init__(**options)
        if limit is not None:
            require_positive("limit", limit)
        if custom_tasks.endswith(".py") and not Path(custom_tasks).is_file():
            msg = f"custom_tasks: {custom_tasks} is not a file"
            raise ConfigError(msg, hint="name a Python file by its absolute path, or a module")
        self._tasks: dict[str, Any] = {
            "load_multilingual": multilingual,
            "custom_tasks": custom_tasks or None,
        }
        self._parameters: dict[str, Any] = {
            "load_tasks_multilingual": multilingual,
            "custom_tasks_directory": custom_tasks or None,
            "max_samples": limit,
            "bootstrap_iters": bootstrap_iters,
        }
        self._model = {"max_length": max_length, "system_prompt": system_prompt}

    def load_task(self, name: object) -> None:
        """Load the data sets of a task.

        Raises PermanentError: there is no such task, or its data is not available.
        """
        spec = self._spec(name, 0)
        from lighteval.tasks.lighteval_task import LightevalTask
        from lighteval.tasks.registry import Registry

        with fetching.data_of(name):
            tasks = Registry(tasks=spec, **self._tasks).load_tasks()
            LightevalTask.load_datasets(tasks)

    def _import(self) -> None:
        # It looks for git, which a compute node may lack.
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        super()._import()
        _import_tasks()

    def _spec(self, name: object, shots: int) -> str:
        """Return lighteval's notation of a task and the number of its examples.

        An item names tasks alone: lighteval's notation can also be a file with a list of tasks.
        """
        self._import()
        known = _names(**self._tasks)
        if not isinstance(name, str) or name not in known:
            hint = near_miss(str(name), list(known))
            raise PermanentError(f"lighteval has no task {name!r}", hint=hint)
        return f"{name}|{shots}"

    def _wrap(self, loaded: LoadedModel) -> Any:
        import multiprocessing

        from lighteval.models.transformers.transformers_model import (
            TransformersModel,
            TransformersModelConfig,
        )

        # Each bootstrap starts a process on every core of the node, which has other ranks.
        cores = len(os.sched_getaffinity(0))
        multiprocessing.cpu_count = lambda: cores
        with tempfile.TemporaryDirectory() as directory:
            # Its name is part of the path of the cache, and a question to the hub.
            config = TransformersModelConfig(
                model_name="model",
                tokenizer=str(locate(self._root, loaded.name)),
                device=str(loaded.device),
                cache_dir=directory,
                **self._model,
            )
            model = TransformersModel.from_model(loaded.model, config)
        model.cleanup = lambda: None  # which removes the model after the first task
        return model

    def _evaluate(self, context: Any, task: object, shots: int | None) -> Evaluated:
        from lighteval.logging.evaluation_tracker import EvaluationTracker
        from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
        from lighteval.tasks.requests import SamplingMethod

        # lighteval would keep answers by the model's name, and give them to other checkpoints.
        context._cache = SimpleNamespace(_init_registry=lambda _: None)
        with fetching.data_of(task):
            pipeline = Pipeline(
                tasks=self._spec(task, shots or 0),
                pipeline_parameters=PipelineParameters(
                    launcher_type=ParallelismManager.NONE, **self._parameters
                ),
                evaluation_tracker=EvaluationTracker(output_dir=tempfile.gettempdir()),
                model=context,
            )
        context._cache = None
        # lighteval's perplexities fail in batches of texts with different lengths.
        alone = SamplingMethod.PERPLEXITY in pipeline.sampling_docs
        context.config.batch_size = 1 if alone else self._batch_size
        pipeline.evaluate()
        tasks = pipeline.tasks_dict
        versions = {one.version for one in tasks.values()}
        counts = {
            "n": sum(map(len, pipeline.documents_dict.values())),
            "documents": sum(len(one.eval_docs()) for one in tasks.values()),
            "num_fewshot": shots or 0,
            "version": versions.pop() if len(versions) == 1 else None,
        }
        results = pipeline.evaluation_tracker.metrics_logger.metric_aggregated
        metrics = dict(_metrics([results[name] for name in tasks]))
        return Evaluated(metrics, {one for task in tasks.values() for one in _worse(task)}, counts)


@cache
def _import_tasks() -> None:
    """Import each of lighteval's files of tasks; replace those that cannot be imported by none.

    lighteval imports all of them for any task, and a single one that needs a network, a package or
    another version of one would make all tasks fail.
    """
    import nltk
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from lighteval.tasks import tasks

    if HF_HUB_OFFLINE:  # two of them download tokenizers when they are imported, and would wait
        nltk.download = lambda *_, **__: False
    root = Path(tasks.__path__[0])
    for path in sorted([*root.glob("[!_]*.py"), *root.glob("*/main.py")]):
        name = ".".join([tasks.__name__, *path.relative_to(root).with_suffix("").parts])
        try:
            if path.stem != "tiny_benchmarks":  # downloads a pickle when it is imported
                importlib.import_module(name)
                continue
        except Exception as error:  # noqa: BLE001 - any code of any task
            sys.stderr.write(f"lighteval: tasks of {name} are left out: {error!r:.300}\n")
        sys.modules[name] = ModuleType(name)


@cache
def _names(**options: Any) -> frozenset[str]:
    """Names of tasks, and the common parts of several."""
    from lighteval.tasks.registry import Registry

    names = list(Registry.load_all_task_configs(**options))
    common = Counter(name.partition(":")[0] for name in names)
    return frozenset([*names, *(name for name, count in common.items() if count > 1)])


def _metrics(results: list[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[float, float | None]]]:
    """Yield the mean of each metric over tasks, with its standard error."""
    for name in results[0]:
        values: list[Any] = [one.get(name) for one in results]
        if name.endswith("_stderr") or not all(map(is_number, values)):
            continue
        errors: list[Any] = [one.get(f"{name}_stderr") for one in results]
        known = all(map(is_number, errors)) and not any(map(math.isnan, errors))
        error = math.hypot(*errors) / len(results) if known else None
        yield name, (math.fsum(values) / len(results), error)


def _worse(task: Any) -> Iterator[str]:
    """Yield the metrics of a task of which less is better."""
    for metric in task.metrics:
        names, better = metric.metric_name, metric.higher_is_better
        for name in [names] if isinstance(names, str) else names:
            if not (better.get(name, True) if isinstance(better, dict) else better):
                yield name
