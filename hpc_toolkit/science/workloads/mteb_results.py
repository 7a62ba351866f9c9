"""Write scores in the JSON format of mteb's results, for mteb's own tools; does not need mteb."""

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
    """Write gathered rows of a tasks stage in mteb's layout of results; return their number.

    ``mteb.ResultCache(directory)`` reads ``<directory>/results/<model>/<revision>/<task>.json``.
    The layer is part of the revision (`model_of`). Rows without a score are left out. If one row
    cannot be written, none is. Raises RunError: a name would lead out of its directory, two rows
    have the same file, or a score lacks a field of a result.
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
    """Return the path of a row below the results, and the content of its file."""
    item = row["item"]
    try:
        model, revision = model_of(item["checkpoint"], item["layer"])
        result = result_of(item["task"], row["value"], seconds=row["seconds"])
        names = [model.replace("/", "__"), revision, f"{result['task_name']}.json"]
    except KeyError as error:
        msg = f"{json.dumps(item)}: a score without {error.args[0]!r} is not a result of a task"
        raise RunError(msg) from None
    for name in names:
        if "/" in name or "\0" in name or name in ("", ".", "..", ".json"):
            msg = f"{json.dumps(item)}: {name!r} is not the name of a file"
            raise RunError(msg, hint="checkpoint, layer and task are parts of a path here")
    return Path(*names), json.dumps(result, indent=2, allow_nan=False).encode()


def result_of(task: str, value: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
    """Return the value of a task as a ``TaskResult`` of mteb: mteb's own, or one of the same shape.

    Tasks that are not from mteb have no ``mteb_version``, and their texts no revision.
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
