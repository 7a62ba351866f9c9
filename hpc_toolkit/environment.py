"""What may surround the program of a job script: modules, conda, containers, commands, variables.

Every value is checked against what is accepted, and never against what is not; the script quotes
it all the same.
"""

from __future__ import annotations

import re

from hpc_toolkit.allowlist import check_module, check_variable, refusal, setup_words
from hpc_toolkit.errors import RenderError

_PATH_MAX = 4096
_PATH = re.compile(f"/.{{1,{_PATH_MAX - 1}}}")
# PATH separates its parts by colons.
_PROGRAMS = re.compile(f"/[^:]{{1,{_PATH_MAX - 1}}}")
_CONDA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_IMAGE = re.compile(f"[^-].{{0,{_PATH_MAX - 1}}}")
_BIND = re.compile(r"/[^:,]{0,4000}(:/[^:,]{0,4000}(:r[ow])?)?")
_WORD = re.compile(r".{0,32768}")
_WORDS_MAX = 131072


def check_environment(
    *,
    modules: tuple[str, ...] = (),
    setup: tuple[str, ...] = (),
    node_setup: tuple[str, ...] = (),
    teardown: tuple[str, ...] = (),
    env: tuple[tuple[str, str], ...] = (),
    conda: str | None = None,
    venv: str | None = None,
    container: str | None = None,
    bind: tuple[str, ...] = (),
    command: tuple[str, ...] = (),
    where: str = "",
) -> None:
    """Raise RenderError unless these may go into a script; ``where`` is a prefix for the error."""
    for module in modules:
        check_module(module, f"{where}--module")
    for option, lines in (
        ("--setup", setup),
        ("--node-setup", node_setup),
        ("--teardown", teardown),
    ):
        for line in lines:
            setup_words(line, f"{where}{option}")
    for name, value in env:
        check_variable(name, value, f"{where}--env")
    _check_conda(conda, venv, where)
    if container is not None and not _matches(_IMAGE, container):
        option = f"{where}--container"
        raise refusal(option, container, "an image: a file, or docker://name:tag")
    if bind and container is None and not where:
        msg = "--bind: the script has no container"
        raise RenderError(msg, hint="add --container IMAGE")
    for directory in bind:
        check_bind(directory, f"{where}--bind")
    if command:
        _check_command(command, where)


def check_bind(value: object, where: str) -> None:
    """Raise RenderError unless ``value`` is ``FROM[:TO[:ro]]`` with absolute paths."""
    if not _matches(_BIND, value):
        raise refusal(where, value, "FROM[:TO[:ro]], absolute paths without ':' and ','")


def check_directory(value: object, where: str) -> None:
    """Raise RenderError unless ``value`` is an absolute path on one line."""
    if not _matches(_PATH, value):
        raise refusal(where, value, "an absolute path")


def default_python(*, conda: str | None, venv: str | None, container: str | None) -> str | None:
    """The interpreter that a request without ``--python`` means; None: the one that renders.

    Raises:
        RenderError: only the user knows where it is.
    """
    if container is not None:
        msg = "--container: nothing says which interpreter inside it has hpc_toolkit"
        raise RenderError(msg, hint="give its path in the container: --python /usr/bin/python3")
    home = venv or (conda if conda is not None and conda.startswith("/") else None)
    return f"{home.rstrip('/')}/bin/python" if home is not None else None


def _check_conda(conda: str | None, venv: str | None, where: str) -> None:
    if conda is not None and not (_matches(_CONDA_NAME, conda) or _matches(_PROGRAMS, conda)):
        option = f"{where}--conda"
        raise refusal(option, conda, "an environment's name, or its absolute path without ':'")
    if venv is not None and not _matches(_PROGRAMS, venv):
        option = f"{where}--venv"
        raise refusal(option, venv, "an absolute path without ':'")
    if conda is not None and venv is not None:
        msg = f"{where}--conda and --venv exclude each other"
        raise RenderError(msg, hint="one interpreter runs the ranks")


def _check_command(words: tuple[str, ...], where: str) -> None:
    option = f"{where}the program after --"
    if not words[0] or words[0].startswith("-"):
        raise refusal(option, words[0], "a program and its arguments")
    for word in words:
        if not _matches(_WORD, word):
            raise refusal(option, word, "words on one line; what is longer goes into a file")
    if sum(map(len, words)) > _WORDS_MAX:
        msg = f"{option}: its words have more than {_WORDS_MAX} characters"
        raise RenderError(msg, hint="put them into a file that the program reads")


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(pattern.fullmatch(value))
