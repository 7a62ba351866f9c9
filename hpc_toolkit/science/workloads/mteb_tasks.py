"""The tasks stage with tasks of mteb 2.x, its own or the user's, on one layer of a checkpoint.

Any text task works. mteb is imported when the first checkpoint is loaded, which takes seconds, and
only in an executor.
"""

from __future__ import annotations

import importlib
import math
import os
import tempfile
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, PermanentError
from hpc_toolkit.science.workloads import data_of, fetch_data, harness_package
from hpc_toolkit.science.workloads.checkpoints import require_layer
from hpc_toolkit.science.workloads.embeddings import EmbeddedTexts, SharedEmbeddings

if TYPE_CHECKING:
    import numpy as np


def model_of(checkpoint: str, layer: int) -> tuple[str, str]:
    """Return the model name and the revision that identify one layer of a checkpoint in mteb.

    ``org/name@step1`` is ``org/name`` and ``step1-layer3``; a directory ``a/b/step1`` is
    ``local/a_b_step1`` and ``layer3``.
    """
    name, at, revision = checkpoint.partition("@")
    if at:
        return name, f"{revision.replace('/', '_')}-layer{layer}"
    return f"local/{checkpoint.strip('/').replace('/', '_')}", f"layer{layer}"


def main_error(result: Mapping[str, Any], metric: str) -> float | None:
    """Return the standard error of a result's mean main score, over mteb's repetitions.

    None if a split or subset was scored only once. It measures the effect of mteb's own draws of
    training texts or clusters, not of other texts.
    """
    errors = []
    for entries in result["scores"].values():
        for entry in entries:
            repeated = _repetitions(entry, metric)
            if len(repeated) < 2:
                return None
            mean = math.fsum(repeated) / len(repeated)
            squares = math.fsum((one - mean) ** 2 for one in repeated)
            errors.append(squares / (len(repeated) - 1) / len(repeated))
    return math.sqrt(math.fsum(errors)) / len(errors) if errors else None


def plain(value: Any) -> Any:
    """Convert a value to strict JSON: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _repetitions(entry: Mapping[str, Any], metric: str) -> list[float]:
    """Return the main score of each repetition of one split and subset; empty without any."""
    repeated = entry.get("scores_per_experiment")
    if isinstance(repeated, list):
        found = [one.get(metric) for one in repeated if isinstance(one, dict)]
    else:
        levels = entry.get("v_measures" if metric == "v_measure" else f"{metric}_scores")
        if isinstance(levels, dict):
            levels = [one for level in levels.values() for one in level]
        found = levels if isinstance(levels, list) else []
    return [float(one) for one in found if isinstance(one, int | float)]


class MtebTasks(EmbeddedTexts):
    """Workload: item ``{"checkpoint", "layer", "task"}`` to the main score of an mteb task.

    ``task`` is a name that mteb knows, or ``module:Class`` of the user's own ``AbsTask``, which is
    imported from where the run was created. The module must be in the option ``own_tasks``, because
    importing it runs its code, and items may come from other people than the workload's options.

    The value is ``{"score", "stderr", "n", "metric", "kind", "mteb"}``: ``score`` is the mean of
    mteb's main score over splits and subsets, ``stderr`` its standard error over mteb's own
    repetitions (None without repetitions), ``n`` the number of embedded texts, training texts
    included, and ``mteb`` the result as mteb writes it.

    Each item creates and loads its task anew, because mteb draws samples from a random state in the
    task object; so a score does not depend on earlier items. All layers of the checkpoint share the
    embeddings of the texts. Embeddings are not centred and no prompts are added.
    """

    def __init__(
        self, *, max_tokens: int = 512, own_tasks: Collection[str] = (), **options: Any
    ) -> None:
        """``own_tasks`` are modules whose classes an item may name; the other options are those of
        `EmbeddedTexts`. Raises ConfigError: an option is invalid.
        """
        super().__init__(max_tokens=max_tokens, **options)
        if isinstance(own_tasks, str) or not all(isinstance(name, str) for name in own_tasks):
            msg = f"own_tasks: {own_tasks!r} is not a list of modules"
            raise ConfigError(msg, hint='such as ["headlines"]')
        self._own_tasks = frozenset(own_tasks)

    def load(self, group: str) -> SharedEmbeddings:
        """Load a checkpoint. Raises PermanentError: it cannot be used. Raises WorkloadError: mteb
        is not installed.
        """
        _import_mteb()
        return super().load(group)

    def run(
        self, context: SharedEmbeddings, items: Iterable[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """Yield one value per item, in order.

        Raises PermanentError: the item's task or layer does not exist, or its texts are not
        available.
        """
        for item in items:
            layer = require_layer(item, context.layers, context.name)
            yield _evaluate(item.get("task"), LayerEncoder(context, layer), self._own_tasks)

    def fetch(self, items: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """As `fetch_data`."""
        _import_mteb()
        return fetch_data(items, lambda name: _load_task(name, self._own_tasks))


class LayerEncoder:
    """One layer of a checkpoint as a model that implements mteb's ``EncoderProtocol``."""

    def __init__(self, context: SharedEmbeddings, layer: int) -> None:
        from mteb.models import ModelMeta

        self._context = context
        self._layer = layer
        self.encoded = 0
        """Number of texts encoded so far."""
        name, revision = model_of(context.name, layer)
        self.mteb_model_meta = ModelMeta.create_empty(
            overwrites={"name": name, "revision": revision}
        )
        """The model's name and revision in mteb's results."""

    def encode(self, inputs: Iterable[dict[str, Any]], **_: Any) -> np.ndarray:
        """Return float32 ``(n, d)`` of all texts of the batches; an empty text counts as one space.

        The rows are a copy, since a task may write into them.
        """
        texts = [text or " " for batch in inputs for text in batch["text"]]
        self.encoded += len(texts)
        return self._context.of(texts, self._layer).copy()

    def similarity(self, first: Any, second: Any) -> Any:
        """Return the cosines of all pairs, ``(n, m)``."""
        from mteb.similarity_functions import cos_sim

        return cos_sim(first, second)

    def similarity_pairwise(self, first: Any, second: Any) -> Any:
        """Return the cosines of rows with equal indices, ``(n,)``."""
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(first, second)


def _evaluate(name: object, encoder: LayerEncoder, modules: Collection[str]) -> dict[str, Any]:
    import datasets
    import mteb

    with warnings.catch_warnings():
        # mteb warns of superseded tasks and undefined precisions, hundreds of times per layer.
        warnings.simplefilter("ignore")
        datasets.disable_progress_bars()
        task = _load_task(name, modules)
        result = mteb.evaluate(
            encoder,
            task,
            cache=None,
            co2_tracker=False,
            raise_error=True,
            show_progress_bar=False,
            encode_kwargs={"show_progress_bar": False},
        ).task_results[0]
    score = float(result.get_score())
    if not math.isfinite(score):
        msg = f"{name}: mteb's {task.metadata.main_score} is {score} for these embeddings"
        raise PermanentError(msg, hint="check whether all embeddings are equal")
    told = plain(result.model_dump(mode="json", exclude={"evaluation_phases", "date"}))
    return {
        "score": score,
        "stderr": main_error(told, task.metadata.main_score),
        "n": encoder.encoded,
        "metric": task.metadata.main_score,
        "kind": task.metadata.type,
        "mteb": told,
    }


def _import_mteb() -> None:
    # mteb creates this directory on import, and a home directory may be full or read-only. Nothing
    # is written to it.
    nowhere = Path(tempfile.gettempdir()) / f"mteb-{os.getuid()}"
    os.environ.setdefault("MTEB_CACHE", str(nowhere))
    with harness_package("mteb", "mteb"):
        import mteb  # noqa: F401 - to report early which package is missing


def _load_task(name: object, modules: Collection[str]) -> Any:
    task = _make_task(name, modules)
    with data_of(name):
        task.load_data()
    return task


def _make_task(name: object, modules: Collection[str]) -> Any:
    import mteb

    if not isinstance(name, str) or not name:
        msg = f"task {name!r} is not the name of a task"
        raise PermanentError(msg, hint="such as STSBenchmark, or module:Class")
    module, colon, attribute = name.partition(":")
    if colon and module not in modules:
        msg = f"task {name!r}: module {module!r} is not among the workload's own_tasks"
        raise PermanentError(msg, hint="add the module to own_tasks when you create the run")
    if colon:
        task = _own_class(name, module, attribute)()
    else:
        try:
            task = mteb.get_task(name)
        except KeyError as error:
            _, _, near = str(error.args[0]).partition("Did you mean: ")
            msg = f"mteb has no task {name!r}"
            hint = f"did you mean {near}" if near else "mteb.get_tasks() lists them"
            raise PermanentError(msg, hint=hint) from None
    if "text" not in task.metadata.modalities or len(task.metadata.modalities) > 1:
        msg = f"task {name!r} is about {', '.join(task.metadata.modalities)}, and models read text"
        raise PermanentError(msg)
    return task


def _own_class(name: str, module: str, attribute: str) -> Any:
    from mteb.abstasks import AbsTask

    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        msg = f"task {name!r}: no module named {error.name!r}"
        raise PermanentError(msg, hint="it is searched for where the run was created") from error
    except AttributeError as error:
        raise PermanentError(f"task {name!r}: module {module!r} has no {attribute!r}") from error
    if not isinstance(found, type) or not issubclass(found, AbsTask):
        what = getattr(found, "__name__", type(found).__name__)
        raise PermanentError(f"task {name!r} is not a class of mteb's AbsTask but {what}")
    return found
