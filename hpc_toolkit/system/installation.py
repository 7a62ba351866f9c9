"""How the hpctk that runs was installed: hints for missing packages, and modules in few operations.

A process starts with this module, so it imports as little as possible itself.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType

_CHUNK = 1 << 20

OF_USER: list[str] = []
"""Directory of a program that Python started by ``-m`` or ``-c``; only user code is imported from
there, because a file such as random.py in it would replace a module of Python's."""


def leave_directory() -> None:
    """Import no more modules from the current directory, but let user code do so."""
    try:
        directory = os.getcwd()
    except OSError:
        return
    if not sys.flags.safe_path and sys.path[:1] in ([directory], [""]):
        del sys.path[0]
    if not os.environ.get("PYTHONSAFEPATH"):
        OF_USER[:] = [directory]


class _Loader(SourceFileLoader):
    """Loads a module as Python does, but does not look at an open file before it reads it."""

    def get_data(self, path: str | bytes) -> bytes:
        file = os.open(path, os.O_RDONLY)
        try:
            return b"".join(iter(lambda: os.read(file, _CHUNK), b""))
        finally:
            os.close(file)


class _ListedFinder:
    """Finds modules as Python's finder of files does, but lists each directory only once.

    Python's finder looks at a directory again for each module of it, and twice at the module's
    file. On a filesystem that caches no attributes, each look is a question to the server.
    """

    find_distributions = staticmethod(PathFinder.find_distributions)
    invalidate_caches = staticmethod(PathFinder.invalidate_caches)

    def __init__(self) -> None:
        self._listed: dict[str, frozenset[str] | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module; all but regular packages and files is left to Python's finder."""
        name = fullname.rpartition(".")[2]
        for directory in sys.path if path is None else path:
            at = os.path.join(directory, name)
            names = self._list(directory)
            if names is None or name in names:
                if names is None or not self._is_package(at):
                    return PathFinder.find_spec(fullname, path, target)
                return _spec(fullname, os.path.join(at, "__init__.py"), [at])
            for suffix in EXTENSION_SUFFIXES:
                if name + suffix in names:
                    return spec_from_file_location(fullname, at + suffix)
            if f"{name}.py" in names:
                return _spec(fullname, f"{at}.py")
            if f"{name}.pyc" in names:
                return PathFinder.find_spec(fullname, path, target)
        return None

    def _is_package(self, directory: str) -> bool:
        names = self._list(directory) or ()
        return "__init__.py" in names and not any(
            f"__init__{one}" in names for one in EXTENSION_SUFFIXES
        )

    def _list(self, directory: str) -> frozenset[str] | None:
        """The names in a directory; None if it is an archive, or cannot be read."""
        if directory not in self._listed:
            try:
                with os.scandir(directory) as entries:
                    found = (one for one in entries if one.name[-3:] != ".py" or one.is_file())
                    self._listed[directory] = frozenset(one.name for one in found)
            except FileNotFoundError:
                self._listed[directory] = frozenset()
            except OSError:
                self._listed[directory] = None
        return self._listed[directory]


def _spec(fullname: str, file: str, inside: list[str] | None = None) -> ModuleSpec | None:
    loader = _Loader(fullname, file)
    return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inside)


def open_streams() -> None:
    """Open the null device as each standard stream that the caller closed.

    Otherwise a journal might become descriptor 2, to which any library may write.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r+")  # noqa: SIM115 - gets the number of the closed stream
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


_finder = _ListedFinder()


@contextmanager
def listed_imports() -> Iterator[None]:
    """Import modules in the block with fewer looks at the filesystem.

    The block must not import the user's code, which may write modules and import them at once. A
    directory is listed once per process, so this is for its first milliseconds alone.
    """
    if PathFinder not in sys.meta_path:
        yield
        return
    sys.meta_path[sys.meta_path.index(PathFinder)] = _finder
    try:
        yield
    finally:
        sys.meta_path[sys.meta_path.index(_finder)] = PathFinder


def config_directory() -> Path | None:
    """The directory of the user's settings; it need not exist. None if there is no home."""
    from pathlib import Path

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
    import shlex
    from pathlib import Path

    wanted = package or f"hpctk[{extra}]"
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists():
        words = ["pipx", "inject", prefix.name, wanted]
    elif find_spec("pip") is None:
        words = ["uv", "pip", "install", "--python", sys.executable, wanted]
    else:
        words = [sys.executable, "-m", "pip", "install", wanted]
    return shlex.join(words)
