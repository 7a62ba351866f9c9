"""Manifests at work: their pods run as processes of this machine. No Kubernetes is here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.engines.kubernetes import ManifestSpec
from hpc_toolkit.run import Run
from tests.integration.localpods import LocalJob
from tests.integration.realrun import wait_until
from tests.manifestrules import objects_of

if TYPE_CHECKING:
    from pathlib import Path


def queue(root: Path, **asked: Any) -> dict[str, Any]:
    given = {"nodes": 2, "pvc": (f"shared:{root}",), "run": "run", **asked}
    objects = objects_of(ManifestSpec(kind="kubernetes-queue", image="x", **given))
    made: dict[str, Any]
    (made,) = (one for one in objects if one["kind"] == "Job")
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
