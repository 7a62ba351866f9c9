"""Check and parse single values of a manifest: names, images, numbers, variables, volumes."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_match, check_names, looks_secret, matches, refusal

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*"
_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_QUALIFIED = rf"(?=[^/]{{1,63}}\Z|[^/]{{1,253}}/)({_LABEL}(\.{_LABEL})*/)?{_NAME}"
_PART = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
# The grammar of package "reference" of the project distribution, which 'docker pull' uses.
_IMAGE = (
    r"(?=.{1,512}\Z)"
    r"(?:[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?)*"
    r"(?::[0-9]{1,5})?/)?"
    rf"{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(?:@sha256:[0-9a-f]{64})?"
)
_PATH = "/.{1,4095}"
_MOUNT = "/[^:]{1,4095}"
_TAKEN = {"", ".", "dev", "proc", "sys", "etc"}
"""First parts of paths that no mount point may have, because it would cover the image's own."""
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]{0,127}"
_VALUE = ".{0,32768}"
_KEY = "[-._A-Za-z0-9]{1,253}"

PATTERNS = {
    # Before Kubernetes 1.34, the name of the Service, which is the same, begins with a letter.
    "job_name": ("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "a letter, then a-z, 0-9 and '-'"),
    "namespace": (_LABEL, "at most 63 of a-z, 0-9 and '-'"),
    "image": (_IMAGE, "an image such as registry.org/group/name:1.2, without spaces"),
    "queue_name": (_LABEL, "the name of a LocalQueue of Kueue"),
    "gpu_resource": (
        rf"(?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/{_NAME}",
        "the name of an extended resource such as amd.com/gpu",
    ),
    "run": ("[^-].{0,4095}", "a directory on a volume"),
    "user": ("[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", "UID or UID:GID, neither of them 0"),
}
"""The pattern that the complete value of a field must match, and the hint if it does not."""

COUNTS = {
    "nodes": (1, 10_000),
    "gpus_per_node": (0, 128),
    "cpus": (1, 4096),
    "workers": (1, 1024),
    "max_restarts": (0, 1000),
}
"""Lowest and highest number of each field; an Indexed Job can track 10,000 nodes in time."""

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_OURS = ("SLURM", "SBATCH_", "SRUN_", "PET_", "KUBERNETES_", "JOB_COMPLETION_INDEX")
_SET = frozenset(
    {"HPCTK_HOST", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    | {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
)


def check_variable(name: str) -> None:
    where = "--env"
    check_match(name, _VARIABLE, "a name of letters, digits and '_'", where)
    if name.startswith(_OURS) or name in _SET:
        raise refusal(where, name, "a name that neither Kubernetes nor the manifest sets")


def check_env(name: str, value: str) -> None:
    """Raise RenderError for a variable that users may not set, or that looks like a secret."""
    check_variable(name)
    if looks_secret(name):
        msg = f"--env: {name} looks like a secret, and manifests must not contain secrets"
        raise RenderError(msg, hint=f"--env-from-secret {name}=SECRET:KEY reads it from a Secret")
    check_match(value, _VALUE, "a value of printable characters", f"--env {name}")


def check_pull_secret(name: str) -> None:
    wanted = "the name of a Secret: a-z, 0-9, '-' and '.'"
    check_match(name, _SUBDOMAIN, wanted, "--image-pull-secret")


def split_secret(text: str) -> tuple[str, str, str]:
    """Split ``NAME=SECRET:KEY`` into variable, Secret and key. Raises RenderError."""
    name, _, rest = text.partition("=")
    secret, _, key = rest.partition(":")
    if not (name and matches(secret, _SUBDOMAIN) and matches(key, _KEY)):
        where = "--env-from-secret"
        wanted = "NAME=SECRET:KEY, with the names of a Secret and of one of its keys"
        raise refusal(where, text, wanted)
    check_variable(name)
    return name, secret, key


def split_selector(text: str) -> tuple[str, str]:
    """Split ``KEY=VALUE`` into key and value of a node's label. Raises RenderError."""
    key, equals, value = text.partition("=")
    if not (equals and matches(key, _QUALIFIED) and matches(value, f"({_NAME})?")):
        where = "--node-selector"
        wanted = "KEY=VALUE, as 'kubectl get nodes --show-labels' has them"
        raise refusal(where, text, wanted)
    return key, value


def split_toleration(text: str) -> dict[str, str]:
    """Parse a toleration from ``KEY[=VALUE][:EFFECT]``, kubectl's notation of a taint.

    Raises RenderError.
    """
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    known = effect in _EFFECTS if colon else True
    if not (known and matches(key, _QUALIFIED) and matches(value, f"({_NAME})?")):
        where = "--toleration"
        wanted = f"KEY[=VALUE][:EFFECT], the effect being {', '.join(_EFFECTS)}"
        raise refusal(where, text, wanted)
    found = {"key": key, "operator": "Equal" if equals else "Exists"}
    found |= {"value": value} if equals else {}
    return found | ({"effect": effect} if colon else {})


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume that many nodes can write to."""

    claim: str
    """Name of its PersistentVolumeClaim."""
    path: str
    """Its mount point in pods; absolute, without a trailing slash."""

    @classmethod
    def of(cls, text: str) -> Volume:
        """Parse ``CLAIM[:/DIR]``. Raises RenderError."""
        claim, colon, path = text.partition(":")
        wanted = "the name of a PersistentVolumeClaim: a-z, 0-9, '-' and '.', or NAME:/DIR"
        check_match(claim, _SUBDOMAIN, wanted, "--pvc")
        if colon:
            check_match(path, _MOUNT, "an absolute path without ':'", "--pvc")
            check_names(path, "--pvc")
            if path.split("/")[1] in _TAKEN or ".." in path.split("/"):
                msg = f"--pvc: {path!r} cannot be a mount point of a pod"
                raise RenderError(msg, hint="write a directory such as /data")
        return cls(claim, _plain(path or "/data"))


def on_volume(path: str, volumes: tuple[Volume, ...]) -> str:
    """Return ``path`` as pods see it, on one of the volumes; a relative one is on the first.

    Raises RenderError: the path is on none of the volumes.
    """
    plain = _plain(path if path.startswith("/") else f"{volumes[0].path}/{path}")
    roots = [volume.path for volume in volumes]
    if ".." in plain.split("/") or not any(plain.startswith(f"{root}/") for root in roots):
        msg = f"--run: {path!r} is not below {' or '.join(roots)}"
        raise RenderError(msg, hint="a path on a volume, in full or relative to the first one")
    return plain


def _plain(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
