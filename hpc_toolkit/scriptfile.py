"""Rendered scripts as files: told from edited and foreign ones by a hash in their header."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

from hpc_toolkit.errors import RenderError

_MARK = "# hpctk-body: sha256:"


def sha256(text: str) -> str:
    """The hex digest of ``text`` in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def sign(script: str) -> str:
    """``script`` with the hash of all its lines below the first one."""
    first, _, rest = script.partition("\n")
    return f"{first}\n{_MARK}{sha256(script)}\n{rest}"


def origin(script: str) -> Literal["rendered", "edited", "foreign"]:
    """Whether ``script`` is as it was rendered, was edited since, or is not ours.

    The hash guards against accidents, not against forgery.
    """
    lines = script.split("\n")
    marks = [line for line in lines if line.startswith(_MARK)]
    if not marks:
        return "foreign"
    rest = "\n".join(line for line in lines if not line.startswith(_MARK))
    return "rendered" if marks == [f"{_MARK}{sha256(rest)}"] else "edited"


def write_script(path: Path, script: str, *, force: bool = False) -> None:
    """Write ``script``, making its directory; an equal file is left alone.

    Raises RenderError if the file there is edited or foreign and ``force`` is not set, and if it
    cannot be written.
    """
    try:
        old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
        if old == script:
            return
        if old is not None and not force and origin(old) != "rendered":
            what = "was edited since it was rendered" if origin(old) == "edited" else "is not ours"
            msg = f"{path}: {what}"
            raise RenderError(msg, hint="--force overwrites it; -o FILE writes another file")
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, script)
    except OSError as error:
        msg = f"{path}: cannot be written: {error.strerror}"
        raise RenderError(msg, hint="give another file with -o") from None


def _replace(path: Path, script: str) -> None:
    # Whole, since sbatch may be reading it; not synced, since it can be rendered again.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(script, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def log_directory(output: str) -> Path:
    """The directory of the log pattern ``output``, up to the first part that Slurm fills in."""
    parts = Path(output).parent.parts
    fixed = next((i for i, part in enumerate(parts) if "%" in part), len(parts))
    return Path(*parts[:fixed])
