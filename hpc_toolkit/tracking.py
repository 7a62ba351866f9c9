"""Export a run to a tracker: MLflow, Weights & Biases, TensorBoard or trackio.

One process reads the run's files and writes; workers know nothing of trackers. Each finished item
becomes a run of the tracker, whose id names the run, the item and its outcome. What has that id is
complete and is left alone, so an export can be killed, repeated, and continued as items finish.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.items import canonical
from hpc_toolkit.results.activity import Trace
from hpc_toolkit.results.tables import Row
from hpc_toolkit.rundir.files import publish_directory, remove_tree, replace_file
from hpc_toolkit.rundir.valuefiles import value_columns
from hpc_toolkit.system.installation import how_to_add

if TYPE_CHECKING:
    from hpc_toolkit.run import Run

_MOST_STEPS = 100_000
_MOST_TEXT = 500
"""Longest text of a parameter or tag: MLflow takes no longer ones."""


@dataclass(slots=True, kw_only=True)
class Tracked:
    """One run of a tracker."""

    id: str
    """The same whenever this run of hpctk is exported; letters, digits, ``_``, ``.`` and ``-``."""
    is_done: bool
    params: dict[str, Any]
    tags: dict[str, str]
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Values by name: one, or one for each step from 0."""
    begin: float
    """Epoch seconds, by the clock of the worker's host."""
    end: float

    @property
    def steps(self) -> list[dict[str, float]]:
        """The values of each step; a metric with one value has it at the last step."""
        count = max(map(len, self.metrics.values()), default=0)
        found: list[dict[str, float]] = [{} for _ in range(count)]
        for name, values in self.metrics.items():
            for step, one in enumerate(values, count - 1 if len(values) == 1 else 0):
                found[step][name] = one
        return found


def tracked_runs(run: Run) -> Iterator[Tracked]:
    """The finished items of all stages in the order in which they ended.

    Parameters are the keys of an item. Numbers of its result are metrics, a list of numbers is one
    metric by step, and text is a tag. NaN, infinities and other results are left out.
    """
    name = re.sub(r"[^\w.-]", "-", run.manifest.run, flags=re.ASCII)
    prefix = f"{name}-{hashlib.sha256(run.manifest.to_bytes()).hexdigest()[:8]}"
    rows: dict[tuple[str, bytes], Row] = {}
    for stage in run.manifest.stages:
        for row in run.table(stage=stage.name, partial=True):
            rows[stage.name, canonical(row["item"])] = row
    for attempt in Trace(run.view):
        row = rows.get((attempt["stage"], canonical(attempt["item"])), {})
        # A row has the outcome of the last attempt, and failures before it do not count.
        if (
            attempt["outcome"][:4] != str(row.get("state"))[:4]
            or attempt["worker"] != row["worker"]
        ):
            continue
        rows.pop((attempt["stage"], canonical(attempt["item"])))
        yield _of_item(prefix, attempt, row)


def _of_item(prefix: str, attempt: Row, row: Row) -> Tracked:
    tags = {key: attempt[key] for key in ("stage", "number", "worker", "host", "job")}
    tags |= {key: row[key] for key in ("state", "attempts", "seconds", "error")}
    found = Tracked(
        id=f"{prefix}-{attempt['stage']}-{attempt['number']}-{row['state']}",
        is_done=row["state"] == "done",
        params={key: _scalar(value) for key, value in row["item"].items()},
        tags={f"hpctk.{key}": _text(value) for key, value in tags.items() if value is not None},
        begin=attempt["begin"] or attempt["end"] or 0.0,
        end=attempt["end"] or 0.0,
    )
    for key, value in value_columns(row).items():
        _take(found, "value" if not isinstance(key, str) else f"value.{key}", value)
    return found


def _take(found: Tracked, name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _take(found, f"{name}.{key}", inner)
    elif isinstance(value, str):
        found.tags[name] = _text(value)
    else:
        values = value if isinstance(value, list) else [value]
        if 0 < len(values) <= _MOST_STEPS and all(map(_is_number, values)):
            found.metrics[name] = list(map(float, values))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)


def _scalar(value: Any) -> Any:
    return value if isinstance(value, bool) or _is_number(value) else _text(value)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:_MOST_TEXT]


def export(
    run: Run, to: str, where: str | None = None, project: str | None = None
) -> tuple[int, int]:
    """Write what the tracker ``to`` does not have; how many runs are new, and how many it had.

    ``where`` is a directory, or for MLflow the URI of its tracking server or database. ``project``
    is its name there; None: the name of the run. Raises ConfigError: its package is missing.
    """
    kind = TRACKERS[to]
    try:
        tracker = kind(where or kind.place, project or run.manifest.run)
    except ImportError as error:
        message = f"{to} needs the package {kind.package}: {error}"
        raise ConfigError(message, hint=how_to_add(kind.package)) from error
    known, new, had = tracker.known(), 0, 0
    for one in tracked_runs(run):
        if one.id in known:
            had += 1
        else:
            tracker.write(one)
            new += 1
    return new, had


class Tracker:
    """Where runs are written."""

    package: ClassVar[str]
    place: ClassVar[str]
    """Where it is by default."""

    def __init__(self, where: str, project: str) -> None:
        self.where, self.project = where, project

    def known(self) -> set[str]:
        """The ids of runs that were written to their end."""
        raise NotImplementedError

    def write(self, run: Tracked) -> None:
        """Write a run that is not known; what a killed export left of it is replaced."""
        raise NotImplementedError


class MLflow(Tracker):
    """``where`` is a tracking URI."""

    package = "mlflow"
    place = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")

    def __init__(self, where: str, project: str) -> None:
        super().__init__(where, project)
        entities = importlib.import_module("mlflow.entities")
        self._param, self._metric = entities.Param, entities.Metric
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(self.where)
        found = self._client.get_experiment_by_name(project)
        self._folder = found.experiment_id if found else self._client.create_experiment(project)

    def known(self) -> set[str]:
        found, token = set(), None
        while True:
            page = self._client.search_runs([self._folder], page_token=token)
            for one in page:
                if one.info.status in ("FINISHED", "FAILED"):
                    found.add(one.data.tags.get("hpctk.id", ""))
                elif "hpctk.id" in one.data.tags:
                    self._client.delete_run(one.info.run_id)
            token = page.token
            if not token:
                return found

    def write(self, run: Tracked) -> None:
        tags = {**run.tags, "hpctk.id": run.id}
        begin, end = round(run.begin * 1000), round(run.end * 1000)
        named = {self._name(key): value for key, value in tags.items()}
        made = self._client.create_run(self._folder, begin, named, run.id).info.run_id
        params = [self._param(self._name(key), str(one)) for key, one in run.params.items()]
        metrics = [
            self._metric(self._name(key), one, end, step)
            for step, values in enumerate(run.steps)
            for key, one in values.items()
        ]
        # A request may have 100 parameters and 1,000 metrics.
        for first in range(0, len(params), 100):
            self._client.log_batch(made, params=params[first : first + 100])
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(made, metrics=metrics[first : first + 1000])
        self._client.set_terminated(made, "FINISHED" if run.is_done else "FAILED", end)

    @staticmethod
    def _name(key: str) -> str:
        return re.sub(r"[^\w./ -]", "_", key, flags=re.ASCII)


class WandB(Tracker):
    """Offline runs in a directory, which ``wandb sync`` uploads; nothing is sent."""

    package = "wandb"
    place = "."

    def __init__(self, where: str, project: str) -> None:
        super().__init__(where, project)
        self._wandb = importlib.import_module("wandb")

    @property
    def _home(self) -> Path:
        return Path(self.where) / "wandb"

    def known(self) -> set[str]:
        return {one.name.split("-", 4)[-1] for one in self._home.glob("offline-run-*-hpctk-*")}

    def write(self, run: Tracked) -> None:
        staging = self._home / f".hpctk-{run.id}"
        remove_tree(staging)
        staging.mkdir(parents=True)
        settings = self._wandb.Settings(
            console="off", silent=True, x_disable_stats=True, x_disable_meta=True
        )
        made = self._wandb.init(
            project=self.project,
            id=f"hpctk-{run.id}",
            name=run.id,
            mode="offline",
            dir=str(staging),
            config={**run.params, **run.tags},
            settings=settings,
        )
        for step, values in enumerate(run.steps):
            made.log(values, step=step)
        made.finish(exit_code=0 if run.is_done else 1)
        (written,) = (staging / "wandb").glob("offline-run-*")
        publish_directory(written, self._home / written.name)
        remove_tree(staging)


class TensorBoard(Tracker):
    """A directory for each run, with its hyperparameters and scalars."""

    package = "tensorboard"
    place = "tensorboard"

    def __init__(self, where: str, project: str) -> None:
        super().__init__(where, project)
        proto, hparams = "tensorboard.compat.proto", "tensorboard.plugins.hparams"
        self._event = importlib.import_module(f"{proto}.event_pb2").Event
        self._summary = importlib.import_module(f"{proto}.summary_pb2")
        self._hparams = importlib.import_module(f"{hparams}.plugin_data_pb2")
        self._metadata = importlib.import_module(f"{hparams}.metadata")
        self._records = importlib.import_module("tensorboard.summary.writer.record_writer")

    def known(self) -> set[str]:
        return {one.parent.name for one in Path(self.where, self.project).glob("*/events.*.hpctk")}

    def write(self, run: Tracked) -> None:
        buffer = io.BytesIO()
        writer = self._records.RecordWriter(buffer)
        first = {"wall_time": run.begin}
        events = [self._event(file_version="brain.Event:2", **first)]
        events += [self._event(summary=one, **first) for one in self._about(run)]
        kind = self._summary.Summary
        for step, values in enumerate(run.steps):
            found = kind(value=[kind.Value(tag=key, simple_value=values[key]) for key in values])
            events.append(self._event(wall_time=run.end, step=step, summary=found))
        for event in events:
            writer.write(event.SerializeToString())
        directory = Path(self.where, self.project, run.id)
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / f"events.out.tfevents.{run.end:.0f}.hpctk", [buffer.getvalue()])

    def _about(self, run: Tracked) -> Iterator[Any]:
        """What the dashboard of hyperparameters reads."""
        kinds = self._hparams
        start = kinds.SessionStartInfo(group_name=run.id, start_time_secs=run.begin)
        for key, one in run.params.items():
            kind = {bool: "bool", str: "string"}.get(type(one), "number")
            setattr(start.hparams[key], f"{kind}_value", one)
        status = 1 if run.is_done else 2  # STATUS_SUCCESS, STATUS_FAILURE of its api.proto
        end = kinds.SessionEndInfo(status=status, end_time_secs=run.end)
        for tag, told in (
            (self._metadata.SESSION_START_INFO_TAG, {"session_start_info": start}),
            (self._metadata.SESSION_END_INFO_TAG, {"session_end_info": end}),
        ):
            data = kinds.HParamsPluginData(version=self._metadata.PLUGIN_DATA_VERSION, **told)
            plugin = self._summary.SummaryMetadata.PluginData(
                plugin_name=self._metadata.PLUGIN_NAME, content=data.SerializeToString()
            )
            value = self._summary.Summary.Value(
                tag=tag,
                metadata=self._summary.SummaryMetadata(plugin_data=plugin),
                tensor=self._metadata.NULL_TENSOR,
            )
            yield self._summary.Summary(value=[value])


class Trackio(Tracker):
    """Runs in a database of trackio on this machine; each is written by one transaction."""

    package = "trackio"
    place = os.environ.get("TRACKIO_DIR", "")

    def __init__(self, where: str, project: str) -> None:
        super().__init__(where, project)
        if where:
            os.environ["TRACKIO_DIR"] = where
        self._storage = importlib.import_module("trackio").SQLiteStorage

    def known(self) -> set[str]:
        return set(self._storage.get_runs(self.project))

    def write(self, run: Tracked) -> None:
        ended = datetime.fromtimestamp(run.end, UTC).isoformat()
        rows: list[dict[str, Any]] = [*run.steps] or [{}]
        self._storage.bulk_log(
            self.project,
            run.id,
            rows,
            timestamps=[ended] * len(rows),
            config={**run.params, **run.tags},
        )


TRACKERS: dict[str, type[Tracker]] = {
    "mlflow": MLflow,
    "wandb": WandB,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
}
