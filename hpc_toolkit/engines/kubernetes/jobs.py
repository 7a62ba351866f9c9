"""Jobs, Services and JobSets around pods, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.engines.kubernetes.pods import CONTAINER, MASTER_PORT, pod_template
from hpc_toolkit.system.quantities import parse_duration

if TYPE_CHECKING:
    from hpc_toolkit.engines.kubernetes.request import ManifestSpec

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOBSET = "jobset.x-k8s.io/v1alpha2"
ROLE = "pod"
"""The only replicated Job of a JobSet; its pods are called ``<jobset>-pod-0-<number>``."""
EXIT_LATER = 75
_TOLD_TO_LEAVE = 143
"""Exit code after SIGTERM: the pod, or another pod of its training, was asked to leave."""
_UNUSABLE = [1, 2]
"""Exit codes of hpctk that a retry cannot fix: bad input, and wrong usage."""
_REPLACED = 10
"""How often a failed pod of a queue is replaced by default."""
_STARTED_AGAIN = 3
"""How often a JobSet starts all its pods again by default."""


def objects(spec: ManifestSpec, nodes: int, name: str, argv: list[str]) -> list[dict[str, Any]]:
    """Return the objects for one Job of the manifest, in the order of their creation.

    Args:
        nodes: number of pods.
        name: name of the Job, or of the JobSet, and of its Service.
        argv: arguments of hpctk in each pod.
    """
    meets = spec.kind != "kubernetes-queue"
    meeting = _meeting(spec, name) if meets else None
    labels = {
        "app.kubernetes.io/name": spec.name,
        "app.kubernetes.io/managed-by": "hpctk",
        "hpctk-job": name,
    }
    job = _job_spec(spec, nodes, pod_template(spec, labels, argv, meeting))
    if spec.jobset:
        return [_jobset(spec, name, labels, job)]
    service = [_service(spec, name, labels)] if meets else []
    if meets:
        job["template"]["spec"] = {"subdomain": name, **job["template"]["spec"]}
    head = _metadata(spec, name, labels)
    if spec.queue_name is not None:
        head["labels"][QUEUE_LABEL] = spec.queue_name
        # Kueue sets this as well, but a Job that Kueue missed must not start either.
        job = {"suspend": True, **job}
    if spec.ttl is not None:
        job = {"ttlSecondsAfterFinished": _ttl_s(spec.ttl), **job}
    return [*service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": head, "spec": job}]


def _meeting(spec: ManifestSpec, name: str) -> str:
    """Return the host name of the first pod, within the namespace."""
    return f"{name}-{ROLE}-0-0.{name}" if spec.jobset else f"{name}-0.{name}"


def _metadata(spec: ManifestSpec, name: str, labels: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name}
    if spec.namespace is not None:
        found["namespace"] = spec.namespace
    return found | {"labels": dict(labels)}


def _service(spec: ManifestSpec, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return the headless Service, which gives each pod a host name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, name, labels),
        "spec": {
            "clusterIP": "None",
            # Pods look for each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {"hpctk-job": name},
            "ports": [{"name": "meeting", "port": MASTER_PORT}],
        },
    }


def _job_spec(spec: ManifestSpec, nodes: int, template: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
    }
    if spec.time is not None:
        job["activeDeadlineSeconds"] = spec.time_s
    job |= _queue_failures(spec) if spec.kind == "kubernetes-queue" else _ddp_failures()
    return job | {"template": template}


def _queue_failures(spec: ManifestSpec) -> dict[str, Any]:
    """Return rules by which pods fail one by one, and the first success ends the Job."""
    return {
        "backoffLimitPerIndex": _REPLACED if spec.max_restarts is None else spec.max_restarts,
        "podFailurePolicy": {
            "rules": [
                *_innocent(EXIT_LATER),
                {"action": "FailIndex", "onExitCodes": _codes("In", _UNUSABLE)},
            ]
        },
        # A pod exits with 0 only if the run is sealed and no item is left for any pod.
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }


def _ddp_failures() -> dict[str, Any]:
    """Return rules by which a failed pod ends the Job, because the other pods would wait for it.

    A lost pod does not end the Job. Either the others stay, and the ranks of its replacement join
    theirs; or they exit as it did, or with 75 if it was their meeting point, and all are replaced.
    """
    innocent = [EXIT_LATER, _TOLD_TO_LEAVE]
    others = _codes("NotIn", innocent)  # codespell:ignore notin
    failed = {"action": "FailJob", "onExitCodes": others}
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": [*_innocent(*innocent), failed]}}


def _innocent(*codes: int) -> list[dict[str, Any]]:
    """Return rules for ends of a pod that are not failures: another pod takes its place."""
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _codes("In", list(codes))},
    ]


def _codes(operator: str, values: list[int]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": operator, "values": list(values)}


def _jobset(
    spec: ManifestSpec, name: str, labels: dict[str, str], job: dict[str, Any]
) -> dict[str, Any]:
    head = _metadata(spec, name, labels)
    inner: dict[str, Any] = {"network": {"enableDNSHostnames": True, "subdomain": name}}
    if spec.queue_name is not None:
        head["labels"][QUEUE_LABEL] = spec.queue_name
        inner["suspend"] = True
    if spec.ttl is not None:
        inner["ttlSecondsAfterFinished"] = _ttl_s(spec.ttl)
    if spec.kind != "kubernetes-queue":
        again = _STARTED_AGAIN if spec.max_restarts is None else spec.max_restarts
        inner["failurePolicy"] = {"maxRestarts": again}
    inner["replicatedJobs"] = [{"name": ROLE, "replicas": 1, "template": {"spec": job}}]
    return {"apiVersion": JOBSET, "kind": "JobSet", "metadata": head, "spec": inner}


def _ttl_s(text: str) -> int:
    return round(parse_duration(text, where="--ttl", zero=True))
