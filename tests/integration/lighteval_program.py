"""Run by test_workloads_lighteval.py with lighteval on the path: scores and errors, as JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.science.workloads.lighteval_tasks import LightevalTasks

CHECKPOINT = "mini-s/step12"
TASKS = ("bbc:topic|2", "bbc:shouted|2", "bbc-word|2")


def direct(place: Path) -> Any:
    """The results of lighteval when it loads the model itself."""
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.models.transformers.transformers_model import TransformersModelConfig
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters

    # It writes beside the weights.
    shutil.copytree(place / "checkpoints" / CHECKPOINT, place / "direct")
    pipeline = Pipeline(
        tasks=",".join(TASKS),
        pipeline_parameters=PipelineParameters(
            launcher_type=ParallelismManager.ACCELERATE,
            custom_tasks_directory=str(place / "own.py"),
            bootstrap_iters=20,
        ),
        evaluation_tracker=EvaluationTracker(output_dir=str(place / "results")),
        model_config=TransformersModelConfig(model_name=str(place / "direct"), batch_size=16),
    )
    pipeline.evaluate()
    return pipeline.get_results()["results"]


def failure(tasks: LightevalTasks, context: Any, **item: Any) -> list[str]:
    try:
        list(tasks.run(context, [item]))
    except HpcToolkitError as error:
        return [type(error).__name__, error.message, error.hint or ""]
    return []


def main(place: Path) -> None:
    options: dict[str, Any] = {
        "root": str(place / "checkpoints"),
        "custom_tasks": str(place / "own.py"),
    }
    tasks = LightevalTasks(**options, bootstrap_iters=20, num_fewshot=2)
    tasks._import()  # replaces the files of tasks that this environment cannot import
    told: dict[str, Any] = {"direct": direct(place)}
    # As on the second rank of a node; lighteval would wait for the first.
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    before = sorted((place / "checkpoints").rglob("*"))
    context = tasks.load(CHECKPOINT)
    names = ["bbc:topic", "bbc-lead", "bbc-word", "bbc", "bbc:shouted", "bbc:topic"]
    items = [{"task": name, **({"num_fewshot": 0} if name == "bbc-lead" else {})} for name in names]
    told["values"] = list(tasks.run(context, items))
    (place / "list.txt").write_text("bbc:topic|0")
    told["failures"] = {
        "near": failure(tasks, context, task="bbc:topics"),
        "own": failure(tasks, context, task="hellaswags"),
        "file": failure(tasks, context, task=str(place / "list.txt")),
        "none": failure(tasks, context),
        "layer": failure(tasks, context, task="bbc:topic", layer=2),
        "data": failure(tasks, context, task="elsewhere"),
        "metric": failure(
            LightevalTasks(**options, metric="ac", limit=1), context, task="bbc:topic"
        ),
    }
    told["loads"] = tasks.loads
    told["written"] = [str(one) for one in (place / "checkpoints").rglob("*") if one not in before]
    (place / "told.json").write_text(json.dumps(told, allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
