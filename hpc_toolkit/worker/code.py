"""The user's code that a run executes: its files, what it imports, and a copy in the run.

The module ``ast`` is imported where it is used: most commands need no parser.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError, WorkloadError
from hpc_toolkit.rundir.files import write_new
from hpc_toolkit.rundir.layout import CALLS, STUDY, Manifest, RunPaths, StageSpec, WorkloadSpec
from hpc_toolkit.system.quantities import counted, format_size
from hpc_toolkit.system.record import replace
from hpc_toolkit.system.terminal import note

_MOST_FILES = 1000
_MOST_COPIED = 1 << 28
_INSTALLED = (f"{os.path.dirname(os.__file__)}/", f"{Path(__file__).parents[1]}/")
_SCRIPTS = (".py", ".sh", ".r", ".R", ".jl", ".pl", ".rb", ".js", ".lua", ".m")
_BETWEEN = r"\s;&|()<>"
_reported: set[str] = set()


def executed(
    paths: RunPaths, manifest: Manifest, *, strict: bool = False, argv: tuple[str, ...] = ()
) -> dict[str, StageSpec]:
    """The stages of a run as executors get them: with the run's copy of the code, if it has one.

    Warns, once in a process and its children, of code that changed since the run was created;
    raises WorkloadError instead if ``strict``. ``argv`` is that of the script whose calls are run.
    """
    made, origin = {}, manifest.provenance
    for stage in manifest.stages:
        work, known = stage.workload, origin.get("files", {}).get(stage.name, {})
        place = paths.code.absolute() / stage.name if origin.get("copied") else None
        where = {name: place / name if place else Path(one[0]) for name, one in known.items()}
        changed = [name for name, one in known.items() if _differs(where[name], one)]
        named = ", ".join(changed[:5]) + (", ..." if changed[5:] else "")
        which = "" if work.function == CALLS else f", {work.function or 'its command'},"
        message = f"the code of stage {stage.name!r}{which} changed since init: {named}"
        if changed and strict:
            raise WorkloadError(message, hint="create a new run, or leave out --strict-code")
        # Of calls, the executor says which run again.
        if changed and work.function != CALLS and message not in _reported:
            _reported.add(message)
            note(message, "warning")
        if place is not None:
            work = replace(work, path=(str(place), *work.path))
            if work.command is not None:
                words = {one[0]: where[name] for name, one in known.items()}
                work = replace(work, command=_with_copies(work.command, words))
        if work.function == CALLS:
            work = replace(work, argv=argv or tuple(origin.get("argv", ())))
        if work.function in (CALLS, STUDY):
            root = {"root": str(paths.root.absolute())}
            work = replace(work, options={**work.options, **root})
        made[stage.name] = replace(stage, workload=work)
    return made


def _differs(path: Path, record: list[Any]) -> bool:
    try:
        info = path.stat()
        return [info.st_size, info.st_mtime_ns] != record[1:3] and _sha(path) != record[3]
    except OSError:
        return True


def _sha(path: Path) -> str | None:
    import hashlib

    with suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return None


def _with_copies(command: str, copies: dict[str, Path]) -> str:
    """The command with other names for its scripts."""
    from shlex import quote  # most runs have no script

    def other(found: re.Match[str]) -> str:
        copy = copies.get(found[0].strip("'\""))
        return quote(str(copy)).replace("{", "{{").replace("}", "}}") if copy else found[0]

    return re.sub(f"[^{_BETWEEN}]+", other, command)


def copy_code(paths: RunPaths, manifest: Manifest) -> None:
    """Copy the recorded files into a run that is being created, if it asks for a copy.

    Raises ConfigError: there is nothing to copy, or too much.
    """
    if not manifest.provenance.get("copied"):
        return
    records = [one for known in manifest.provenance["files"].values() for one in known.values()]
    size = sum(one[1] for one in records)
    if not records or size > _MOST_COPIED:
        message = f"--copy-code: {counted(len(records), 'file')}, {format_size(size)}"
        hint = f"at most {format_size(_MOST_COPIED)} of code are copied; install the rest"
        raise ConfigError(message, hint=hint if records else "the code is installed; leave it out")
    for stage, known in manifest.provenance["files"].items():
        for name, (file, _, mtime, _) in known.items():
            copy = paths.code / stage / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_new(copy, [Path(file).read_bytes()])
            os.utime(copy, ns=(mtime, mtime))
            copy.chmod(os.stat(file).st_mode & 0o755 | stat.S_IWUSR)
    for directory, *_ in os.walk(paths.code):
        os.chmod(directory, os.stat(directory).st_mode & ~stat.S_IWOTH)


def code_file(spec: WorkloadSpec) -> Path | None:
    """The file of the module that a workload names; None for a command or without a file."""
    if spec.function is None:
        return None
    known = {"hpc_toolkit": sys.modules["hpc_toolkit"].__spec__}  # wherever it was found
    found = _find(str(spec.function).partition(":")[0], spec.path, known)
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


def _find(
    name: str, path: tuple[str, ...], known: dict[str, ModuleSpec | None]
) -> ModuleSpec | None:
    """Where a module is, without an import, which would run its code and might start threads."""
    if name not in known:
        parent, _, last = name.rpartition(".")
        above = _find(parent, path, known) if parent else None
        where = above.submodule_search_locations if above else [] if parent else [*path, *sys.path]
        # Not by its full name: a nested namespace package would import its parent.
        found = PathFinder.find_spec(last, where) if where else None
        if found is None and not parent:  # such as an editable installation
            others = (one.find_spec(name, None) for one in sys.meta_path if one is not PathFinder)
            found = next(filter(None, others), None)
        known[name] = found
    return known[name]


def _files_of(spec: WorkloadSpec) -> dict[str, list[Any]]:
    """The user's files that a workload executes, by their place below where they are imported from.

    They are the modules outside the installation whose names its source has, also in functions; of
    a command, its scripts and programs, and the modules of those in Python.
    """
    found: dict[str, str] = {}
    if spec.command is not None:
        words = (word.strip("'\"") for word in re.split(f"[{_BETWEEN}]+", spec.command))
        for word in filter(_is_script, words):
            below = re.sub(r"^(\.\./|/)+", "", os.path.normpath(word))
            modules = _imported((str(Path(word).absolute().parent),), _imports(word, ""))
            found |= {os.path.join(os.path.dirname(below), name): modules[name] for name in modules}
            found[below] = word
    elif spec.function == CALLS:
        main = getattr(sys.modules["__main__"], "__file__", None) or ""
        loaded = [(name, getattr(one, "__file__", None)) for name, one in [*sys.modules.items()]]
        names = [name for name, file in loaded if file and os.path.dirname(file) in spec.path]
        found = _imported(spec.path, [*names, *_imports(main, "")])
        if main.endswith(".py") and os.path.isfile(main) and not is_installed(main):
            found[os.path.basename(main)] = main
    elif spec.function is not None:
        found = _imported(spec.path, [spec.function.partition(":")[0]])
        if not found and (file := code_file(spec)) and file.is_file():
            found[file.name] = str(file)
    infos = {name: (file, os.stat(file)) for name, file in sorted(found.items())}
    return {
        name: [file, info.st_size, info.st_mtime_ns, _sha(Path(file))]
        for name, (file, info) in infos.items()
    }


def _is_script(word: str) -> bool:
    """Whether a word of a command is a file of code; other files may change."""
    if word.startswith(("/usr/", "/bin/", "/lib")) or not os.path.isfile(word):
        return False
    return word.endswith(_SCRIPTS) or os.access(word, os.X_OK)


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to a package, not to the user's own code."""
    packages = {"site-packages", "dist-packages"}
    if file.startswith(_INSTALLED) or not packages.isdisjoint(Path(file).parts):
        return True
    above = [one for one in sys.path if one and file.startswith(f"{one}/")]
    return any(file[len(one) + 1 :].partition("/")[0] in _installed_in(one) for one in above)


@cache
def _installed_in(directory: str) -> set[str]:
    """What pip has put into a directory by ``--target``: names of packages and modules."""
    found = set()
    for record in Path(directory).glob("*.dist-info/RECORD"):
        with suppress(OSError, ValueError):
            lines = record.read_text(encoding="utf-8").splitlines()
            found |= {re.split("[/,]", line, maxsplit=1)[0] for line in lines}
    return found


def _imported(path: tuple[str, ...], names: Iterable[str]) -> dict[str, str]:
    """The user's files of modules and of what they import, by their place below a directory."""
    found: dict[str, str] = {}
    known: dict[str, ModuleSpec | None] = {}
    todo, seen = [*names], set[str]()
    while todo and len(found) < _MOST_FILES:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        todo += filter(None, [parent])
        spec = _find(name, path, known)
        file = spec.origin or "" if spec is not None else ""
        if spec is not None and os.path.isfile(file) and not is_installed(file):
            package = name if spec.submodule_search_locations is not None else parent
            found[os.path.join(package.replace(".", "/"), os.path.basename(file))] = file
            todo += _imports(file, package)
    return found


def _imports(file: str, package: str) -> Iterator[str]:
    """Names that a source file of a package may import; some are not modules."""
    import ast

    todo: list[ast.AST] = []
    with warnings.catch_warnings(action="ignore"), suppress(Exception):
        todo += [ast.parse(Path(file).read_bytes())] if file.endswith(".py") else []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, package)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in {"import_module", "__import__"}:
                yield str(node.args[0].value)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
        else:
            todo += ast.iter_child_nodes(node)


def _base_of(node: Any, package: str) -> str:
    """The module from which a statement ``from ... import`` in a module of a package imports."""
    above = package.split(".")
    above = above[: len(above) - node.level + 1] if node.level else []
    return ".".join(filter(None, [*above, node.module]))


def collect_provenance(stages: tuple[StageSpec, ...]) -> dict[str, Any]:
    """Versions of hpctk, Python and packages, the git commit, and the files of the stages' code."""
    from datetime import UTC, datetime

    from hpc_toolkit import __version__

    code = {stage.name: code_file(stage.workload) for stage in stages}
    # The names of directories that pip makes: ``importlib.metadata`` would read and parse a file
    # per package, half the time of 'hpctk init'.
    packages = (path.stem for entry in sys.path for path in Path(entry).glob("*.dist-info"))
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hpctk": __version__,
        "python": sys.version.split()[0],
        "git_commit": _git_commit(),
        "code": {name: file and _sha(file) for name, file in code.items()},
        "files": {stage.name: _files_of(stage.workload) for stage in stages},
        "packages": sorted({name.replace("-", "==").replace("_", "-") for name in packages}),
    }


def _git_commit() -> str | None:
    """The commit that is checked out here, read from ``.git`` without running git."""
    for directory in (Path.cwd(), *Path.cwd().parents):
        head = directory / ".git" / "HEAD"
        if not head.is_file():
            continue
        text = head.read_text(encoding="utf-8").strip()
        if not text.startswith("ref: "):
            return text
        ref = directory / ".git" / text.removeprefix("ref: ")
        return ref.read_text(encoding="utf-8").strip() if ref.is_file() else None
    return None


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
        found = _find(name, self._path, self._known)
        if found is None or found.origin is None:  # it fails, or has no code
            return True
        if not found.has_location or is_installed(found.origin):
            self.found.append(name)
            return True
        return self._read(found.origin, name if found.submodule_search_locations else parent)

    def _read(self, file: str, package: str) -> bool:
        import ast

        with warnings.catch_warnings(action="ignore"), suppress(Exception):
            return self._all(ast.parse(Path(file).read_bytes()).body, package)
        return False

    def _all(self, nodes: Iterable[Any], package: str) -> bool:
        return all(self._harmless(node, package) for node in nodes)

    def _harmless(self, node: Any, package: str) -> bool:
        import ast

        if isinstance(node, ast.Import):
            return all(self.follow(alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return self._from(_base_of(node, package), [alias.name for alias in node.names])
        if isinstance(node, ast.If):
            test = ast.dump(node.test)
            return "TYPE_CHECKING" in test or ("__name__" in test and "__main__" in test)
        if hasattr(node, "body"):
            return self._all(_inside(node), package)
        # It only computes values and gives them names.
        plain = ast.expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Pass
        return isinstance(node, plain) and not any(map(_acts, ast.walk(node)))

    def _from(self, base: str, names: list[str]) -> bool:
        if not self.follow(base):
            return False
        installed = base in self.found
        self.found += [f"{base}.{name}" for name in names if installed and name != "*"]
        parts = [f"{base}.{name}" for name in names if not installed]
        return all(self.follow(one) for one in parts if _find(one, self._path, self._known))


def _inside(node: Any) -> list[Any]:
    """What is evaluated where a function, a class or a ``try`` stands; None: anything."""
    import ast

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
    import ast

    if isinstance(node, ast.Attribute | ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Call | ast.Await | ast.Yield | ast.YieldFrom)
