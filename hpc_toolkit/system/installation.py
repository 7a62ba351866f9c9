"""How the hpctk that runs was installed, for hints, and where its user keeps settings."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path


def config_directory() -> Path | None:
    """The directory of the user's settings; it need not exist. None if there is no home."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        # The XDG base directory specification says to ignore a relative path.
        base = Path(config) if config.startswith("/") else Path.home() / ".config"
    except RuntimeError:
        return None
    return base / "hpctk"


def how_to_add(package: str = "", *, extra: str = "") -> str:
    """The command that adds a package, or an extra of hpctk, to the environment of this Python.

    Packages that are installed already stay.
    """
    wanted = package or f"hpctk[{extra}]"
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists():
        words = ["pipx", "inject", prefix.name, wanted]
    elif (receipt := prefix / "uv-receipt.toml").exists():
        words = ["uv", "tool", "install", *_tool(receipt.read_text("utf-8"), package, extra)]
    elif find_spec("pip") is None:
        words = ["uv", "pip", "install", "--python", sys.executable, wanted]
    else:
        words = [sys.executable, "-m", "pip", "install", wanted]
    return shlex.join(words)


def _tool(receipt: str, package: str, extra: str) -> list[str]:
    """The arguments of 'uv tool install', which removes the packages that they do not name."""
    import tomllib

    extras, others = {extra} - {""}, [package] if package else []
    for found in tomllib.loads(receipt)["tool"]["requirements"]:
        if found["name"] == "hpctk":
            extras |= {*found.get("extras", [])}
        else:
            chosen = f"[{','.join(found['extras'])}]" if found.get("extras") else ""
            others.append(found["name"] + chosen + found.get("specifier", ""))
    own = f"hpctk[{','.join(sorted(extras))}]" if extras else "hpctk"
    return [own, *(word for other in others for word in ("--with", other))]
