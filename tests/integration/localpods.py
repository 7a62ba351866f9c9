"""A manifest's Job on this machine: its pods are processes, and their ends count as it says.

What a kubelet and the controller of Jobs do, as far as the manifests of this package need it. It
shows that words, variables, exit codes and policies fit together; it is no Kubernetes: images,
volumes, the DNS and limits are left out.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.integration.realrun import HANG_S, REPOSITORY, wait_until
from tests.manifestrules import expanded

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
    """A Job whose pods run here."""

    job: dict[str, Any]
    logs: Path
    """Directory with one file for each pod, as ``kubectl logs`` gives them."""
    instead: dict[str, str] = field(default_factory=dict)
    """Values of variables that this machine has others for, such as addresses."""
    pods: list[Pod] = field(default_factory=list)
    ended: list[tuple[str, int, str]] = field(default_factory=list)
    """Name, exit code and what was done about it, of every pod that ended."""
    failed_indexes: set[int] = field(default_factory=set)
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

    def evict(self, index: int) -> None:
        """What the drain of a node does to the pod of an index."""
        (pod,) = (one for one in self.pods if one.index == index)
        pod.evicted = True
        pod.process.terminate()

    def lose(self, index: int) -> None:
        """What the loss of its node does to the pod of an index."""
        (pod,) = (one for one in self.pods if one.index == index)
        pod.evicted = True
        pod.process.kill()

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
            elif action == "FailIndex":
                self.failed_indexes.add(pod.index)
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
