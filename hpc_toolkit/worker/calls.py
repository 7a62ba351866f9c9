"""The workload of an executor's run: its items are calls of functions."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.valuefiles import read_part
from hpc_toolkit.rundir.values import restore
from hpc_toolkit.worker.attempts import WORLD
from hpc_toolkit.worker.code import is_installed
from hpc_toolkit.worker.loading import load_object

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item

_MOST_LOADED = 100
"""Most functions that a process keeps."""
FUNCTION, HELD, CODE = "/function", "/held", "/code"
"""Places of an item for the code of its function, for what the function holds, and for the code
that this and the arguments reach."""


_GUARD = re.compile(rb"""^if\s+__name__\s*==\s*["']__main__["']""", re.MULTILINE)


def _globals(function: Any) -> dict[str, Any]:
    """The names that a function sees, or an object that is called like one."""
    while isinstance(function, partial):
        function = function.func
    if not hasattr(function, "__globals__"):
        function = getattr(type(function), "__call__", None)  # noqa: B004 - its code
    found: dict[str, Any] = getattr(function, "__globals__", {})
    return found


def _be_main(own: dict[str, Any]) -> None:
    """Have processes that the function of a script starts find the script's names."""
    if own.get("__name__") != "__main__":
        return
    main = vars(sys.modules["__main__"])
    main.update({name: own[name] for name in own if not name.startswith("__")})
    main.pop("__file__", None)
    with suppress(KeyError, OSError, TypeError, ValueError):
        # Those that multiprocessing spawns import this file, and would run what is not guarded.
        if _is_guarded(own["__file__"]):
            main["__file__"] = own["__file__"]


@lru_cache(maxsize=16)
def _is_guarded(path: str) -> bool:
    return _GUARD.search(Path(path).read_bytes()) is not None


class Calls:
    """The workload: it imports or unpickles the function of an item, and calls it."""

    keeps_exceptions = True
    importing = False
    """Whether this process is importing a user's function."""

    def __init__(self, root: str = "") -> None:
        self._data = RunPaths(Path(root)).calls
        self._functions: dict[Any, Any] = {}
        self._last: Any = None
        self._began = time.time()

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: None, items: Iterable[Item]) -> Iterator[Any]:
        for item in items:
            types, file, kept, code = {}, self._data, item.get("stored"), ""
            if kept is not None:
                types, file = {**kept.get("types", {})}, file / kept.get("file", "")
                code = kept["same"].get(FUNCTION, "")
            function = self._function(item["function"], code, types.pop(FUNCTION, None), file)
            if types:
                restore(item, types, partial(read_part, file))
            yield function(*item["args"], **item.get("kwargs", {}))

    def _function(self, name: str, code: str, tag: Any, file: Path) -> Any:
        key: Any = (name, code) if tag is None else (file, tag[1])
        if key not in self._functions and tag is None:
            self._forget_changed()
        if key not in self._functions:
            if len(self._functions) >= _MOST_LOADED:
                self._functions.clear()
            Calls.importing = tag is None
            try:
                found = load_object(name, ()) if tag is None else read_part(file, tag)
            finally:
                Calls.importing = False
            self._functions[key] = found
            WORLD.keep()  # a script may change the directory when it is imported
        function = self._functions[key]
        if function is not self._last:
            self._last = function
            _be_main(_globals(function))
        return function

    def _forget_changed(self) -> None:
        """Import the user's modules again if a file of them was written since this began."""
        own, changed = [], False
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and name != "__main__" and not is_installed(file):
                own.append(name)
                with suppress(OSError):
                    changed |= os.stat(file).st_mtime >= self._began
        if changed:
            self._began = time.time()
            self._functions.clear()
            for name in own:
                del sys.modules[name]
