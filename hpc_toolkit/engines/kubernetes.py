"""Kubernetes manifests: requests that are checked when they are created, and rendered."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, get_args

from hpc_toolkit import __version__
from hpc_toolkit.errors import TRY_AGAIN, RenderError, near_miss
from hpc_toolkit.slurm.render import (
    check_count,
    check_match,
    check_names,
    file,
    looks_secret,
    refuse_twice,
)
from hpc_toolkit.slurm.render.script import Marked, fill
from hpc_toolkit.slurm.render.spec import asked
from hpc_toolkit.system.options import spelled
from hpc_toolkit.system.quantities import parse_duration, parse_size_mib

Kind = Literal["kubernetes-queue", "kubernetes-ddp"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ONLY_OF: dict[str, tuple[Kind, ...]] = {
    "workers": ("kubernetes-queue",),
    "max_restarts": ("kubernetes-queue",),
    "command": ("kubernetes-ddp",),
}
"""Fields that only some kinds use."""

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
# First parts of paths that no mount point may have, because it would cover the image's own.
_MOUNT = r"/(?!/|(?:\.|dev|proc|sys|etc)?(?:/|\Z))(?!(?:.*/)?\.\.(?:/|\Z))[^:]{1,4095}"
_OURS = "SLURM|SBATCH_|SRUN_|PET_|KUBERNETES_|JOB_COMPLETION_INDEX"
_SET = (
    "HPCTK_HOST|NODE_RANK|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE"
    "|GROUP_RANK"
)
_VARIABLE = rf"(?!{_OURS}|(?:{_SET})\Z)[A-Za-z_][A-Za-z0-9_]{{0,127}}"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
# Text that every reader of YAML takes for text, although it is not quoted.
_PLAIN_YAML = re.compile(
    r"(?!(?i:y|n|yes|no|on|off|true|false|null)\Z)[A-Za-z/][A-Za-z0-9_./-]*", re.ASCII
)
_KEY_MAX = 122
"""Longest YAML key that is written without a question mark in front of it."""

_PATTERNS = {
    # Before Kubernetes 1.34, the name of the Service, which is the same, begins with a letter.
    "job_name": ("(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)?", "a letter, then a-z, 0-9 and '-'"),
    "namespace": (_LABEL, "at most 63 of a-z, 0-9 and '-'"),
    "image": (_IMAGE, "an image such as registry.org/group/name:1.2, without spaces"),
    "queue_name": (_LABEL, "the name of a LocalQueue of Kueue"),
    "gpu_resource": (f"{_SUBDOMAIN}/{_NAME}", "the name of a resource such as amd.com/gpu"),
    "pvc": (
        f"({_SUBDOMAIN})(?::({_MOUNT}))?",
        "NAME or NAME:/DIR: NAME of a-z, 0-9, '-' and '.', DIR such as /data, not /dev or /etc",
    ),
    "run": ("[^-].{0,4095}", "a directory on a volume"),
    "user": ("([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?", "UID or UID:GID, neither of them 0"),
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
    "command": (_VALUE, "arguments of printable characters"),
}
"""Pattern of a field, or of each value of a repeated one, and the hint if it does not match."""
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
            _refuse(f"unknown manifest: {self.kind!r}", near_miss(str(self.kind), list(KINDS)))
        for field, kinds in ONLY_OF.items():
            if getattr(self, field) not in (None, ()) and self.kind not in kinds:
                _refuse(f"{spelled(field)}: not used by {self.kind}", "leave it out")
        _check_each(self)
        _check_variables(self)
        _check_together(self)

    @property
    def name(self) -> str:
        """Name of the Job and of its Service."""
        return self.job_name or self.kind

    def parts(self, field: str) -> list[tuple[Any, ...]]:
        """The groups of the field's pattern in each value of a repeated option."""
        found = (re.fullmatch(_PATTERNS[field][0], text) for text in getattr(self, field))
        return [match.groups() for match in found if match is not None]

    @property
    def volumes(self) -> list[tuple[str, str]]:
        """Claim and mount point of each volume."""
        return [(claim, _plain(path or "/data")) for claim, path in self.parts("pvc")]

    @property
    def directory(self) -> str | None:
        """The run's directory as the pods see it; a relative one is on the first volume."""
        if self.run is None:
            return None
        return _plain(self.run if self.run.startswith("/") else f"{self.volumes[0][1]}/{self.run}")

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


def _plain(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def _check_each(spec: ManifestSpec) -> None:
    """Check the values one by one; a field is optional if its default is None."""
    optional = {field.name for field in fields(spec) if field.default is None}
    for field in (*_PATTERNS, *_COUNTS):
        value = getattr(spec, field)
        where = "the script's arguments" if field == "command" else spelled(field)
        for one in value if isinstance(value, tuple) else (value,):
            if one is None and field in optional:
                continue
            if field in _COUNTS:
                check_count(one, _COUNTS[field], where)
            else:
                check_match(one, *_PATTERNS[field], where)
    for path in filter(None, (spec.run, *(path for _, path in spec.volumes))):
        check_names(path, "--run" if path == spec.run else "--pvc")
    refuse_twice([key for key, _ in spec.parts("node_selector")], "--node-selector")
    for same in zip(*spec.volumes, strict=True):
        refuse_twice([*same], "--pvc", "write NAME:/DIR, each with a name and a DIR of its own")


def _check_variables(spec: ManifestSpec) -> None:
    for name, value in spec.env:
        if looks_secret(name):
            message = f"--env: {name} looks like a secret, and manifests must not contain secrets"
            _refuse(message, f"--env-from-secret {name}=SECRET:KEY reads it from a Secret")
        check_match(value, _VALUE, "a value of printable characters", f"--env {name}")
    names = [name for name, *_ in (*spec.env, *spec.parts("env_from_secret"))]
    wanted = "letters, digits and '_', and a name that neither Kubernetes nor the manifest sets"
    for name in names:
        check_match(name, _VARIABLE, wanted, "--env")
    refuse_twice(names, "--env")


def _check_together(spec: ManifestSpec) -> None:
    """Check the values that depend on others; parse those that have a unit."""
    queue, ddp = spec.kind == "kubernetes-queue", spec.kind == "kubernetes-ddp"
    _, mem, shm = spec.time_s, spec.mem_mib, spec.shm_mib
    roots = [path for _, path in spec.volumes]
    if not roots and (queue or spec.run is not None):
        message = f"{spec.kind if queue else '--run'}: no volume is given"
        _refuse(message, "--pvc NAME: a claim with the access mode ReadWriteMany")
    if queue and spec.run is None:
        _refuse("kubernetes-queue needs a run", "add --run DIR, a directory on a volume")
    path, below = spec.directory, tuple(f"{root}/" for root in roots)
    if path is not None and (".." in path.split("/") or not path.startswith(below)):
        message = f"--run: {spec.run!r} is not below {' or '.join(roots)}"
        _refuse(message, "a path on a volume, in full or relative to the first one")
    if ddp and not spec.command:
        hint = "write it after --: hpctk render kubernetes-ddp --image IMAGE -- train.py --lr 1"
        _refuse("kubernetes-ddp needs a training script", hint)
    if ddp and spec.command[0].startswith("-"):
        message = f"{spec.command[0]!r} is not a training script"
        _refuse(message, "write a path; ./-x for one called -x")
    if sum(map(len, spec.command)) > _WORDS_MAX:
        hint = "put them into a file in the image or on the volume"
        _refuse("the script's arguments are too long for a manifest", hint)
    # A pod's host name, the Job's name and the pod's number, is a DNS label.
    last = f"-{(spec.nodes or 1) - 1}"
    if len(spec.name) + len(last) > _HOST_MAX:
        message = f"--job-name: {spec.name!r} has more than {_HOST_MAX - len(last)} characters"
        _refuse(message, f"the pods are called {spec.name}{last}: {_HOST_MAX} characters at most")
    if mem is not None and shm >= mem:
        message = f"--shm: {shm} MiB are not less than the {mem} MiB of --mem"
        _refuse(message, "files in /dev/shm count as memory of the pod")


def _refuse(message: str, hint: str) -> NoReturn:
    raise RenderError(message, hint=hint)


def render_manifest(spec: ManifestSpec) -> str:
    """Render the manifest as YAML. Equal requests give equal text on every machine."""
    values = {
        "version": __version__,
        # Some Unicode characters end a line of YAML, and a comment cannot escape them as YAML does.
        "command": command_line(spec).encode("ascii", "backslashreplace").decode(),
        "spec": spec,
        "try_again": TRY_AGAIN,
    }
    filters: dict[str, Callable[..., Marked]] = {
        "yaml": _yaml,
        "literal": lambda word: _yaml(word.replace("$", "$$")),
        "entries": _entries,
    }
    return file.sign(fill("kubernetes.yaml.j2", values, **filters))


def _yaml(text: str) -> Marked:
    """Write text as a YAML scalar: a plain word, or JSON with other characters escaped as in YAML.

    Kubernetes would read ``y`` and ``1e3`` without quotes as a boolean and as a number.
    """
    if _PLAIN_YAML.fullmatch(text):
        return Marked(text)
    # YAML has no pairs of surrogates, and some characters outside ASCII end a line of it.
    return Marked(re.sub("[^ -~]", _escaped, json.dumps(text, ensure_ascii=False)))


def _escaped(character: re.Match[str]) -> str:
    code = ord(character[0])
    letter, digits = ("x", 2) if code < 0x100 else ("u", 4) if code < 0x10000 else ("U", 8)
    return f"\\{letter}{code:0{digits}X}"


def _entries(mapping: dict[str, str], indent: int) -> Marked:
    """Write the entries of a YAML mapping; all lines after the first are indented."""
    line = "\n" + " " * indent
    keys = (_yaml(key) if len(key) <= _KEY_MAX else f"? {_yaml(key)}{line}" for key in mapping)
    pairs = zip(keys, mapping.values(), strict=True)
    return Marked(line.join(f"{key}: {_yaml(value)}" for key, value in pairs))


def command_line(spec: ManifestSpec) -> str:
    """Return the command that renders this manifest again, quoted for a shell."""
    values = {name: value for name, value in asked(spec).items() if name not in ("kind", "command")}
    words = [
        word for name, value in values.items() for word in file.option_words(spelled(name), value)
    ]
    script = ["--", *spec.command] if spec.command else []
    return shlex.join(["hpctk", "render", spec.kind, *words, *script])
