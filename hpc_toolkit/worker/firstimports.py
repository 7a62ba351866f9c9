"""What the user's module imports before any other code of it runs, read from its source."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from hpc_toolkit.rundir.layout import WorkloadSpec
from hpc_toolkit.worker.code import base_of, code_file, find, is_installed

_PLAIN = ast.expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Pass


def first_imports(spec: WorkloadSpec) -> list[str]:
    """Installed modules that a stage's module imports before it runs other code, in their order.

    Among them are names like ``transformers.AutoModel``: some packages import parts when they are
    asked for. [] if they are parts of Python only, or the module says ``fork_safe = False``.
    """
    file = code_file(spec)
    if file is None or is_installed(str(file)):
        return []
    with suppress(OSError):
        if re.search(rb"^\s*fork_safe\b[^=\n]*= *False\b", file.read_bytes(), re.MULTILINE):
            return []
    leading = _Leading(spec.path)
    leading.follow(str(spec.function).partition(":")[0])
    ours = {*sys.stdlib_module_names, "hpc_toolkit"}
    return leading.found if {one.partition(".")[0] for one in leading.found} - ours else []


class _Leading:
    """Follows imports through the user's files, up to the first statement that may do anything.

    Such a statement may set a variable that a package reads when it is imported.
    """

    def __init__(self, path: tuple[str, ...]) -> None:
        self.found: list[str] = []
        self._path, self._seen = path, set[str]()
        self._known: dict[str, ModuleSpec | None] = {}

    def follow(self, name: str) -> bool:
        """Whether importing a module runs only installed code and definitions."""
        parent = name.rpartition(".")[0]
        if name in self._seen or (parent and not self.follow(parent)):
            return name in self._seen
        self._seen.add(name)
        found = find(name, self._path, self._known)
        if found is None or found.origin is None:  # it fails, or has no code
            return True
        if not found.has_location or is_installed(found.origin):
            self.found.append(name)
            return True
        return self._read(found.origin, name if found.submodule_search_locations else parent)

    def _read(self, file: str, package: str) -> bool:
        with warnings.catch_warnings(action="ignore"), suppress(Exception):
            return self._all(ast.parse(Path(file).read_bytes()).body, package)
        return False

    def _all(self, nodes: Iterable[Any], package: str) -> bool:
        return all(self._harmless(node, package) for node in nodes)

    def _harmless(self, node: Any, package: str) -> bool:
        if isinstance(node, ast.Import):
            return all(self.follow(alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return self._from(base_of(node, package), [alias.name for alias in node.names])
        if isinstance(node, ast.If):
            test = ast.dump(node.test)
            return "TYPE_CHECKING" in test or ("__name__" in test and "__main__" in test)
        if hasattr(node, "body"):
            return self._all(_inside(node), package)
        # It only computes values and gives them names.
        return isinstance(node, _PLAIN) and not any(map(_acts, ast.walk(node)))

    def _from(self, base: str, names: list[str]) -> bool:
        if not self.follow(base):
            return False
        installed = base in self.found
        self.found += [f"{base}.{name}" for name in names if installed and name != "*"]
        parts = [f"{base}.{name}" for name in names if not installed]
        return all(self.follow(one) for one in parts if find(one, self._path, self._known))


def _inside(node: Any) -> list[Any]:
    """What is evaluated where a function, a class or a ``try`` stands; None: anything."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        return [*node.decorator_list, *given.defaults, *filter(None, given.kw_defaults)]
    if isinstance(node, ast.ClassDef):
        return [*node.bases, *node.decorator_list, *(None for _ in node.keywords), *node.body]
    if isinstance(node, ast.Try):
        others = [one for handler in node.handlers for one in handler.body]
        return [*node.body, *others, *node.orelse, *node.finalbody]
    return [None]


def _acts(node: Any) -> bool:
    """Whether an expression may do more than compute a value, or set more than a name."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Call | ast.Await | ast.Yield | ast.YieldFrom)
