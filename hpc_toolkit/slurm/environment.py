"""Check what surrounds a script's program: modules, conda, containers, commands, variables.

Every value must match an allow-list; the script quotes it nevertheless.
"""

from __future__ import annotations

import re

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import (
    check_match,
    check_module,
    check_names,
    check_variable,
    refusal,
    setup_words,
)

USERS = ".users"
"""Directory beside staged files with one entry per task that still uses them."""

_PATH_MAX = 4096
_PATH = f"/.{{1,{_PATH_MAX - 1}}}"
# No colon, which separates the directories of PATH.
_PROGRAMS = f"/[^:]{{1,{_PATH_MAX - 1}}}"
_CONDA = f"[A-Za-z0-9_][A-Za-z0-9_.+-]{{0,127}}|{_PROGRAMS}"
_IMAGE = f"[^-].{{0,{_PATH_MAX - 1}}}"
_BIND = "/[^:,]{0,4000}(:/[^:,]{0,4000}(:r[ow])?)?"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_WORD = ".{0,32768}"
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
    """Raise RenderError unless all values may go into a script; errors begin with ``where``."""
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
    if container is not None:
        wanted = "an image: a file, or docker://name:tag"
        check_match(container, _IMAGE, wanted, f"{where}--container")
    if bind and container is None and not where:
        msg = "--bind: the script has no container"
        raise RenderError(msg, hint="add --container IMAGE")
    for directory in bind:
        check_bind(directory, f"{where}--bind")
    if command:
        _check_command(command, where)


def check_bind(value: object, where: str) -> None:
    """Raise RenderError unless ``value`` is ``FROM[:TO[:ro]]`` with absolute paths."""
    check_match(value, _BIND, "FROM[:TO[:ro]], absolute paths without ':' and ','", where)


def check_staged(paths: tuple[str, ...], where: str) -> None:
    """Raise RenderError unless ``paths`` can be copied into one directory: no equal names."""
    names: set[str] = set()
    for path in paths:
        check_match(path, f"[^-].{{0,{_PATH_MAX - 1}}}", "a path; ./-x for one called -x", where)
        check_names(path, where)
        name = path.rstrip("/").rpartition("/")[2]
        if name in {"", ".", "..", USERS}:
            raise refusal(where, path, "a path that ends in a name")
        if name in names:
            msg = f"{where}: two of them are called {name!r}, and both would be copied there"
            raise RenderError(msg, hint="stage the directory that holds them, or rename one")
        names.add(name)


def check_directory(value: object, where: str) -> None:
    """Raise RenderError unless ``value`` is an absolute path of printable characters."""
    check_match(value, _PATH, "an absolute path", where)


def _check_conda(conda: str | None, venv: str | None, where: str) -> None:
    if conda is not None:
        wanted = "an environment's name, or its absolute path without ':'"
        check_match(conda, _CONDA, wanted, f"{where}--conda")
    if venv is not None:
        check_match(venv, _PROGRAMS, "an absolute path without ':'", f"{where}--venv")
    if conda is not None and venv is not None:
        msg = f"{where}--conda and --venv exclude each other"
        raise RenderError(msg, hint="one interpreter runs the ranks")


def _check_command(words: tuple[str, ...], where: str) -> None:
    option = f"{where}the program after --"
    # render.kinds refuses a module for templates that cannot start one.
    module = words[0] == "-m" and len(words) > 1 and _MODULE.fullmatch(words[1]) is not None
    if not module and (not words[0] or words[0].startswith("-")):
        raise refusal(option, words[0], "a program and its arguments")
    for word in words:
        check_match(word, _WORD, "words on one line; what is longer goes into a file", option)
    if sum(map(len, words)) > _WORDS_MAX:
        msg = f"{option}: its words have more than {_WORDS_MAX} characters"
        raise RenderError(msg, hint="put them into a file that the program reads")
