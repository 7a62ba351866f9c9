"""Exports to the real packages of trackers, read back by them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpc_toolkit.run import Run
from hpc_toolkit.tracking import TRACKERS, export
from tests.documents import REPOSITORY

CODE = """
import math, os
def f(lr, seed):
    if seed == 3 and not os.path.exists("fixed"):
        raise ValueError("no")
    return {"loss": [3.0, 2.0, 1.5], "acc": seed / 4, "note": "ok", "nan": math.nan}
"""


class Seen(NamedTuple):
    """A run as its tracker has it."""

    lr: float
    loss: list[float]
    acc: list[float]
    note: str | None
    is_done: bool


def _of_mlflow(where: str) -> dict[str, Seen]:
    client = importlib.import_module("mlflow.tracking").MlflowClient(where)
    (experiment,) = [one for one in client.search_experiments() if one.name == "proj"]

    def series(run: str, name: str) -> list[float]:
        return [one.value for one in client.get_metric_history(run, name)]

    return {
        one.data.tags["hpctk.id"]: Seen(
            float(one.data.params["lr"]),
            series(one.info.run_id, "value.loss"),
            series(one.info.run_id, "value.acc"),
            one.data.tags.get("value.note"),
            one.info.status == "FINISHED",
        )
        for one in client.search_runs([experiment.experiment_id])
    }


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the log format of LevelDB, after W&B's header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def _of_wandb(where: str) -> dict[str, Seen]:
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found = {}
    for path in Path(where, "wandb").glob("offline-run-*/*.wandb"):
        config: dict[str, Any] = {}
        history: dict[str, list[Any]] = {}
        code = -1
        for record in map(proto.Record.FromString, _records(path.read_bytes())):
            for update in record.run.config.update:
                config[update.key] = json.loads(update.value_json)
            for item in record.history.item:
                key = item.key or ".".join(item.nested_key)
                history.setdefault(key, []).append(float(item.value_json))
            if record.HasField("exit"):
                code = record.exit.exit_code
        found[path.stem.removeprefix("run-hpctk-")] = Seen(
            config["lr"],
            history.get("value.loss", []),
            history.get("value.acc", []),
            config.get("value.note"),
            code == 0,
        )
    return found


def _of_tensorboard(where: str) -> dict[str, Seen]:
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    kinds = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    found = {}
    for path in Path(where, "proj").iterdir():
        read = events.EventAccumulator(str(path)).Reload()
        told = {
            tag: kinds.HParamsPluginData.FromString(content)
            for tag, content in read.PluginTagToContent("hparams").items()
        }
        start = told["_hparams_/session_start_info"].session_start_info
        end = told["_hparams_/session_end_info"].session_end_info
        scalars = {tag: [one.value for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
        found[path.name] = Seen(
            start.hparams["lr"].number_value,
            scalars.get("value.loss", []),
            scalars.get("value.acc", []),
            "ok" if end.status == 1 else None,  # a TensorBoard has no tags
            end.status == 1,
        )
    return found


def _of_trackio(where: str) -> dict[str, Seen]:
    trackio = importlib.import_module("trackio")
    found = {}
    for one in trackio.Api().runs("proj"):
        config = one.config or {}
        logs = trackio.SQLiteStorage.get_logs("proj", one.name)

        def series(name: str, logs: list[dict[str, float]] = logs) -> list[float]:
            return [log[name] for log in logs if name in log]

        found[one.name] = Seen(
            config["lr"],
            series("value.loss"),
            series("value.acc"),
            config.get("value.note"),
            config["hpctk.state"] == "done",
        )
    return found


class Kind(NamedTuple):
    read: Callable[[str], dict[str, Seen]]
    where: str
    """A place in the directory of a test."""
    ends_in: str
    """The call in whose place an export is killed."""


KINDS = {
    "mlflow": Kind(_of_mlflow, "sqlite:///{}/ml.db", "MlflowClient.log_batch"),
    "wandb": Kind(_of_wandb, "{}/wandb-runs", "publish_directory"),
    "tensorboard": Kind(_of_tensorboard, "{}/tensorboard", "replace_file"),
    "trackio": Kind(_of_trackio, "{}/trackio", "SQLiteStorage.bulk_log"),
}

KILLED = """
import os, signal, sys
from hpc_toolkit import tracking
from hpc_toolkit.run import Run
to, where, name = sys.argv[1:]
def killed(*given, **named):
    os.kill(os.getpid(), signal.SIGKILL)
if "." in name:
    import importlib
    module = importlib.import_module({"mlflow": "mlflow.tracking"}.get(to, to))
    setattr(getattr(module, name.split(".")[0]), name.split(".")[1], staticmethod(killed))
else:
    setattr(tracking, name, killed)
tracking.export(Run.open("run"), to, where, "proj")
"""


@pytest.mark.filterwarnings("ignore")  # those of the trackers and of what they import
@pytest.mark.parametrize("to", TRACKERS)
def test_each_finished_item_is_one_run_of_a_tracker_however_often_it_is_exported(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"mlflow": "mlflow.tracking"}.get(to, to))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "m.py").write_text(CODE)
    kind = KINDS[to]
    where = kind.where.format(tmp_path)
    items = [{"lr": 0.1, "seed": 1}, {"lr": 0.01, "seed": 3}]
    with Run.create("run", items, workload="m:f", max_attempts=1) as run:
        run.work(1)

        # An export is killed while it writes its first run, and the next one does not notice.
        argv = [sys.executable, "-c", KILLED, to, where, kind.ends_in]
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        killed = subprocess.run(argv, cwd=tmp_path, env=environ, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert export(run, to, where, "proj") == (2, 0)
        assert export(run, to, where, "proj") == (0, 2)
        (tmp_path / "fixed").touch()
        run.retry()
        run.work(1)
        assert export(run, to, where, "proj") == (1, 1)

    found = {key.split("-", 2)[2]: one for key, one in kind.read(where).items()}
    assert found == {
        "items-0-done": Seen(0.1, [3.0, 2.0, 1.5], [0.25], "ok", True),
        "items-1-failed": Seen(0.01, [], [], None, False),
        "items-1-done": Seen(0.01, [3.0, 2.0, 1.5], [0.75], "ok", True),
    }
