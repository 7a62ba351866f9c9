"""Read and write rendered scripts; a hash in their header reveals edited and foreign files."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpc_toolkit.errors import RenderError, near_miss
from hpc_toolkit.rundir import files
from hpc_toolkit.slurm.render import refuse_twice
from hpc_toolkit.slurm.render.spec import (
    DEFAULTS,
    FIELDS,
    OPTIONS,
    ScriptSpec,
    asked,
    option,
    shown,
)
from hpc_toolkit.slurm.render.values import EXCLUSIVE, FLAG, PASSED, left_out

_MARK = "# hpctk-body: sha256:"
_HERE = "# hpctk-body:"
"""A line of a template that the hash takes the place of."""
_VERSION = r"(?m)^# (?:Generated|Rendered) by hpctk (\S+?)\.? "
_COMMAND = r"(?m)^#   (hpctk render (?:.* \\\n#     )*.*)$"
_TEMPLATE = r"(?m)^# hpctk-template: (\S+) ([0-9a-f]+)$"
_CLUSTER = r"(?m)^# hpctk-cluster: (\S+) ([0-9a-f]+)"


class Header(NamedTuple):
    template: str
    cluster: str
    """The value of ``--cluster``: a name or the path of a file."""
    request: dict[str, Any]
    """``read_spec`` makes a request of it."""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sign(script: str) -> str:
    """Return ``script`` with the hash of its other lines: at its mark, else as the second line."""
    first, _, rest = script.partition("\n")
    if f"\n{_HERE}\n" in script:
        first, _, rest = script.partition(f"\n{_HERE}\n")
    signature = sha256(f"{first}\n{rest}")
    return f"{first}\n{_MARK}{signature}\n{rest}"


def origin(script: str) -> Literal["rendered", "edited", "foreign"]:
    """Return whether ``script`` is as it was rendered, was edited since, or is not from hpctk.

    The hash guards against accidents, not against forgery.
    """
    lines = script.split("\n")
    marks = [line for line in lines if line.startswith(_MARK)]
    if not marks:
        return "foreign"
    rest = "\n".join(line for line in lines if not line.startswith(_MARK))
    return "rendered" if marks == [f"{_MARK}{sha256(rest)}"] else "edited"


def read_script(path: Path) -> str:
    """Read a script with its line ends unchanged. Raises RenderError if it cannot be read."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = (
            f"cannot be read: {error.strerror}"
            if isinstance(error, OSError)
            else "is not UTF-8 text"
        )
        raise RenderError(
            f"{path}: {why}", hint="name a script; to use a template, leave out '/' and '.sbatch'"
        ) from None


def read_header(script: str, where: str) -> Header:
    """Parse the header of a script; errors call the file ``where``.

    Raises RenderError if the script was not rendered, or if its header was edited.
    """
    text = script.replace("\r\n", "\n")
    found = [re.search(pattern, text) for pattern in (_VERSION, _COMMAND, _TEMPLATE, _CLUSTER)]
    command = found[1]
    if command is None or not all(found) or _MARK not in text:
        why = "not a script that 'hpctk render' wrote, or its header was edited"
        raise RenderError(f"{where}: {why}", hint="render the script again")
    try:
        return read_command(shlex.split(command[1].replace(" \\\n#     ", " ")))
    except RenderError:
        raise
    except (ValueError, IndexError):
        why = "the request in its header was edited"
        raise RenderError(f"{where}: {why}", hint="render the script again") from None


def option_words(name: str, value: Any) -> list[str]:
    """Return an option and its value as words; one word for a flag, a pair for each of a tuple."""
    if value is True:
        return [name]
    if value is False:
        return [name.replace("--", "--no-", 1)]
    values = value if isinstance(value, tuple) else (value,)
    texts = ["=".join(one) if isinstance(one, tuple) else str(one) for one in values]
    return [word for text in texts for word in (name, text)]


def command_line(spec: ScriptSpec, template: str, cluster: str) -> list[str]:
    """Return the words of the command that renders this script again."""
    argv = ["hpctk", "render", template, "--cluster", cluster]
    values = asked(spec)
    words = values.pop("command", ())
    for name, given in values.items():
        value = shown(name, given)
        passed = name.replace("_", "-")
        if passed in FIELDS:
            text = "no" if value is False else value
            argv += ["--sbatch", passed if value is True else f"{passed}={text}"]
        else:
            argv += option_words(option(name), value)
    return [*argv, "--", *words] if words else argv


def read_command(argv: Sequence[str]) -> Header:
    """What a ``command_line`` that was split into words says.

    Raises RenderError for an option that this version does not know, and ValueError for words that
    are not such a command.
    """
    known = {option(name): name for name in OPTIONS}
    hpctk, render, template, option_, cluster, *words = argv
    if (hpctk, render, option_) != ("hpctk", "render", "--cluster"):
        raise ValueError(argv)
    found: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        if word == "--":
            found["command"] = tuple(words)
            break
        negated = word not in known and word.startswith("--no-")
        name = known.get(word.replace("--no-", "--", 1) if negated else word, "")
        if not name:
            msg = f"its request has an unknown option {word!r}"
            raise RenderError(msg, hint=near_miss(word, list(known)))
        if isinstance(DEFAULTS[name], bool):
            found[name] = not negated
        else:
            value = OPTIONS[name].value.word(words.pop(0))
            several = isinstance(DEFAULTS[name], tuple)
            found[name] = (*found.get(name, ()), value) if several else value
    return Header(template, cluster, found | read_sbatch(found.pop("sbatch", ())))


def read_sbatch(texts: Sequence[str], where: str = "--sbatch") -> dict[str, Any]:
    """The fields that ``--sbatch NAME[=VALUE]`` sets; other names stay in the field ``sbatch``.

    So do those without a text behind ``=``: they set nothing, but leave out a default.

    Raises RenderError for a name that is given twice or lacks its value.
    """
    refuse_twice([text.partition("=")[0] for text in texts], where)
    found: dict[str, Any] = {}
    passed = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and needs_value(name):
            msg = f"{where}: {name!r} needs a value"
            raise RenderError(msg, hint=f"write --sbatch {name}=VALUE")
        if name not in FIELDS or left_out(text):
            passed.append(text)
            continue
        field = name.replace("-", "_")
        try:
            found[field] = OPTIONS[field].value.word(value) if equals else True
        except ValueError:
            found[field] = value  # read_spec refuses it and names the range
    return found | ({"sbatch": tuple(passed)} if passed else {})


def needs_value(name: str) -> bool:
    """Whether this option of sbatch must have a value; False for one that hpctk does not know."""
    flags = (FLAG, EXCLUSIVE)
    return name in PASSED or (name in FIELDS and OPTIONS[name.replace("-", "_")].value not in flags)


def write_script(path: Path, script: str, *, force: bool = False) -> None:
    """Write ``script`` and create its directory; a file that is equal already stays untouched.

    Raises RenderError if the file there is edited or foreign and ``force`` is not set, and if it
    cannot be written.
    """
    try:
        old = path.read_bytes().decode(errors="replace") if path.exists() else None
        if old == script:
            return
        if old is not None and not force and origin(old) != "rendered":
            what = "was edited since it was rendered" if origin(old) == "edited" else "is not ours"
            msg = f"{path}: {what}"
            raise RenderError(msg, hint="--force overwrites it; -o FILE writes another file")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced in one step, because sbatch may be reading it.
        files.replace_file(path, [script.encode()])
    except OSError as error:
        msg = f"{path}: cannot be written: {error.strerror}"
        raise RenderError(msg, hint="give another file with -o") from None


def log_directory(output: str) -> Path:
    """Return the directory of a log pattern, up to the first part with a symbol such as %j."""
    filled, parts = re.compile("%[0-9]*[A-Za-z]"), Path(output).parent.parts
    kept = takewhile(lambda part: not filled.search(part.replace("%%", "")), parts)
    return Path(*(part.replace("%%", "%") for part in kept))
