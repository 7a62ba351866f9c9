"""Manifests at work: their pods run as processes of this machine. No Kubernetes is here."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest

from hpc_toolkit.engines.kubernetes import ManifestSpec
from hpc_toolkit.run import Run
from tests.integration.realrun import HANG_S, REPOSITORY, wait_until
from tests.manifestrules import expanded, objects_of

HIDDEN = ("SLURM", "SBATCH", "HPCTK", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER", "PET_")


@dataclass
class Pod:
    """One process in the place of a pod."""

    name: str
    index: int
    process: subprocess.Popen[bytes]
    evicted: bool = False


@dataclass
class LocalJob:
    """A Job whose pods run here.

    What a kubelet and the controller of Jobs do, as far as our manifests need it. It shows that
    words, variables, exit codes and policies fit together. Images, volumes, the DNS and limits are
    left out.
    """

    job: dict[str, Any]
    logs: Path
    """Directory with one file for each pod, as ``kubectl logs`` gives them."""
    instead: dict[str, str] = field(default_factory=dict)
    """Values of variables that this machine has others for, such as addresses."""
    pods: list[Pod] = field(default_factory=list)
    ended: list[tuple[str, int, str]] = field(default_factory=list)
    """Name, exit code and what was done about it, of every pod that ended."""
    outcome: str = ""
    """Complete or Failed, as the condition of the Job is called."""

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self.job["spec"]
        return found

    def __enter__(self) -> Self:
        for index in range(self.spec["completions"]):
            self.start(index)
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.process.kill()
            pod.process.wait()

    def start(self, index: int) -> None:
        """Make the pod of an index."""
        name = f"{self.job['metadata']['name']}-{index}-{secrets.token_hex(3)[:5]}"
        (container,) = self.spec["template"]["spec"]["containers"]
        known = {
            "metadata.name": name,
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        }
        variables: dict[str, str] = {}
        for one in container["env"]:
            told = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = known[told] if told else expanded(one["value"], variables)
            variables[one["name"]] = self.instead.get(one["name"], value)
        words = [expanded(word, variables) for word in container["args"]]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN)}
        with (self.logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "hpc_toolkit", *words],
                env={**clean, **variables, "PYTHONPATH": str(REPOSITORY)},
                cwd=self.logs,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pods.append(Pod(name, index, process))

    def evict(self, index: int, number: int = signal.SIGTERM) -> None:
        """What the drain of a node does to the pod of an index; with SIGKILL, a node's loss."""
        (pod,) = (one for one in self.pods if one.index == index)
        pod.evicted = True
        pod.process.send_signal(number)

    def run(self, limit_s: float = HANG_S) -> str:
        """Follow the pods until the Job has ended; its outcome."""
        wait_until(lambda: self.look() and self.outcome, "the end of the Job", limit_s=limit_s)
        return self.outcome

    def look(self) -> int:
        """Act on the pods that ended since; how many ended in all."""
        for pod in [one for one in self.pods if one.process.poll() is not None]:
            self.pods.remove(pod)
            code = pod.process.returncode
            code = code if code >= 0 else 128 - code
            action = self.action(pod, code) if code else "Succeeded"
            self.ended.append((pod.name, code, action))
            if action == "Ignore":
                self.start(pod.index)
            elif action == "FailJob":
                self.outcome = "Failed"
        done = sum(action == "Succeeded" for _, _, action in self.ended)
        early = [
            rule["succeededCount"] for rule in self.spec.get("successPolicy", {}).get("rules", [])
        ]
        if done >= min([self.spec["completions"], *early]):
            self.outcome = "Complete"
        elif not self.pods:
            self.outcome = "Failed"
        return len(self.ended)

    def action(self, pod: Pod, code: int) -> str:
        """What the first rule that fits says of a pod that failed."""
        if "podFailurePolicy" not in self.spec:
            assert self.spec["backoffLimit"] == 0
            return "FailJob"
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if (codes := rule.get("onExitCodes")) is not None:
                if (code in codes["values"]) == (codes["operator"] == "In"):
                    return str(rule["action"])
            elif pod.evicted:
                return str(rule["action"])
        # What no rule names counts; nothing here fails so often that the limit matters.
        return "Ignore"


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
        job.evict(1, signal.SIGKILL)
        wait_for("0 1", "1 1")
        job.evict(0, signal.SIGKILL)
        wait_for("0 0", "1 0")
        (tmp_path / "go").touch()
        outcome = job.run()

    assert outcome == "Complete"
    codes = [code for _, code, _ in job.ended]
    assert codes[0] == 137
    assert sorted(codes[1:3]) == [75, 137]
    assert codes[3:] == [0, 0]
