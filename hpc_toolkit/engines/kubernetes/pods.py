"""The pod template that all Jobs of a manifest share, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.engines.kubernetes.values import split_secret, split_selector, split_toleration
from hpc_toolkit.system.quantities import parse_size_mib

if TYPE_CHECKING:
    from hpc_toolkit.engines.kubernetes.request import ManifestSpec

INDEX = "batch.kubernetes.io/job-completion-index"
"""The annotation, and since 1.28 the label, that holds a pod's number in its Job."""
CONTAINER = "hpctk"
MASTER_PORT = 29500
"""A free port in every pod, because each pod has its own address."""
_MARGIN_S = 15
"""Seconds that the launcher or the pool may take beyond the grace period of its children."""


def pod_template(
    spec: ManifestSpec, labels: dict[str, str], argv: list[str], meeting: str | None = None
) -> dict[str, Any]:
    """Return the template of pods that run hpctk with ``argv``.

    Args:
        labels: labels by which the pods are found.
        argv: arguments of hpctk; ``$(NAME)`` in them is a variable of the pod.
        meeting: host name of the first pod, for pods that meet there.
    """
    pod: dict[str, Any] = {
        # A replacement pod has another name; a restarted container has not, and its worker would
        # take the locks of the earlier worker for locks of its own kernel.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.grace_s + _MARGIN_S,
        # Otherwise a Service with a matching name would set MASTER_PORT in the pods.
        "enableServiceLinks": False,
        "automountServiceAccountToken": spec.service_account is not None,
        "securityContext": _pod_security(spec),
    }
    pod |= _placement(spec)
    if spec.kind == "kubernetes-scaling":
        pod["affinity"] = {"podAntiAffinity": _apart(labels)}
    volumes, mounts = _volumes(spec)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.image,
        "command": _program(spec),
        "args": argv,
    }
    if spec.chdir is not None:
        container["workingDir"] = spec.chdir
    container["env"] = _variables(spec, meeting)
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


def _program(spec: ManifestSpec) -> list[str]:
    if spec.python is None:
        return ["hpctk"]
    return [literal(spec.python), "-m", "hpc_toolkit"]


def _pod_security(spec: ManifestSpec) -> dict[str, Any]:
    uid, _, gid = spec.user.partition(":")
    security: dict[str, Any] = {
        "runAsNonRoot": True,
        "runAsUser": int(uid),
        "runAsGroup": int(gid or uid),
    }
    if spec.fs_group is not None:
        security["fsGroup"] = spec.fs_group
        # Otherwise every start would set the owner of each file on the volume again.
        security["fsGroupChangePolicy"] = "OnRootMismatch"
    return security | {"seccompProfile": {"type": "RuntimeDefault"}}


def _placement(spec: ManifestSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if spec.service_account is not None:
        found["serviceAccountName"] = spec.service_account
    if spec.image_pull_secret:
        found["imagePullSecrets"] = [{"name": name} for name in spec.image_pull_secret]
    if spec.priority_class is not None:
        found["priorityClassName"] = spec.priority_class
    if spec.node_selector:
        selectors = (split_selector(text, "--node-selector") for text in spec.node_selector)
        found["nodeSelector"] = dict(selectors)
    if spec.toleration:
        found["tolerations"] = [split_toleration(text, "--toleration") for text in spec.toleration]
    return found


def _apart(labels: dict[str, str]) -> dict[str, Any]:
    """Return a rule against two pods on one node: communication between nodes is measured."""
    term = {
        "labelSelector": {"matchLabels": {"hpctk-job": labels["hpctk-job"]}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _variables(spec: ManifestSpec, meeting: str | None) -> list[dict[str, Any]]:
    # The pod's name is unique. The host name is not: it consists of the Job's name and a number,
    # and a replacement on the same node would trust locks of the earlier pod.
    found = [_from_field("HPCTK_HOST", "metadata.name")]
    if meeting is not None:
        found.append(_from_field("NODE_RANK", f"metadata.annotations['{INDEX}']"))
        found.append({"name": "MASTER_ADDR", "value": meeting})
        found.append({"name": "MASTER_PORT", "value": str(MASTER_PORT)})
    secrets = [split_secret(text, "--env-from-secret") for text in spec.env_from_secret]
    given = {*dict(spec.env), *(name for name, _, _ in secrets)}
    if spec.cpus is not None and "OMP_NUM_THREADS" not in given:
        # A limit is a share of CPU time: the program sees and would count all CPUs of the node.
        threads = max(1, spec.cpus // spec.processes)
        found.append({"name": "OMP_NUM_THREADS", "value": str(threads)})
    # The pod's /tmp: without an entry in the image's /etc/passwd, the home is the root directory.
    found += [{"name": "HOME", "value": "/tmp"}] if "HOME" not in given else []  # noqa: S108
    found += [{"name": name, "value": literal(value)} for name, value in spec.env]
    for name, secret, key in secrets:
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
    if spec.mem is not None:
        wanted["memory"] = _quantity(parse_size_mib(spec.mem, where="--mem"))
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
