"""Compare a manifest with the one that would be rendered today, field by field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpc_toolkit import __version__
from hpc_toolkit.engines.kubernetes.manifest import GENERATED, read_yaml, render_manifest
from hpc_toolkit.engines.kubernetes.origin import request_values
from hpc_toolkit.engines.kubernetes.request import ManifestSpec
from hpc_toolkit.errors import HpcToolkitError, RenderError
from hpc_toolkit.slurm.render.drift import Drift
from hpc_toolkit.slurm.render.file import origin, read_request, read_script

if TYPE_CHECKING:
    from pathlib import Path

_MOST = 8
"""Number of different fields to name; ``--diff`` shows all lines."""


def is_manifest(path: Path) -> bool:
    """Return whether ``hpctk render`` wrote the file as a manifest; False if it is unreadable."""
    try:
        return read_script(path).startswith(GENERATED)
    except RenderError:
        return False


def embedded(path: Path) -> dict[str, Any]:
    """Return the values that the manifest at ``path`` was rendered from.

    Raises:
        RenderError: the file is not a manifest, or its first lines were edited.
    """
    return request_values(read_request(read_script(path), str(path))[1])


def check_manifest(path: Path) -> Drift:
    """Render the manifest at ``path`` again from its first lines, and compare."""
    text = read_script(path)
    reasons = ["edited by hand"] if origin(text) == "edited" else []
    try:
        version, request = read_request(text, str(path))
        rendered = render_manifest(ManifestSpec(**request_values(request)))
    except HpcToolkitError as error:
        reasons.append(error.message.removeprefix(f"{path}: "))
        return Drift(file=str(path), reasons=tuple(reasons), script=text, rendered=None)
    if version != __version__:
        reasons.append(f"rendered by hpctk {version}, this is {__version__}")
    if text != rendered:
        reasons += _fields(text, rendered) or ([] if reasons else ["rendered differently"])
    return Drift(file=str(path), reasons=tuple(reasons), script=text, rendered=rendered)


def _fields(old: str, new: str) -> list[str]:
    """Return the fields in which two manifests differ."""
    try:
        was, now = _flat(read_yaml(old)), _flat(read_yaml(new))
    except RenderError as error:
        return [error.message]
    found = [
        f"{_way(at)}: {was.get(at, 'nothing')} instead of {now.get(at, 'nothing')}"
        for at in {**now, **was}
        if was.get(at) != now.get(at)
    ]
    more = len(found) - _MOST
    return found[:_MOST] + ([f"and {more} more fields, which --diff shows"] if more > 0 else [])


def _flat(value: Any, at: str = "") -> dict[str, str]:
    """Map the path of each value to the value; list members go by their names if they have one."""
    if isinstance(value, dict):
        inner = [(f"{at}.{key}" if at else str(key), one) for key, one in value.items()]
    elif isinstance(value, list):
        inner = [(f"{at}[{_called(one, number)}]", one) for number, one in enumerate(value)]
    else:
        return {at: json.dumps(value, default=str)}
    return {way: text for place, one in inner for way, text in _flat(one, place).items()}


def _way(at: str) -> str:
    """Format a path for people: ``[Job train].spec`` becomes ``Job train spec``."""
    return at.removeprefix("[").replace("].", " ", 1)


def _called(member: Any, number: int) -> object:
    if not isinstance(member, dict):
        return number
    metadata = member.get("metadata")
    if isinstance(metadata, dict) and "kind" in member:
        return f"{member['kind']} {metadata.get('name')}"
    return member.get("name", number)
