"""Scores in the JSON shape of mteb's results, for its own tools to read; without mteb itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def write_results(rows: Iterable[Mapping[str, Any]], directory: Path) -> int:
    """Write gathered rows of a tasks stage as mteb lays out its results; says how many.

    ``<directory>/results/<model>/<revision>/<task>.json`` is what ``mteb.ResultCache(directory)``
    reads. The layer is in the revision (`model_of`). Rows without a score are left out. Nothing is
    written where one row cannot be.

    Raises:
        RunError: a name that would lead out of its directory, two rows of one file, or a score
            without what a result needs.
    """
    results: dict[Path, bytes] = {}
    items: dict[Path, Mapping[str, Any]] = {}
    for row in rows:
        if row["state"] != "done" or "score" not in row["value"]:
            continue
        path, content = _placed(row)
        if path in results:
            msg = f"{path}: of both {json.dumps(items[path])} and {json.dumps(row['item'])}"
            raise RunError(msg, hint="write them into directories of their own")
        results[path], items[path] = content, row["item"]
    for path, content in results.items():
        file = directory / "results" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, [content])
    return len(results)


def _placed(row: Mapping[str, Any]) -> tuple[Path, bytes]:
    """Where below the results a row belongs, and what is written there."""
    item = row["item"]
    try:
        model, revision = model_of(item["checkpoint"], item["layer"])
        result = result_of(item["task"], row["value"], seconds=row["seconds"])
        names = [model.replace("/", "__"), revision, f"{result['task_name']}.json"]
    except KeyError as error:
        msg = f"{json.dumps(item)}: a score without {error.args[0]!r} is no result of a task"
        raise RunError(msg) from None
    for name in names:
        if "/" in name or "\0" in name or name in ("", ".", "..", ".json"):
            msg = f"{json.dumps(item)}: {name!r} is not the name of a file"
            raise RunError(msg, hint="checkpoint, layer and task are parts of a path here")
    return Path(*names), json.dumps(result, indent=2, allow_nan=False).encode()


def result_of(task: str, value: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
    """The value of a task as mteb's ``TaskResult`` has it: mteb's own, or one of the same shape.

    A task that is not mteb's has no ``mteb_version``, and its texts no revision.
    """
    if "mteb" in value:
        told: dict[str, Any] = value["mteb"]
        return told
    scores = {
        "main_score": value["score"],
        value["metric"]: value["score"],
        "stderr": value["stderr"],
        "n": value["n"],
        "hf_subset": "default",
        "languages": ["eng-Latn"],
    }
    return {
        "dataset_revision": "no_revision_available",
        "task_name": task,
        "mteb_version": None,
        "scores": {"test": [scores]},
        "evaluation_time": seconds,
        "kg_co2_emissions": None,
    }


def model_of(checkpoint: str, layer: int) -> tuple[str, str]:
    """The name and the revision of one layer of a checkpoint as a model of its own.

    ``org/name@step1`` is ``org/name`` and ``step1-layer3``; a directory ``a/b/step1`` is
    ``local/a_b_step1`` and ``layer3``.
    """
    name, at, revision = checkpoint.partition("@")
    if at:
        return name, f"{revision.replace('/', '_')}-layer{layer}"
    return f"local/{checkpoint.strip('/').replace('/', '_')}", f"layer{layer}"


def main_error(result: Mapping[str, Any], metric: str) -> float | None:
    """Standard error of the mean of the main scores of a result, over mteb's repetitions.

    None where a split or subset was scored once only. It says how much mteb's own draws of
    training texts or clusters matter, not what other texts would.
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
    """The same as strict JSON: what is not finite becomes None."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _repetitions(entry: Mapping[str, Any], metric: str) -> list[float]:
    """The main score of each repetition of one split and subset; empty where there are none."""
    repeated = entry.get("scores_per_experiment")
    if isinstance(repeated, list):
        found = [one.get(metric) for one in repeated if isinstance(one, dict)]
    else:
        levels = entry.get("v_measures" if metric == "v_measure" else f"{metric}_scores")
        if isinstance(levels, dict):
            levels = [one for level in levels.values() for one in level]
        found = levels if isinstance(levels, list) else []
    return [float(one) for one in found if isinstance(one, int | float)]
