"""A request for a manifest, checked field by field when it is created, and its volumes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hpc_toolkit.engines.kubernetes.values import (
    COUNTS,
    PATTERNS,
    check_claim,
    check_env,
    check_number,
    check_secret_name,
    split_secret,
    split_selector,
    split_toleration,
)
from hpc_toolkit.errors import RenderError, near_miss
from hpc_toolkit.slurm.allowlist import check_match, check_names
from hpc_toolkit.system.quantities import parse_duration, parse_size_mib

Kind = Literal["kubernetes-queue", "kubernetes-ddp", "kubernetes-scaling"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_HOST_MAX = 63
_ROLE = "-pod-0"
"""Text that JobSet puts between its own name and a pod's number."""
_TRAININGS: tuple[Kind, ...] = ("kubernetes-ddp", "kubernetes-scaling")
ONLY_OF: dict[str, tuple[Kind, ...]] = {
    "nodes": ("kubernetes-queue", "kubernetes-ddp"),
    "node_counts": ("kubernetes-scaling",),
    "workers": ("kubernetes-queue",),
    "lease": ("kubernetes-queue",),
    "backend": _TRAININGS,
    "start_timeout": _TRAININGS,
    "rank_restarts": ("kubernetes-ddp",),
    "command": _TRAININGS,
}
"""Fields that only some kinds use."""
_WORD = ".{0,32768}"
_WORDS_MAX = 131_072
MOUNT = "/data"
"""Mount point of a volume for which the user gives none."""
_PATH = "/[^:]{1,4095}"
_WANTED = "an absolute path without ':'"
_TAKEN = {"", ".", "dev", "proc", "sys", "etc"}
"""First parts of paths that no mount point may have, because it would cover the image's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSpec:
    """One manifest; None leaves a value out, so that the cluster's default applies.

    Raises RenderError or ConfigError for a value that no cluster could accept, and for one that
    the kind does not use.
    """

    kind: Kind
    """The kind of work that the pods do."""
    image: str
    """The image of the pods, with hpctk on its PATH or in ``python``."""
    job_name: str = ""
    """Name of the Job and of its Service; by default the kind."""
    namespace: str | None = None
    """Namespace of both; by default kubectl's current one."""
    nodes: int | None = None
    """Number of pods; by default 1."""
    node_counts: tuple[int, ...] = ()
    """Numbers of pods to measure, one Job each; by default 1, 2 and 4."""
    gpus_per_node: int = 0
    """GPUs of each pod."""
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
    points in the pods."""
    mount: str | None = None
    """Mount point of a volume without ``/DIR``; by default /data."""
    run: str | None = None
    """Directory of the run, or of the training; a relative path is on the first volume."""
    chdir: str | None = None
    """Directory in which the program starts; by default the image's."""
    python: str | None = None
    """Absolute path of the interpreter in the image that has hpc_toolkit."""
    workers: int | None = None
    """Workers of each pod; by default one per GPU, or one."""
    lease: str | None = None
    """Silence after which a worker counts as dead."""
    grace: str = "60s"
    """Time to finish, or to save, when a pod is asked to leave."""
    start_timeout: str = "30min"
    """How long pods that have started wait for the others, which may still pull their image."""
    backend: str | None = None
    """nccl or gloo; by default ``hpctk launch`` chooses by the GPUs."""
    rank_restarts: int | None = None
    """How often the ranks of a training start again inside their pods; by default 3."""
    max_restarts: int | None = None
    """How often a pod of a queue is replaced after a failure; how often a JobSet starts again."""
    time: str | None = None
    """Time limit of the complete Job, in sbatch's notation."""
    ttl: str | None = None
    """How long a finished Job is kept."""
    user: str = "1000:1000"
    """UID and GID of the program; the run must belong to that user."""
    fs_group: int | None = None
    """Group that Kubernetes sets as the owner of the volumes."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables of the program."""
    env_from_secret: tuple[str, ...] = ()
    """``NAME=SECRET:KEY``: variables that Kubernetes reads from Secrets."""
    service_account: str | None = None
    """Account of the pods; without one no token is mounted."""
    image_pull_secret: tuple[str, ...] = ()
    """Secrets with which the image is pulled."""
    node_selector: tuple[str, ...] = ()
    """``KEY=VALUE``: labels that a node must have."""
    toleration: tuple[str, ...] = ()
    """``KEY[=VALUE][:EFFECT]``: taints that a node may have."""
    priority_class: str | None = None
    """PriorityClass of the pods: which pods go first, and which may be evicted for them."""
    queue_name: str | None = None
    """LocalQueue of Kueue that admits the Job."""
    jobset: bool = False
    """Whether to make a JobSet instead of a Job and a Service."""
    command: tuple[str, ...] = ()
    """Script and arguments, word by word."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            msg = f"no manifest is called {self.kind!r}"
            raise RenderError(msg, hint=near_miss(str(self.kind), list(KINDS)))
        _check_each(self)
        _check_lists(self)
        _check_together(self)

    @property
    def name(self) -> str:
        """Name of the Job, or the common prefix of all Jobs' names."""
        return self.job_name or self.kind

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of pods, one for each Job of the manifest."""
        if self.kind == "kubernetes-scaling":
            return self.node_counts or (1, 2, 4)
        return (self.nodes or 1,)

    @property
    def volumes(self) -> tuple[Volume, ...]:
        """The volumes of each pod."""
        return volumes_of(self.pvc, self.mount)

    @property
    def directory(self) -> str | None:
        """The run's directory as the pods see it."""
        return below(self.run, self.volumes, "--run") if self.run is not None else None

    @property
    def processes(self) -> int:
        """Workers, or ranks, of each pod."""
        return self.workers or max(1, self.gpus_per_node)

    @property
    def grace_s(self) -> int:
        """Whole seconds to finish or to save."""
        return max(1, round(parse_duration(self.grace, where="--grace")))

    @property
    def start_timeout_s(self) -> int:
        """Whole seconds that pods wait for the others."""
        return max(1, round(parse_duration(self.start_timeout, where="--start-timeout")))

    @property
    def time_s(self) -> int | None:
        """Whole seconds that the Job may run; None: no limit."""
        return None if self.time is None else math.ceil(parse_duration(self.time, where="--time"))

    @property
    def shm_mib(self) -> int:
        """MiB of /dev/shm; 0 leaves the runtime's default."""
        shm = self.shm or ("0" if self.kind == "kubernetes-queue" else "2G")
        return parse_size_mib(shm, where="--shm", zero=True)


def option(field: str) -> str:
    """Return the command-line option of a field."""
    return "--" + field.replace("_", "-")


def _check_each(spec: ManifestSpec) -> None:
    for field in PATTERNS:
        value = getattr(spec, field)
        if value is not None and (field, value) != ("job_name", ""):
            check_match(value, *PATTERNS[field], option(field))
    for field in COUNTS:
        value = getattr(spec, field)
        if value is not None:
            check_number(value, field, option(field))
    for size in spec.node_counts:
        check_number(size, "nodes", "--node-counts")
    for path in filter(None, (spec.run, spec.chdir, spec.python)):
        check_names(path, "--run, --chdir or --python")
    _check_quantities(spec)


def _check_quantities(spec: ManifestSpec) -> None:
    """Parse each quantity once; the parser of an invalid one raises the error."""
    for field in ("mem", "shm"):
        if (value := getattr(spec, field)) is not None:
            parse_size_mib(value, where=option(field))
    for field in ("lease", "grace", "start_timeout", "time"):
        if (value := getattr(spec, field)) is not None:
            parse_duration(value, where=option(field))
    if spec.ttl is not None:
        parse_duration(spec.ttl, where="--ttl", zero=True)


def _check_lists(spec: ManifestSpec) -> None:
    for name, value in spec.env:
        check_env(name, value, "--env")
    names = [name for name, _ in spec.env]
    names += [split_secret(text, "--env-from-secret")[0] for text in spec.env_from_secret]
    _refuse_twice(names, "--env")
    for secret in spec.image_pull_secret:
        check_secret_name(secret, "--image-pull-secret")
    _refuse_twice(list(spec.image_pull_secret), "--image-pull-secret")
    labels = [split_selector(text, "--node-selector")[0] for text in spec.node_selector]
    _refuse_twice(labels, "--node-selector")
    for text in spec.toleration:
        split_toleration(text, "--toleration")
    _refuse_twice([str(size) for size in spec.node_counts], "--node-counts")
    for word in spec.command:
        check_match(word, _WORD, "printable characters", "the script's arguments")
    if sum(map(len, spec.command)) > _WORDS_MAX:
        msg = "the script's arguments are too long for a manifest"
        raise RenderError(msg, hint="put them into a file in the image or on the volume")


def _refuse_twice(names: list[str], where: str, hint: str = "leave one of them out") -> None:
    for name in names:
        if names.count(name) > 1:
            msg = f"{where}: {name!r} is given twice"
            raise RenderError(msg, hint=hint)


def _check_together(spec: ManifestSpec) -> None:
    for field, kinds in ONLY_OF.items():
        unset = (None, (), ManifestSpec.__dataclass_fields__[field].default)
        if getattr(spec, field) not in unset and spec.kind not in kinds:
            msg = f"{option(field)}: {spec.kind} has no use for it"
            hint = "--node-counts says how many pods" if field == "nodes" else "leave it out"
            raise RenderError(msg, hint=hint)
    _check_volume(spec)
    _check_program(spec)
    if spec.max_restarts is not None and spec.kind != "kubernetes-queue" and not spec.jobset:
        msg = f"--max-restarts: a Job of {spec.kind} ends with its first failed pod"
        raise RenderError(msg, hint="--jobset starts all pods again; --rank-restarts their ranks")
    if spec.mem is not None:
        mib = parse_size_mib(spec.mem, where="--mem")
        if spec.shm_mib >= mib:
            msg = f"--shm: {spec.shm_mib} MiB are not less than the {mib} MiB of --mem"
            raise RenderError(msg, hint="files in /dev/shm count as memory of the pod")
    _check_name(spec)


def _check_volume(spec: ManifestSpec) -> None:
    if not spec.volumes:
        lost = [name for name in ("mount", "run", "fs_group") if getattr(spec, name) is not None]
        if lost or spec.kind == "kubernetes-queue":
            what = option(lost[0]) if lost else spec.kind
            msg = f"{what}: there is no volume"
            raise RenderError(msg, hint="--pvc NAME: a claim with the access mode ReadWriteMany")
    elif spec.run is None and spec.kind == "kubernetes-queue":
        msg = "kubernetes-queue: nothing says which run"
        raise RenderError(msg, hint="--run DIR, on a volume")
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


def _check_name(spec: ManifestSpec) -> None:
    """Check that a pod's host name, the Job's name and the pod's number, fits a DNS label."""
    longest = f"-{max(spec.sizes)}" if spec.kind == "kubernetes-scaling" else ""
    longest += f"{_ROLE if spec.jobset else ''}-{max(spec.sizes) - 1}"
    if len(spec.name) + len(longest) > _HOST_MAX:
        most = _HOST_MAX - len(longest)
        msg = f"--job-name: {spec.name!r} has more than {most} characters"
        raise RenderError(msg, hint=f"the pods are called {spec.name}{longest}: 63 at most")


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume that many nodes can write to."""

    claim: str
    """Name of its PersistentVolumeClaim."""
    path: str
    """Its mount point in pods; absolute, without a trailing slash."""


def volumes_of(claims: tuple[str, ...], mount: str | None) -> tuple[Volume, ...]:
    """Return the volumes of ``--pvc CLAIM[:/DIR]`` and ``--mount``, in their order.

    Raises:
        RenderError: a name or a path is invalid or given twice, or ``--mount`` has no use.
    """
    if mount is not None:
        _check_path(mount, "--mount")
    found = []
    for text in claims:
        claim, colon, path = text.partition(":")
        check_claim(claim, "--pvc")
        if colon:
            _check_path(path, "--pvc")
        found.append(Volume(claim, _plain(path or mount or MOUNT)))
    if mount is not None and claims and all(":" in text for text in claims):
        msg = "--mount: each --pvc says where it is seen"
        raise RenderError(msg, hint="leave it out")
    for what in ("claim", "path"):
        hint = "write NAME:/DIR, each with a name and a DIR of its own"
        _refuse_twice([getattr(volume, what) for volume in found], "--pvc", hint)
    return tuple(found)


def below(path: str, volumes: tuple[Volume, ...], where: str) -> str:
    """Return ``path`` as pods see it, on one of the volumes; a relative one is on the first.

    Raises:
        RenderError: the path is on none of the volumes.
    """
    whole = path if path.startswith("/") else f"{volumes[0].path}/{path}"
    plain = _plain(whole)
    roots = [volume.path for volume in volumes]
    if ".." in plain.split("/") or not any(plain.startswith(f"{root}/") for root in roots):
        msg = f"{where}: {path!r} is not below {' or '.join(roots)}"
        raise RenderError(msg, hint="a path on a volume, in full or relative to the first one")
    return plain


def _check_path(path: str, where: str) -> None:
    check_match(path, _PATH, _WANTED, where)
    check_names(path, where)
    if path.split("/")[1] in _TAKEN or ".." in path.split("/"):
        msg = f"{where}: {path!r} is not free in a pod"
        raise RenderError(msg, hint="write a directory such as /data")


def _plain(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
