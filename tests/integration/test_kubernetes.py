"""Manifests at work: their pods run as processes of this machine. No Kubernetes is here."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.engines.kubernetes import ManifestSpec
from hpc_toolkit.run import Run
from tests.integration.localpods import LocalJob
from tests.integration.realrun import wait_until
from tests.manifestrules import objects_of


def job_of(spec: ManifestSpec) -> dict[str, Any]:
    job: dict[str, Any]
    (job,) = (one for one in objects_of(spec) if one["kind"] == "Job")
    return job


def meeting_place() -> dict[str, str]:
    """An address of this machine for pods that have none of their own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def queue(root: Path, **asked: Any) -> dict[str, Any]:
    given = {"nodes": 2, "pvc": (f"shared:{root}",), "run": "run", **asked}
    made = job_of(ManifestSpec(kind="kubernetes-queue", image="x", **given))
    words = made["spec"]["template"]["spec"]["containers"][0]["args"]
    words[words.index("--grace") + 1] = "1s"
    return made


@pytest.mark.slow
def test_an_evicted_pod_gives_its_item_back_and_another_takes_its_place(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = f"while ! test -e {gate}; do sleep 0.05; done; echo {{n}}"
    run = Run.create(tmp_path / "run", command=command, items=[{"n": n} for n in range(6)])
    run.seal()

    with LocalJob(queue(tmp_path), tmp_path) as job:
        wait_until(lambda: run.status().stages["items"].running >= 2, "two pods at work")
        job.evict(0)
        wait_until(job.look, "the evicted pod's end")
        wait_until(lambda: run.status().workers.alive >= 2, "the pod in its place")
        gate.touch()
        outcome = job.run()

    assert outcome == "Complete"
    assert job.ended[0][1:] == (75, "Ignore")
    rows = run.results()
    assert [row["state"] for row in rows] == ["done"] * 6
    assert {row["attempts"] for row in rows} == {1}
    hosts = {
        json.loads(path.read_text())["host"] for path in (tmp_path / "run/workers").glob("*.json")
    }
    assert len(hosts) == 3
    assert {name for name, _, _ in job.ended} <= hosts


def test_pods_without_their_run_fail_for_good(tmp_path: Path) -> None:
    with LocalJob(queue(tmp_path), tmp_path) as job:
        outcome = job.run()

    assert outcome == "Failed"
    assert [(code, action) for _, code, action in job.ended] == [(1, "FailIndex")] * 2


RANK = """
import os, time
with open("trace", "a") as trace:
    trace.write(os.environ["RANK"] + " " + os.environ["TORCHELASTIC_RESTART_COUNT"] + "\\n")
while not os.path.exists("go"):
    time.sleep(0.05)
"""


@pytest.mark.soak  # test_launch.py loses nodes of a training
@pytest.mark.slow
@pytest.mark.torch
def test_whichever_pod_of_a_training_is_lost_all_ranks_start_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    trace = tmp_path / "trace"
    trace.touch()
    request = ManifestSpec(kind="kubernetes-ddp", image="x", nodes=2, command=("train.py",))

    def wait_for(*ranks: str) -> None:
        """The two ranks, each with the number of its start, and nothing else meanwhile."""
        wait_until(
            lambda: (job.look() >= 0 and job.outcome) or len(trace.read_text().splitlines()) > 1,
            f"ranks {ranks}",
        )
        assert not job.outcome, {path.name: path.read_text() for path in tmp_path.glob("*.log")}
        assert sorted(trace.read_text().splitlines()) == list(ranks)
        trace.write_text("")

    with LocalJob(job_of(request), tmp_path, meeting_place()) as job:
        wait_for("0 0", "1 0")
        job.lose(1)
        wait_for("0 1", "1 1")
        job.lose(0)
        wait_for("0 0", "1 0")
        (tmp_path / "go").touch()
        outcome = job.run()

    assert outcome == "Complete"
    codes = [code for _, code, _ in job.ended]
    assert codes[0] == 137
    assert sorted(codes[1:3]) == [75, 137]
    assert codes[3:] == [0, 0]
