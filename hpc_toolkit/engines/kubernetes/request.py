"""A request for a manifest, checked field by field when it is created."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hpc_toolkit.errors import RenderError, near_miss
from hpc_toolkit.slurm.allowlist import (
    check_count,
    check_match,
    check_names,
    looks_secret,
    refusal,
    refuse_twice,
)
from hpc_toolkit.system.options import spelled
from hpc_toolkit.system.quantities import parse_duration, parse_size_mib

Kind = Literal["kubernetes-queue", "kubernetes-ddp", "kubernetes-scaling"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ONLY_OF: dict[str, tuple[Kind, ...]] = {
    "nodes": ("kubernetes-queue", "kubernetes-ddp"),
    "node_counts": ("kubernetes-scaling",),
    "workers": ("kubernetes-queue",),
    "max_restarts": ("kubernetes-queue",),
    "command": ("kubernetes-ddp", "kubernetes-scaling"),
}
"""Fields that only some kinds use."""
NODE_COUNTS = (1, 2, 4)
"""Numbers of pods that are measured by default."""

_LABEL = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?![-.a-z0-9]{{254}}){_LABEL}(?:\.{_LABEL})*"
_NAME = "[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = rf"(?:{_SUBDOMAIN}/)?{_NAME}"
# The grammar of package "reference" of the project distribution, which 'docker pull' uses.
_HOST = "[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?"
_PART = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = (
    rf"(?=.{{1,512}}\Z)(?:{_HOST}(?:\.{_HOST})*(?::[0-9]{{1,5}})?/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_VALUE = ".{0,32768}"
_WORDS_MAX = 131_072
_HOST_MAX = 63
_NO_MOUNTS = {"", ".", "dev", "proc", "sys", "etc"}
"""First parts of paths that no mount point may have, because it would cover the image's own."""
_OURS = ("SLURM", "SBATCH_", "SRUN_", "PET_", "KUBERNETES_", "JOB_COMPLETION_INDEX")
_SET = {"HPCTK_HOST", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} | {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

_PATTERNS = {
    # Before Kubernetes 1.34, the name of the Service, which is the same, begins with a letter.
    "job_name": ("(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)?", "a letter, then a-z, 0-9 and '-'"),
    "namespace": (_LABEL, "at most 63 of a-z, 0-9 and '-'"),
    "image": (_IMAGE, "an image such as registry.org/group/name:1.2, without spaces"),
    "queue_name": (_LABEL, "the name of a LocalQueue of Kueue"),
    "gpu_resource": (
        f"{_SUBDOMAIN}/{_NAME}",
        "the name of an extended resource such as amd.com/gpu",
    ),
    "run": ("[^-].{0,4095}", "a directory on a volume"),
    "user": ("[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", "UID or UID:GID, neither of them 0"),
}
"""Pattern that the complete value of a field must match, and the hint if it does not."""
_PARTS = {
    "env_from_secret": (
        f"([^=]+)=({_SUBDOMAIN}):([-._A-Za-z0-9]{{1,253}})",
        "NAME=SECRET:KEY, with the names of a Secret and of one of its keys",
    ),
    "image_pull_secret": (_SUBDOMAIN, "the name of a Secret: a-z, 0-9, '-' and '.'"),
    "node_selector": (
        f"({_KEY})=((?:{_NAME})?)",
        "KEY=VALUE, as 'kubectl get nodes --show-labels' has them",
    ),
    "toleration": (
        f"({_KEY})(?:=((?:{_NAME})?))?(?::({'|'.join(_EFFECTS)}))?",
        f"KEY[=VALUE][:EFFECT], the effect being {', '.join(_EFFECTS)}",
    ),
}
"""Pattern and hint for each value of a repeated option; groups are the parts of the value."""
_COUNTS = {
    "nodes": (1, 10_000),  # the most that an Indexed Job can track in time
    "gpus_per_node": (0, 128),
    "cpus": (1, 4096),
    "workers": (1, 1024),
    "max_restarts": (0, 1000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSpec:
    """One manifest; None leaves a value out, so that the cluster's default applies.

    The help of ``hpctk render KIND`` explains the fields. Raises RenderError or ConfigError for a
    value that no cluster could accept, and for one that the kind does not use.
    """

    kind: Kind
    image: str
    job_name: str = ""
    namespace: str | None = None
    nodes: int | None = None
    node_counts: tuple[int, ...] = ()
    gpus_per_node: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpus: int | None = None
    mem: str | None = None
    shm: str | None = None
    pvc: tuple[str, ...] = ()
    run: str | None = None
    workers: int | None = None
    max_restarts: int | None = None
    time: str | None = None
    user: str = "1000:1000"
    env: tuple[tuple[str, str], ...] = ()
    env_from_secret: tuple[str, ...] = ()
    image_pull_secret: tuple[str, ...] = ()
    node_selector: tuple[str, ...] = ()
    toleration: tuple[str, ...] = ()
    queue_name: str | None = None
    command: tuple[str, ...] = ()
    """Script and arguments, word by word."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            msg = f"unknown manifest: {self.kind!r}"
            raise RenderError(msg, hint=near_miss(str(self.kind), list(KINDS)))
        _check_each(self)
        # These properties parse their fields, and raise the error of an invalid one.
        _ = (self.volumes, self.secrets, self.selectors, self.tolerations)
        _ = (self.mem_mib, self.shm_mib, self.time_s)
        _check_together(self)

    @property
    def name(self) -> str:
        """Name of the Job and of its Service."""
        return self.job_name or self.kind

    @property
    def pods(self) -> int:
        """Number of pods of the Job; of a measurement, those of the largest world size."""
        if self.kind == "kubernetes-scaling":
            return max(self.node_counts or NODE_COUNTS)
        return self.nodes or 1

    @property
    def volumes(self) -> list[tuple[str, str]]:
        """Claim and mount point of each volume."""
        found = list(map(_split_volume, self.pvc))
        for names in zip(*found, strict=True):
            refuse_twice(
                [*names], "--pvc", "write NAME:/DIR, each with a name and a DIR of its own"
            )
        return found

    @property
    def directory(self) -> str | None:
        """The run's directory as the pods see it; a relative one is on the first volume."""
        if self.run is None:
            return None
        roots = [path for _, path in self.volumes]
        plain = _plain(self.run if self.run.startswith("/") else f"{roots[0]}/{self.run}")
        if ".." in plain.split("/") or not any(plain.startswith(f"{root}/") for root in roots):
            msg = f"--run: {self.run!r} is not below {' or '.join(roots)}"
            raise RenderError(msg, hint="a path on a volume, in full or relative to the first one")
        return plain

    @property
    def secrets(self) -> list[tuple[str, str, str]]:
        """Variable, Secret and key of each variable that Kubernetes reads from a Secret."""
        found = [_split(text, "env_from_secret") for text in self.env_from_secret]
        for name, *_ in found:
            _check_variable(name)
        refuse_twice([name for name, *_ in (*self.env, *found)], "--env")
        return found

    @property
    def selectors(self) -> dict[str, str]:
        """Labels that a node must have."""
        found = [_split(text, "node_selector") for text in self.node_selector]
        refuse_twice([key for key, _ in found], "--node-selector")
        return dict(found)

    @property
    def tolerations(self) -> list[dict[str, str]]:
        """Taints that a node may have, as Kubernetes describes them."""
        found = []
        for text in self.toleration:
            key, value, effect = _split(text, "toleration")
            operator = "Exists" if value is None else "Equal"
            fields = {"key": key, "operator": operator, "value": value, "effect": effect}
            found.append({name: one for name, one in fields.items() if one is not None})
        return found

    @property
    def processes(self) -> int:
        """Workers, or ranks, of each pod."""
        return self.workers or max(1, self.gpus_per_node)

    @property
    def time_s(self) -> int | None:
        """Whole seconds that the Job may run; None: no limit."""
        return None if self.time is None else math.ceil(parse_duration(self.time, where="--time"))

    @property
    def mem_mib(self) -> int | None:
        return None if self.mem is None else parse_size_mib(self.mem, where="--mem")

    @property
    def shm_mib(self) -> int:
        """MiB of /dev/shm; 0 leaves the runtime's default."""
        if self.shm is not None:
            return parse_size_mib(self.shm, where="--shm")
        return 0 if self.kind == "kubernetes-queue" else 2048


def _split(text: object, field: str) -> tuple[Any, ...]:
    """Return the parts of one value of a field that may be repeated. Raises RenderError."""
    pattern, wanted = _PARTS[field]
    found = re.fullmatch(pattern, text) if isinstance(text, str) else None
    if found is None:
        raise refusal(spelled(field), text, wanted)
    return found.groups()


def _split_volume(text: str) -> tuple[str, str]:
    """Split ``CLAIM[:/DIR]`` into the claim and an absolute path. Raises RenderError."""
    claim, colon, path = text.partition(":")
    wanted = "the name of a PersistentVolumeClaim: a-z, 0-9, '-' and '.', or NAME:/DIR"
    check_match(claim, _SUBDOMAIN, wanted, "--pvc")
    if colon:
        check_match(path, "/[^:]{1,4095}", "an absolute path without ':'", "--pvc")
        check_names(path, "--pvc")
        if path.split("/")[1] in _NO_MOUNTS or ".." in path.split("/"):
            msg = f"--pvc: {path!r} cannot be a mount point of a pod"
            raise RenderError(msg, hint="write a directory such as /data")
    return claim, _plain(path or "/data")


def _plain(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def _check_each(spec: ManifestSpec) -> None:
    for field, (pattern, wanted) in _PATTERNS.items():
        value = getattr(spec, field)
        if value is not None or field in ("image", "gpu_resource", "user"):
            check_match(value, pattern, wanted, spelled(field))
    for field, limits in _COUNTS.items():
        if (value := getattr(spec, field)) is not None:
            check_count(value, limits, spelled(field))
    for size in spec.node_counts:
        check_count(size, _COUNTS["nodes"], "--node-counts")
    refuse_twice([str(size) for size in spec.node_counts], "--node-counts")
    if spec.run:
        check_names(spec.run, "--run")
    for name, value in spec.env:
        _check_variable(name)
        if looks_secret(name):
            msg = f"--env: {name} looks like a secret, and manifests must not contain secrets"
            hint = f"--env-from-secret {name}=SECRET:KEY reads it from a Secret"
            raise RenderError(msg, hint=hint)
        check_match(value, _VALUE, "a value of printable characters", f"--env {name}")
    for secret in spec.image_pull_secret:
        _split(secret, "image_pull_secret")


def _check_variable(name: str) -> None:
    where = "--env"
    check_match(name, "[A-Za-z_][A-Za-z0-9_]{0,127}", "a name of letters, digits and '_'", where)
    if name.startswith(_OURS) or name in _SET:
        raise refusal(where, name, "a name that neither Kubernetes nor the manifest sets")


def _check_together(spec: ManifestSpec) -> None:
    for field, kinds in ONLY_OF.items():
        if getattr(spec, field) not in (None, ()) and spec.kind not in kinds:
            msg = f"{spelled(field)}: not used by {spec.kind}"
            hint = "use --node-counts" if field == "nodes" else "leave it out"
            raise RenderError(msg, hint=hint)
    queue = spec.kind == "kubernetes-queue"
    if not spec.pvc and (queue or spec.run is not None):
        msg = f"{spec.kind if queue else '--run'}: no volume is given"
        raise RenderError(msg, hint="--pvc NAME: a claim with the access mode ReadWriteMany")
    if spec.run is None and queue:
        msg = "kubernetes-queue needs a run"
        raise RenderError(msg, hint="add --run DIR, a directory on a volume")
    _ = spec.directory  # refuses a path outside the volumes
    _check_program(spec)
    if spec.mem_mib is not None and spec.shm_mib >= spec.mem_mib:
        msg = f"--shm: {spec.shm_mib} MiB are not less than the {spec.mem_mib} MiB of --mem"
        raise RenderError(msg, hint="files in /dev/shm count as memory of the pod")
    # A pod's host name, the Job's name and the pod's number, is a DNS label.
    longest = f"-{spec.pods - 1}"
    if len(spec.name) + len(longest) > _HOST_MAX:
        msg = f"--job-name: {spec.name!r} has more than {_HOST_MAX - len(longest)} characters"
        raise RenderError(msg, hint=f"the pods are called {spec.name}{longest}: 63 at most")


def _check_program(spec: ManifestSpec) -> None:
    if spec.kind == "kubernetes-ddp" and not spec.command:
        msg = "kubernetes-ddp needs a training script"
        hint = "write it after --: hpctk render kubernetes-ddp --image IMAGE -- train.py --lr 1"
        raise RenderError(msg, hint=hint)
    if spec.command and spec.command[0].startswith("-") and spec.kind == "kubernetes-ddp":
        msg = f"{spec.command[0]!r} is not a training script"
        raise RenderError(msg, hint="write a path; ./-x for one called -x")
    for word in spec.command:
        check_match(word, _VALUE, "printable characters", "the script's arguments")
    if sum(map(len, spec.command)) > _WORDS_MAX:
        msg = "the script's arguments are too long for a manifest"
        raise RenderError(msg, hint="put them into a file in the image or on the volume")
