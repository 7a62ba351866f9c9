"""The request that a manifest was rendered from, as a line of JSON and as a command."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from typing import Any

from hpc_toolkit.engines.kubernetes.request import ManifestSpec, option
from hpc_toolkit.errors import RenderError, near_miss


def request_json(spec: ManifestSpec) -> str:
    """Return the request as JSON on one ASCII line; equal requests give equal lines."""
    return json.dumps({"kind": spec.kind} | _asked(spec), ensure_ascii=True)


def request_values(embedded: dict[str, Any]) -> dict[str, Any]:
    """Return the fields in a decoded line of ``request_json``, for ``ManifestSpec(**values)``.

    Raises RenderError for a field that this version does not know.
    """
    known = [field.name for field in fields(ManifestSpec)]
    for name in embedded:
        if name not in known:
            msg = f"its request has a field {name!r} that this version does not know"
            raise RenderError(msg, hint=near_miss(name, known))
    return {name: _immutable(value) for name, value in embedded.items()}


def command_line(spec: ManifestSpec) -> str:
    """Return the command that renders this manifest again, quoted for a shell."""
    argv = ["hpctk", "render", spec.kind]
    for name, value in _asked(spec).items():
        if name == "command":
            continue
        if name == "node_counts":
            argv += [option(name), ",".join(map(str, value))]
        elif name == "env":
            argv += [part for key, text in value for part in ("--env", f"{key}={text}")]
        elif isinstance(value, tuple):
            argv += [part for text in value for part in (option(name), text)]
        else:
            argv += [option(name)] if value is True else [option(name), str(value)]
    return shlex.join([*argv, "--", *spec.command] if spec.command else argv)


def _asked(spec: ManifestSpec) -> dict[str, Any]:
    """Return the fields that differ from their defaults, without the kind."""
    values = {field.name: (getattr(spec, field.name), field.default) for field in fields(spec)}
    return {
        name: value
        for name, (value, default) in values.items()
        if name != "kind" and value not in (default, None)
    }


def _immutable(value: Any) -> Any:
    return tuple(_immutable(one) for one in value) if isinstance(value, list) else value
