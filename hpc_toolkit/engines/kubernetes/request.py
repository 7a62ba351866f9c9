"""A request for a manifest, checked field by field when it is created."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hpc_toolkit.engines.kubernetes.values import (
    COUNTS,
    PATTERNS,
    Volume,
    check_env,
    check_pull_secret,
    on_volume,
    split_secret,
    split_selector,
    split_toleration,
)
from hpc_toolkit.errors import RenderError, near_miss
from hpc_toolkit.slurm.allowlist import check_count, check_match, check_names, refuse_twice
from hpc_toolkit.system.quantities import parse_duration, parse_size_mib

Kind = Literal["kubernetes-queue", "kubernetes-ddp", "kubernetes-scaling"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_HOST_MAX = 63
_TRAININGS: tuple[Kind, ...] = ("kubernetes-ddp", "kubernetes-scaling")
ONLY_OF: dict[str, tuple[Kind, ...]] = {
    "nodes": ("kubernetes-queue", "kubernetes-ddp"),
    "node_counts": ("kubernetes-scaling",),
    "workers": ("kubernetes-queue",),
    "max_restarts": ("kubernetes-queue",),
    "command": _TRAININGS,
}
"""Fields that only some kinds use."""
NODE_COUNTS = (1, 2, 4)
"""Numbers of pods that are measured by default."""
_WORD = ".{0,32768}"
_WORDS_MAX = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSpec:
    """One manifest; None leaves a value out, so that the cluster's default applies.

    Raises RenderError or ConfigError for a value that no cluster could accept, and for one that
    the kind does not use.
    """

    kind: Kind
    image: str
    """The image of the pods, with hpctk on its PATH."""
    job_name: str = ""
    """Name of the Job and of its Service; by default the kind."""
    namespace: str | None = None
    """Namespace of both; by default kubectl's current one."""
    nodes: int | None = None
    """Number of pods; by default 1."""
    node_counts: tuple[int, ...] = ()
    """Numbers of pods to measure, one after another; by default 1, 2 and 4."""
    gpus_per_node: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    """The device plugin's name for a GPU."""
    cpus: int | None = None
    """CPUs of each pod, as request and limit."""
    mem: str | None = None
    """Memory of each pod as Slurm writes it ("480G" is GiB), as request and limit."""
    shm: str | None = None
    """Size of /dev/shm, which counts as memory of the pod; by default 2G for a training, else the
    runtime's default (64 MiB)."""
    pvc: tuple[str, ...] = ()
    """``CLAIM[:/DIR]``: volumes that many nodes can write to (ReadWriteMany), and their mount
    points in the pods, by default /data."""
    run: str | None = None
    """Directory of the run, or of the training; a relative path is on the first volume."""
    workers: int | None = None
    """Workers of each pod; by default one per GPU, or one."""
    max_restarts: int | None = None
    """How often a failed pod of a queue is replaced; by default 10."""
    time: str | None = None
    """Time limit of the complete Job, in sbatch's notation."""
    user: str = "1000:1000"
    """UID and GID of the program; the run must belong to that user."""
    env: tuple[tuple[str, str], ...] = ()
    env_from_secret: tuple[str, ...] = ()
    """``NAME=SECRET:KEY``: variables that Kubernetes reads from Secrets."""
    image_pull_secret: tuple[str, ...] = ()
    """Secrets with which the image is pulled."""
    node_selector: tuple[str, ...] = ()
    """``KEY=VALUE``: labels that a node must have."""
    toleration: tuple[str, ...] = ()
    """``KEY[=VALUE][:EFFECT]``: taints that a node may have."""
    queue_name: str | None = None
    """LocalQueue of Kueue that admits the Job."""
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
    def volumes(self) -> tuple[Volume, ...]:
        found = tuple(map(Volume.of, self.pvc))
        for names in ([one.claim for one in found], [one.path for one in found]):
            refuse_twice(names, "--pvc", "write NAME:/DIR, each with a name and a DIR of its own")
        return found

    @property
    def directory(self) -> str | None:
        """The run's directory as the pods see it."""
        return None if self.run is None else on_volume(self.run, self.volumes)

    @property
    def secrets(self) -> list[tuple[str, str, str]]:
        """Variable, Secret and key of each variable that Kubernetes reads from a Secret."""
        found = [split_secret(text) for text in self.env_from_secret]
        refuse_twice([name for name, *_ in (*self.env, *found)], "--env")
        return found

    @property
    def selectors(self) -> dict[str, str]:
        found = [split_selector(text) for text in self.node_selector]
        refuse_twice([key for key, _ in found], "--node-selector")
        return dict(found)

    @property
    def tolerations(self) -> list[dict[str, str]]:
        """Taints that a node may have, as Kubernetes describes them."""
        return [split_toleration(text) for text in self.toleration]

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


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _check_each(spec: ManifestSpec) -> None:
    for field in PATTERNS:
        value = getattr(spec, field)
        if value is not None and (field, value) != ("job_name", ""):
            check_match(value, *PATTERNS[field], option(field))
    for field, limits in COUNTS.items():
        value = getattr(spec, field)
        if value is not None:
            check_count(value, limits, option(field))
    for size in spec.node_counts:
        check_count(size, COUNTS["nodes"], "--node-counts")
    refuse_twice([str(size) for size in spec.node_counts], "--node-counts")
    if spec.run:
        check_names(spec.run, "--run")
    for name, value in spec.env:
        check_env(name, value)
    for secret in spec.image_pull_secret:
        check_pull_secret(secret)


def _check_together(spec: ManifestSpec) -> None:
    for field, kinds in ONLY_OF.items():
        if getattr(spec, field) not in (None, ()) and spec.kind not in kinds:
            msg = f"{option(field)}: not used by {spec.kind}"
            hint = "use --node-counts" if field == "nodes" else "leave it out"
            raise RenderError(msg, hint=hint)
    _check_volume(spec)
    _check_program(spec)
    if spec.mem_mib is not None and spec.shm_mib >= spec.mem_mib:
        msg = f"--shm: {spec.shm_mib} MiB are not less than the {spec.mem_mib} MiB of --mem"
        raise RenderError(msg, hint="files in /dev/shm count as memory of the pod")
    _check_name(spec)


def _check_volume(spec: ManifestSpec) -> None:
    queue = spec.kind == "kubernetes-queue"
    if not spec.pvc and (queue or spec.run is not None):
        msg = f"{spec.kind if queue else '--run'}: no volume is given"
        raise RenderError(msg, hint="--pvc NAME: a claim with the access mode ReadWriteMany")
    if spec.run is None and queue:
        msg = "kubernetes-queue needs a run"
        raise RenderError(msg, hint="add --run DIR, a directory on a volume")
    # Computed once, to refuse a path outside the volumes.
    _ = spec.directory


def _check_program(spec: ManifestSpec) -> None:
    if spec.kind == "kubernetes-ddp" and not spec.command:
        msg = "kubernetes-ddp needs a training script"
        hint = "write it after --: hpctk render kubernetes-ddp --image IMAGE -- train.py --lr 1"
        raise RenderError(msg, hint=hint)
    if spec.command and spec.command[0].startswith("-") and spec.kind == "kubernetes-ddp":
        msg = f"{spec.command[0]!r} is not a training script"
        raise RenderError(msg, hint="write a path; ./-x for one called -x")
    for word in spec.command:
        check_match(word, _WORD, "printable characters", "the script's arguments")
    if sum(map(len, spec.command)) > _WORDS_MAX:
        msg = "the script's arguments are too long for a manifest"
        raise RenderError(msg, hint="put them into a file in the image or on the volume")


def _check_name(spec: ManifestSpec) -> None:
    """Check that a pod's host name, the Job's name and the pod's number, fits a DNS label."""
    longest = f"-{spec.pods - 1}"
    if len(spec.name) + len(longest) > _HOST_MAX:
        most = _HOST_MAX - len(longest)
        msg = f"--job-name: {spec.name!r} has more than {most} characters"
        raise RenderError(msg, hint=f"the pods are called {spec.name}{longest}: 63 at most")
