"""Check single values of a manifest: names, images, numbers, variables."""

from __future__ import annotations

import re

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_match, looks_secret, refusal

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
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]{0,127}"
_VALUE = ".{0,32768}"
_KEY = "[-._A-Za-z0-9]{1,253}"

PATTERNS = {
    # Before Kubernetes 1.34, the name of the Service, which is the same, begins with a letter.
    "job_name": ("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "a letter, then a-z, 0-9 and '-'"),
    "namespace": (_LABEL, "at most 63 of a-z, 0-9 and '-'"),
    "image": (_IMAGE, "an image such as registry.org/group/name:1.2, without spaces"),
    "chdir": (_PATH, "an absolute path"),
    "python": (_PATH, "the absolute path of an interpreter in the image"),
    "service_account": (_SUBDOMAIN, "the name of a ServiceAccount"),
    "priority_class": (_SUBDOMAIN, "the name of a PriorityClass"),
    "queue_name": (_LABEL, "the name of a LocalQueue of Kueue"),
    "gpu_resource": (
        rf"(?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/{_NAME}",
        "the name of an extended resource such as amd.com/gpu",
    ),
    "run": ("[^-].{0,4095}", "a directory below --mount"),
    "backend": ("nccl|gloo", "nccl or gloo"),
    "user": ("[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", "UID or UID:GID, neither of them 0"),
}
"""The pattern that the complete value of a field must match, and the hint if it does not."""

COUNTS = {
    "nodes": (1, 10_000),
    "gpus_per_node": (0, 128),
    "cpus": (1, 4096),
    "workers": (1, 1024),
    "max_restarts": (0, 1000),
    "rank_restarts": (0, 1000),
    "fs_group": (1, 2**31 - 1),
}
"""Lowest and highest number of each field; an Indexed Job can track 10,000 nodes in time."""

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_OURS = ("SLURM", "SBATCH_", "SRUN_", "PET_", "KUBERNETES_", "JOB_COMPLETION_INDEX")
_SET = frozenset(
    {"HPCTK_HOST", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    | {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
)


def check_number(value: object, field: str, where: str) -> None:
    """Raise RenderError unless ``value`` is an integer in the range of ``field``."""
    lowest, highest = COUNTS[field]
    # Not isinstance(): a bool is an int, but not a count.
    if type(value) is not int or not lowest <= value <= highest:
        raise refusal(where, value, f"a whole number from {lowest} to {highest}")


def check_variable(name: str, where: str) -> None:
    """Raise RenderError unless users may set the variable ``name``."""
    check_match(name, _VARIABLE, "a name of letters, digits and '_'", where)
    if name.startswith(_OURS) or name in _SET:
        raise refusal(where, name, "a name that neither Kubernetes nor the manifest sets")


def check_env(name: str, value: str, where: str) -> None:
    """Raise RenderError for a variable that users may not set, or that looks like a secret."""
    check_variable(name, where)
    if looks_secret(name):
        msg = f"{where}: {name} looks like a secret, and manifests must not contain secrets"
        raise RenderError(msg, hint=f"--env-from-secret {name}=SECRET:KEY reads it from a Secret")
    check_match(value, _VALUE, "a value of printable characters", f"{where} {name}")


def split_secret(text: str, where: str) -> tuple[str, str, str]:
    """Split ``NAME=SECRET:KEY`` into variable, Secret and key. Raises RenderError."""
    wanted = "NAME=SECRET:KEY, with the names of a Secret and of one of its keys"
    check_match(text, "[^=]+=[^:]+:.+", wanted, where)
    name, _, rest = text.partition("=")
    secret, _, key = rest.partition(":")
    check_variable(name, where)
    check_secret_name(secret, where)
    check_match(key, _KEY, wanted, where)
    return name, secret, key


def split_selector(text: str, where: str) -> tuple[str, str]:
    """Split ``KEY=VALUE`` into key and value of a node's label. Raises RenderError."""
    wanted = "KEY=VALUE, as 'kubectl get nodes --show-labels' has them"
    check_match(text, "[^=]+=.*", wanted, where)
    key, _, value = text.partition("=")
    check_match(key, _QUALIFIED, wanted, where)
    check_match(value, f"({_NAME})?", wanted, where)
    return key, value


def split_toleration(text: str, where: str) -> dict[str, str]:
    """Parse a toleration from ``KEY[=VALUE][:EFFECT]``, kubectl's notation of a taint.

    Raises RenderError.
    """
    wanted = f"KEY[=VALUE][:EFFECT], the effect being {', '.join(EFFECTS)}"
    check_match(text, "[^=:]+(=[^:]*)?(:[A-Za-z]+)?", wanted, where)
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    check_match(key, _QUALIFIED, wanted, where)
    check_match(value, f"({_NAME})?", wanted, where)
    found = {"key": key, "operator": "Equal" if equals else "Exists"}
    found |= {"value": value} if equals else {}
    if colon:
        check_match(effect, "|".join(EFFECTS), wanted, where)
        found["effect"] = effect
    return found


def check_claim(name: object, where: str) -> None:
    """Raise RenderError unless ``name`` is a valid name of a PersistentVolumeClaim."""
    wanted = "the name of a PersistentVolumeClaim: a-z, 0-9, '-' and '.', or NAME:/DIR"
    check_match(name, _SUBDOMAIN, wanted, where)


def check_secret_name(name: object, where: str) -> None:
    """Raise RenderError unless ``name`` is a valid name of a Secret."""
    check_match(name, _SUBDOMAIN, "the name of a Secret: a-z, 0-9, '-' and '.'", where)


def is_floating(image: str) -> bool:
    """Return whether ``image`` may change: it has no digest, and no tag or the tag latest."""
    if "@" in image:
        return False
    tag = re.search(r":([^/:]+)\Z", image)
    return tag is None or tag[1] == "latest"
