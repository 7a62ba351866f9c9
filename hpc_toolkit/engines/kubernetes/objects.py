"""The objects of a manifest as data: Jobs, Services, and the pods in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import TRY_AGAIN

if TYPE_CHECKING:
    from hpc_toolkit.engines.kubernetes.request import ManifestSpec

INDEX = "batch.kubernetes.io/job-completion-index"
"""The annotation, and since 1.28 the label, that holds a pod's number in its Job."""
CONTAINER = "hpctk"
MASTER_PORT = 29500
"""A free port in every pod, because each pod has its own address."""
GRACE_S = 60
"""Seconds that workers or ranks have to finish or to save when a pod is asked to leave."""
_MARGIN_S = 15
"""Seconds that the launcher or the pool may take beyond :data:`GRACE_S`."""
_TOLD_TO_LEAVE = 143
"""Exit code after SIGTERM: the pod, or another pod of its training, was asked to leave."""
_UNUSABLE = [1, 2]
"""Exit codes of hpctk that a retry cannot fix: bad input, and wrong usage."""
_REPLACED = 10
"""How often a failed pod of a queue is replaced by default."""


def pod_template(
    spec: ManifestSpec, labels: dict[str, str], argv: list[str], meeting: str | None = None
) -> dict[str, Any]:
    """Return the template of pods that run hpctk with ``argv``.

    Args:
        labels: labels by which the pods are found.
        argv: arguments of hpctk; ``$(NAME)`` in them is a variable of the pod.
        meeting: host name of the first pod, for pods that meet there.
    """
    uid, _, gid = spec.user.partition(":")
    pod: dict[str, Any] = {
        # A replacement pod has another name; a restarted container has not, and its worker would
        # take the locks of the earlier worker for locks of its own kernel.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S + _MARGIN_S,
        # Otherwise a Service with a matching name would set MASTER_PORT in the pods.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": int(uid),
            "runAsGroup": int(gid or uid),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    placement = {
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secret],
        "nodeSelector": spec.selectors,
        "tolerations": spec.tolerations,
    }
    pod |= {field: value for field, value in placement.items() if value}
    if spec.kind == "kubernetes-scaling":
        # Never two pods on one node, because communication between nodes is measured.
        apart = {
            "labelSelector": {"matchLabels": {"hpctk-job": labels["hpctk-job"]}},
            "topologyKey": "kubernetes.io/hostname",
        }
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
        pod["affinity"] = {"podAntiAffinity": rule}
    volumes, mounts = _volumes(spec)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.image,
        "command": ["hpctk"],
        "args": argv,
        "env": _variables(spec, meeting),
    }
    if resources := _resources(spec):
        container["resources"] = resources
    # The pod security standard "restricted" requires this; hpctk needs no more rights.
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    pod["containers"] = [container]
    if mounts:
        container["volumeMounts"] = mounts
        pod["volumes"] = volumes
    return {"metadata": {"labels": labels}, "spec": pod}


def literal(text: str) -> str:
    """Escape ``text`` for words and values, where Kubernetes replaces ``$(NAME)`` and ``$$``."""
    return text.replace("$", "$$")


def _variables(spec: ManifestSpec, meeting: str | None) -> list[dict[str, Any]]:
    # The pod's name is unique. The host name is not: it consists of the Job's name and a number,
    # and a replacement on the same node would trust locks of the earlier pod.
    found = [_from_field("HPCTK_HOST", "metadata.name")]
    if meeting is not None:
        found.append(_from_field("NODE_RANK", f"metadata.annotations['{INDEX}']"))
        found.append({"name": "MASTER_ADDR", "value": meeting})
        found.append({"name": "MASTER_PORT", "value": str(MASTER_PORT)})
    given = {name for name, *_ in (*spec.env, *spec.secrets)}
    if spec.cpus is not None and "OMP_NUM_THREADS" not in given:
        # A limit is a share of CPU time: the program sees and would count all CPUs of the node.
        threads = max(1, spec.cpus // spec.processes)
        found.append({"name": "OMP_NUM_THREADS", "value": str(threads)})
    # The pod's /tmp: without an entry in the image's /etc/passwd, the home is the root directory.
    found += [{"name": "HOME", "value": "/tmp"}] if "HOME" not in given else []  # noqa: S108
    found += [{"name": name, "value": literal(value)} for name, value in spec.env]
    for name, secret, key in spec.secrets:
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        found.append({"name": name, "valueFrom": reference})
    return found


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _resources(spec: ManifestSpec) -> dict[str, Any]:
    """Return equal requests and limits: such pods are evicted last, and keep whole CPUs."""
    wanted: dict[str, str] = {}
    if spec.cpus is not None:
        wanted["cpu"] = str(spec.cpus)
    if spec.mem_mib is not None:
        wanted["memory"] = _quantity(spec.mem_mib)
    if spec.gpus_per_node:
        wanted[spec.gpu_resource] = str(spec.gpus_per_node)
    # Copies: YAML would write the second of two equal objects as a reference to the first.
    return {"requests": dict(wanted), "limits": dict(wanted)} if wanted else {}


def _quantity(mib: int) -> str:
    return f"{mib // 1024}Gi" if mib % 1024 == 0 else f"{mib}Mi"


def _volumes(spec: ManifestSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for number, volume in enumerate(spec.volumes, 1):
        name = "data" if number == 1 else f"data-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": volume.claim}})
        mounts.append({"name": name, "mountPath": volume.path})
    if spec.shm_mib:
        # NCCL and the workers of a DataLoader share memory there; without it there are 64 MiB.
        memory = {"medium": "Memory", "sizeLimit": _quantity(spec.shm_mib)}
        volumes.append({"name": "shm", "emptyDir": memory})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - in a pod
    return volumes, mounts


def objects(spec: ManifestSpec, argv: list[str]) -> list[dict[str, Any]]:
    """Return the objects of the manifest, in the order of their creation.

    ``argv`` are the arguments of hpctk in each pod.
    """
    name = spec.name
    meeting = None if spec.kind == "kubernetes-queue" else f"{name}-0.{name}"
    labels = {
        "app.kubernetes.io/name": spec.name,
        "app.kubernetes.io/managed-by": "hpctk",
        "hpctk-job": name,
    }
    job = _job_spec(spec, pod_template(spec, labels, argv, meeting))
    head = _metadata(spec, labels)
    if spec.queue_name is not None:
        head["labels"]["kueue.x-k8s.io/queue-name"] = spec.queue_name
        # Kueue sets this as well, but a Job that Kueue missed must not start either.
        job = {"suspend": True, **job}
    if not meeting:
        return [_object("batch/v1", "Job", head, job)]
    job["template"]["spec"] = {"subdomain": name, **job["template"]["spec"]}
    # Headless: it gives each pod a host name.
    service = {
        "clusterIP": "None",
        # Pods look for each other before any of them is ready.
        "publishNotReadyAddresses": True,
        "selector": {"hpctk-job": name},
        "ports": [{"name": "meeting", "port": MASTER_PORT}],
    }
    return [
        _object("v1", "Service", _metadata(spec, labels), service),
        _object("batch/v1", "Job", head, job),
    ]


def _object(version: str, kind: str, head: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": head, "spec": spec}


def _metadata(spec: ManifestSpec, labels: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": spec.name}
    if spec.namespace is not None:
        found["namespace"] = spec.namespace
    return found | {"labels": dict(labels)}


def _job_spec(spec: ManifestSpec, template: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": spec.pods,
        "parallelism": spec.pods,
    }
    if spec.time is not None:
        job["activeDeadlineSeconds"] = spec.time_s
    if spec.kind == "kubernetes-queue":
        job |= _queue_failures(spec)
    elif spec.kind == "kubernetes-ddp":
        job |= _ddp_failures()
    else:
        # Any pod that is lost ends the Job. A replacement would wait for pods that have already
        # measured their part, and a disturbed machine should not be measured.
        job["backoffLimit"] = 0
    return job | {"template": template}


def _queue_failures(spec: ManifestSpec) -> dict[str, Any]:
    """Return rules by which pods fail one by one, and the first success ends the Job."""
    return {
        "backoffLimitPerIndex": _REPLACED if spec.max_restarts is None else spec.max_restarts,
        "podFailurePolicy": {
            "rules": [
                *_innocent(TRY_AGAIN),
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
    innocent = [TRY_AGAIN, _TOLD_TO_LEAVE]
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
