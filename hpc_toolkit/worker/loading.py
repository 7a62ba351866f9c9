"""Import and construct the workload that run.json names, and call its ``prefetch``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from hpc_toolkit.errors import ConfigError, WorkloadError, describe, near_miss
from hpc_toolkit.queue.left import parse_max_failures
from hpc_toolkit.queue.units import MAX_UNIT
from hpc_toolkit.rundir import layout
from hpc_toolkit.system.installation import OF_USER
from hpc_toolkit.system.jsonlines import is_kept, not_json
from hpc_toolkit.worker.code import code_file, collect_provenance

Item = dict[str, Any]

_imported: dict[str, tuple[int, int] | None] = {}


class Workload(Protocol):
    """The interface of a workload, whose items an executor runs.

    ``prefetch(group)`` is optional: a hint for the group that is likely to be loaded next, called
    from another thread, one call at a time, while a group is loaded and its items run. It should
    bring closer what :meth:`load` reads, but put nothing into GPU memory. A :meth:`load` of that
    group need not follow, and nothing waits for the call. An exception becomes a line in the log.

    ``on_oom(context, items)`` is optional: it is called when CUDA or the host ran out of memory.
    It returns True or another context to run ``items`` again, smaller, or False to fail the first
    of them. ``context`` is None if :meth:`load` ran out of memory.

    ``fetch(items)`` is optional: ``hpctk items fetch`` calls it without :meth:`load`. It loads what
    items need besides checkpoints, and yields a name and an error or "" for each data set.

    ``fork_safe = False`` in the file of its module: each executor imports all packages itself.
    """

    def load(self, group: Any) -> Any:
        """Prepare the context of a group; called once per group and executor."""
        ...

    def run(self, context: Any, items: Iterable[Item]) -> Iterator[dict[str, Any]]:
        """Yield one result per item, in order. Items should be taken one at a time."""
        ...


class FunctionWorkload:
    """A workload that calls a function for each item, as :attr:`WorkloadSpec.call` says."""

    def __init__(self, function: Callable[..., Any], call: str = "") -> None:
        by_name, _, dropped = call.partition(" but ")
        self._function = function
        if dropped:
            self._function = lambda item: function(**{k: item[k] for k in item if k != dropped})
        elif by_name == layout.BY_NAME:
            self._function = lambda item: function(**item)

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: None, items: Iterable[Item]) -> Iterator[dict[str, Any]]:
        for item in items:  # not map(), which a StopIteration of the function would end
            yield self._function(item)


def load_workload(spec: layout.WorkloadSpec, *, pipefail: bool = False) -> Workload:
    """Import and construct the code of a stage; a WorkloadError says why that failed.

    ``sys.path`` and ``sys.argv`` become those of a script with this code.
    """
    if spec.command is not None:
        from hpc_toolkit.worker.command import CommandWorkload

        return CommandWorkload(spec.command, pipefail=pipefail)
    assert spec.function is not None
    name = str(spec.function)
    # The user's files must not replace modules that a workload of hpctk imports.
    ours = name.startswith("hpc_toolkit.") and name not in (layout.CALLS, layout.STUDY)
    add_paths(spec.path, first=not ours)
    sys.argv = [*spec.argv] or [str(code_file(spec) or name)]
    found = load_object(spec.function, spec.path)
    if isinstance(found, type):
        try:
            workload: Any = found(**spec.options)
            names = ("load", "run", "on_oom", "prefetch")
            load, run, on_oom, _ = (getattr(workload, name, None) for name in names)
        except BaseException as error:
            what = f"{spec.function}({spec.options})"
            raise _failed(what, error, "check the workload's options") from error
        if is_callable_class(found):
            refuse_lazy(found.__call__, name)
            return FunctionWorkload(workload, spec.call)
        if not (callable(load) and callable(run)):
            message = f"{spec.function} has no methods load(group) and run(context, items)"
            raise WorkloadError(message, hint="or __call__, for a class that is a function")
        refuse_lazy(run, f"{name}.run", 0x280)
        if not (on_oom is None or callable(on_oom)):
            message = f"{spec.function}.on_oom is not a method on_oom(context, items)"
            hint = "on_oom returns whether items can run again with less memory"
            raise WorkloadError(message, hint=hint)
        return cast("Workload", workload)
    if spec.options:
        message = f"{spec.function} is a function; options are for classes: {list(spec.options)}"
        raise WorkloadError(message, hint="put the values into the items")
    if not callable(found):
        message = f"{spec.function} is neither a function nor a class but {type(found).__name__}"
        raise WorkloadError(message)
    refuse_lazy(found, name)
    return FunctionWorkload(found, spec.call)


def refuse_lazy(function: Any, name: str, flags: int = 0x2A0) -> None:
    """Refuse a function with ``yield`` (0x20) or ``async`` (0x280): a call runs no code of it."""
    if getattr(getattr(function, "__code__", None), "co_flags", 0) & flags:
        message = f"{name} is async or has a yield, so that a call returns before its code runs"
        raise WorkloadError(message, hint="return the result, as by asyncio.run(...) or list(...)")


def add_paths(user: tuple[str, ...], *, first: bool = True) -> None:
    """Let imports find the user's files, before or after all others."""
    user = (*user, *OF_USER)
    sys.path[:] = dict.fromkeys((*user, *sys.path) if first else (*sys.path, *user))


@contextmanager
def caller_path() -> Iterator[None]:
    """Keep ``sys.path`` and the directory, which importing the user's files may change.

    The caller's own imports, made later, must not find the user's files.
    """
    path, argv = [*sys.path], sys.argv
    with ExitStack() as stack:
        with suppress(OSError):  # it was removed
            here = os.open(".", os.O_PATH)
            stack.callback(os.close, here)
            stack.callback(os.fchdir, here)
        try:
            yield
        finally:
            sys.path[:], sys.argv = path, argv


def is_callable_class(kind: type) -> bool:
    """Whether the objects of a class are functions: it has ``__call__`` and is not a workload."""
    is_workload = hasattr(kind, "load") and hasattr(kind, "run")
    return not is_workload and any("__call__" in vars(base) for base in kind.__mro__)


def check_stage(stage: layout.StageSpec) -> None:
    """Refuse a stage that cannot work, with ConfigError or WorkloadError; imports its code.

    Raises TypeError for a setting of a type that run.json does not have.
    """
    work = stage.workload
    if (work.function is None) == (work.command is None):
        message = "a run needs either a workload or a command"
        raise ConfigError(message, hint="--workload MODULE:NAME or --command '... {key} ...'")
    if work.command is not None and not str(work.command).strip():
        # A shell succeeds on an empty command, so every item would seem done.
        message = "the command is empty"
        raise ConfigError(message, hint="such as --command './measure --seed {seed}'")
    if work.command is not None and work.options:
        message = f"options are for classes, not for a command: {list(work.options)}"
        raise ConfigError(message, hint="write them into the command")
    _check_limits(stage)
    _check_no_retry(stage)
    with caller_path():
        load_workload(work)
    layout.parse_manifest(json.loads(layout.Manifest(run="", stages=(stage,)).to_bytes()))


def _check_limits(stage: layout.StageSpec) -> None:
    for name in ("max_attempts", "max_items_per_process", "recycle_at_mib", "log_limit_mib"):
        if (least := getattr(stage, name)) is not None and least < 1:
            raise ConfigError(f"{name} must be at least 1, got {least}")
    options = dict(stage.workload.options)
    if why := not_json(options) or ("" if is_kept(options) else "a key is not text"):
        raise ConfigError(f"options: {why}", hint="use what JSON has, with texts as keys")
    if stage.timeout_s is not None and not 0 < stage.timeout_s < float("inf"):
        raise ConfigError(f"timeout must be a positive number of seconds, got {stage.timeout_s:g}")
    if stage.pipefail and stage.workload.command is None:
        message = "pipefail is for shell commands"
        raise ConfigError(message, hint="leave it out, or name a --command")
    if stage.items_per_claim is not None and not 1 <= stage.items_per_claim <= MAX_UNIT:
        message = f"items_per_claim must be 1 to {MAX_UNIT}, got {stage.items_per_claim}"
        raise ConfigError(message, hint="long items: 1; leave it out for items of seconds")
    if stage.kill_after_s is not None and not 0 <= stage.kill_after_s < float("inf"):
        message = f"kill_after must be a number of seconds from 0, got {stage.kill_after_s:g}"
        raise ConfigError(message)
    if stage.max_failures is not None:
        parse_max_failures(stage.max_failures)


def _check_no_retry(stage: layout.StageSpec) -> None:
    for name in stage.final:
        if name != "timeout" and not (name.isidentifier() and name[0].isupper()):
            message = f"no_retry must be 'timeout' or names of exceptions, got {name!r}"
            raise ConfigError(message, hint="such as --no-retry timeout,ValueError")
    if "timeout" in stage.final and stage.timeout_s is None:
        message = f"no_retry = {stage.no_retry!r} needs a timeout"
        raise ConfigError(message, hint="set the time limit of one item, such as --timeout 5min")


def new_manifest(
    root: str | Path, stage: layout.StageSpec, *, copy_code: bool = False
) -> layout.Manifest:
    """The manifest of a new run; refuse a stage that cannot work."""
    check_stage(stage)
    origin = collect_provenance((stage,)) | {"copied": copy_code}
    return layout.Manifest(run=Path(root).name, stages=(stage,), provenance=origin)


def load_object(name: object, path: tuple[str, ...]) -> Any:
    """Import what ``module:name`` names, from the directories ``path`` or installed packages.

    Raises WorkloadError: there is no such module or name, or its import failed.
    """
    if not isinstance(name, str) or name.startswith("__main__:"):
        message = f"workload {name!r} cannot be imported: workers import code from files"
        own = name.partition(":")[2] if isinstance(name, str) else getattr(name, "__name__", "NAME")
        hint = f"write the function to a file such as work.py, and name it: 'work:{own}'"
        raise WorkloadError(message, hint=hint)
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute.isidentifier()):
        message = f"workload {name!r} is not MODULE:NAME with a NAME of the module, without dots"
        raise WorkloadError(message, hint="such as hpc_toolkit.science.workloads.synthetic:Sleep")
    if module_name.endswith(".py"):
        message = f"workload {name!r} names a file, and not a module"
        dotted = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise WorkloadError(message, hint=f"name it as import does: '{dotted}:{attribute}'")
    module = _import_module(name, module_name, path)
    try:
        return getattr(module, attribute)
    except BaseException as error:
        if not isinstance(error, AttributeError):
            what = f"workload {name!r}"
            raise _failed(what, error, "see the module's __getattr__") from error
        message = f"module {module_name!r} has no {attribute!r}"
        known = [known for known in vars(module) if not known.startswith("_")]
        raise WorkloadError(message, hint=near_miss(attribute, known)) from None


def _import_module(name: str, module_name: str, path: tuple[str, ...]) -> ModuleType:
    """Import the module of the workload ``name``; a WorkloadError says why that failed."""
    for directory in reversed((*path, *OF_USER)):
        if directory not in sys.path:
            sys.path.insert(0, directory)
    try:
        return _current(module_name, path)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            message = f"workload {name!r}: no module named {error.name!r}"
            hint = _near_module(module_name, path)
            raise WorkloadError(message, hint=hint) from error
        message = f"workload {name!r} cannot be imported: {error}"
        raise WorkloadError(message, hint=f"install what provides {error.name!r}") from error
    except BaseException as error:
        what = f"workload {name!r} cannot be imported"
        raise _failed(what, error, f"try: python -c 'import {module_name}'") from error


def _failed(what: str, error: BaseException, hint: str) -> WorkloadError:
    """The error for an exception of the user's code, which may also end or interrupt a process."""
    if issubclass(type(error), SystemExit):
        hint = "put code that ends the process below: if __name__ == '__main__':"
    code = 130 if issubclass(type(error), KeyboardInterrupt) else None
    return WorkloadError(f"{what}: {describe(error)}", hint=hint, exit_code=code)


def _near_module(module: str, path: tuple[str, ...]) -> str:
    import difflib

    looked = f"looked in {', '.join(path) or 'the installed packages'}"
    stems = [file.stem for directory in path for file in Path(directory).glob("*.py")]
    close = difflib.get_close_matches(module, stems, n=1)
    return f"did you mean {close[0]!r}?" if close else looked


def _current(name: str, path: tuple[str, ...]) -> ModuleType:
    """Import a module, again if its file in ``path`` was written since the last import.

    A notebook cell may write a file many times, but Python imports it once per process.
    """
    importlib.invalidate_caches()
    before = sys.modules.get(name)
    file = getattr(before, "__file__", None)
    if before is not None and file is not None and os.path.dirname(file) in path:
        seen = _imported.setdefault(name, _compiled(before) or _stamp(file))
        if _stamp(file) != seen:
            del sys.modules[name]
    module = importlib.import_module(name)
    file = getattr(module, "__file__", None)
    if module is not before and file is not None:
        _imported[name] = _stamp(file)
    return module


def _stamp(file: str) -> tuple[int, int] | None:
    """Mtime and size, by which Python tells versions of a file apart; None if it is gone."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF


def _compiled(module: ModuleType) -> tuple[int, int] | None:
    """The stamp of the file that a module was compiled from; None if it was not kept."""
    try:
        with open(getattr(module, "__cached__", None) or "", "rb") as file:
            header = file.read(16)
    except OSError:
        return None
    # Flags other than 0: the header has a hash of the source instead; see PEP 552.
    padded = header.ljust(16, b"\1")
    flags, changed, size = (int.from_bytes(padded[at : at + 4], "little") for at in (4, 8, 12))
    return None if flags else (changed, size)


class Prefetch:
    """Calls ``prefetch`` for the group that was named last, in a daemon: nothing waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: tuple[Callable[[Any], object], Any] | None = None
        self._open = self._runs = False

    def open(self) -> None:
        """Allow calls, once a group is loaded: two threads must not import torch at once."""
        with self._lock:
            self._open = True
            self._start()

    def name(self, workload: object, group: Any, *, loads: Any = None) -> None:
        """Name the group to prefetch once the running call has returned; None: not known.

        It replaces a group that was named and not begun. ``loads`` is the group that is being
        loaded now, for which a prefetch is too late.
        """
        prefetch = getattr(workload, "prefetch", None)
        if not callable(prefetch):
            return
        with self._lock:
            if group is not None:
                self._next = prefetch, group
            elif self._next is not None and self._next[1] == loads:
                self._next = None
            self._start()

    def _start(self) -> None:
        if self._runs or self._next is None or not self._open:
            return
        self._runs = True
        try:
            threading.Thread(target=self._call, name="prefetch", daemon=True).start()
        except RuntimeError as error:  # no thread can be started now
            self._runs = False
            (_, group), self._next = self._next, None
            _warn(group, error)

    def _call(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._runs = False
                    return
                (prefetch, group), self._next = self._next, None
            try:
                prefetch(group)
            except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
                _warn(group, error)


def _warn(group: Any, error: BaseException) -> None:
    said = describe(error).replace("\n", " ")
    sys.stderr.write(f"hpctk: {group!r:.200} is not prefetched: {said:.300}\n")
