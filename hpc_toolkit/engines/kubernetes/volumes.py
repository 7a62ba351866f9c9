"""Volumes of a pod: their claims and their mount points."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_toolkit.engines.kubernetes.values import check_claim
from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_match, check_names

MOUNT = "/data"
"""Mount point of a volume for which the user gives none."""
_PATH = "/[^:]{1,4095}"
_WANTED = "an absolute path without ':'"
_TAKEN = {"", ".", "dev", "proc", "sys", "etc"}
"""First parts of paths that no mount point may have, because it would cover the image's own."""


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
        _refuse_twice([getattr(volume, what) for volume in found])
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


def _refuse_twice(given: list[str]) -> None:
    for one in given:
        if given.count(one) > 1:
            msg = f"--pvc: {one!r} is given twice"
            raise RenderError(msg, hint="write NAME:/DIR, each with a name and a DIR of its own")
