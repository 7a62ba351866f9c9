"""Calls as items of a run: what an executor writes of a function and its arguments."""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import CallError, ConfigError, RunError
from hpc_toolkit.queue.items import canonical
from hpc_toolkit.run import MAX_WORKERS, Run, create_run
from hpc_toolkit.rundir.layout import CALLS, list_stage
from hpc_toolkit.rundir.pickles import UnrestoredError, dumps, refusal
from hpc_toolkit.rundir.trust import refuse_untrusted, share
from hpc_toolkit.rundir.valuefiles import ValueFile, stored
from hpc_toolkit.rundir.values import Forms, described, pointer, steps
from hpc_toolkit.system.quantities import counted, format_size
from hpc_toolkit.system.terminal import note
from hpc_toolkit.worker.calls import FUNCTION, HELD
from hpc_toolkit.worker.code import is_installed
from hpc_toolkit.worker.fingerprints import fingerprint, is_users, of_function
from hpc_toolkit.worker.loading import new_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.rundir.valuefiles import Values

_SHOWN = 200
_LARGE = 1 << 20
"""Bytes of a pickled function from which a note advises to pass data as arguments."""
_SAME, _LARGE_INT = frozenset((str, bool, type(None))), 1 << 63
_MOST_TYPES = 1000
"""Most typed places of one argument; with more, a pickle of it takes less room."""


def open_run(root: Path, **settings: Any) -> Run:
    """Open the run of an executor, or create it."""
    stage = list_stage(workload=CALLS, **settings)
    stage = replace(stage, workload=replace(stage.workload, path=code_path()))
    if not root.exists():
        manifest = new_manifest(root, stage)
        manifest.provenance["argv"] = sys.argv
        try:
            return create_run(root, manifest, {}, sealed=False)
        except RunError:
            if not root.exists():
                raise  # else another process was faster
    run = Run.open(root)
    refuse_untrusted(root)
    if changed := run.manifest.stages[0].differences(stage):
        message = f"{root} was created with other {' and '.join(changed)}"
        raise ConfigError(message, hint="use another directory, or the arguments of its creation")
    return run


def number_of(workers: int | None, max_workers: int | None) -> int:
    """The number of local workers, which has two names."""
    if workers is not None and max_workers is not None:
        raise ConfigError("workers and max_workers are the same", hint="give one of them")
    given = workers or max_workers or 0
    if given not in range(MAX_WORKERS + 1):
        message = f"workers must be 0 to {MAX_WORKERS}, got {given!r}"
        raise ConfigError(message, hint="use one per core, or one per GPU")
    return int(given)


class Recorded:
    """The calls of a run that are finished, and the code that made them."""

    def __init__(self, run: Run, on_change: str, shown: Path) -> None:
        """``shown``: the directory of the run as its user named it."""
        if on_change not in ("rerun", "keep", "error"):
            raise ConfigError(f"on_change must be rerun, keep or error, got {on_change!r}")
        self.rows: dict[bytes, dict[str, Any]] = {}
        self._root, self._on_change = shown, on_change
        self._codes: dict[str, Counter[str]] = {}
        """Name of a function -> how many results there are of each code of it."""
        for row in run.table(partial=True):
            item = row["item"]
            self.rows[self.key(item)] = row
            codes = self._codes.setdefault(item["function"], Counter())
            codes[item.get("stored", {"same": {}})["same"].get(FUNCTION, "")] += 1

    def key(self, item: Item) -> bytes:
        return key_of(item, code=self._on_change != "keep")

    def notice(self, call: Call) -> None:
        """Say, once, that calls run again because the code of their function changed.

        Raises ConfigError: it changed, and must not.
        """
        name, code = call.item["function"], call.same.get(FUNCTION, "")
        known = self._codes.setdefault(name, Counter())
        # Several functions may be called <lambda>: none of them is another one that changed.
        if code in known or not known or name.endswith("<lambda>") or self._on_change == "keep":
            return
        if self._on_change == "error":
            message = f"the code of {name} changed since {self._root} has calls of it"
            raise ConfigError(message, hint="use another directory, or on_change='rerun' or 'keep'")
        said = f"{name} changed: its calls run again; {counted(known.total(), 'result')} of the "
        note(f"{said}code before stay in {self._root}")
        known[code] = 0


def unfold(function: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call without the ``functools.partial`` that holds a part of its arguments."""
    while type(function) is partial:  # a subclass may do something else
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    return function, args, kwargs


class Caller:
    """Makes the items of an executor's calls, and stores what JSON does not have in one file."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / f"{os.urandom(8).hex()}.values"
        self._stored: dict[Any, list[Any]] = {}
        self._dirty = self._maps = False
        self._mapped: _Function | None = None

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Raises ConfigError: ``function`` cannot be called."""
        how = self._how(function)
        call = Call(how, function)
        if how.tag:
            call.stored["file"] = self._file.name
        own = [call.form(f"/args/{at}", one) for at, one in enumerate(args)]
        named = {name: call.form(f"/kwargs{pointer(name)}", one) for name, one in kwargs.items()}
        item = {"function": how.name, "args": own, **({"kwargs": named} if named else {})}
        if call.types:
            call.stored["types"] = call.types
        if call.same or call.types:
            item["stored"] = call.stored
        call.item = item
        return call

    def store(self, call: Call) -> None:
        """Append what the item of a new call has not in it; :meth:`sync` makes it last.

        Raises ConfigError: a part cannot be pickled. OSError: the file cannot be written.
        """
        for place, content in call.parts:
            is_object = call.types[place][0] == "pickle"
            data = self._pickled(call, place, content) if is_object else content
            key = sha256(data).digest() if type(data) is bytes else call.same[place]
            if key not in self._stored:
                if place == FUNCTION and len(data) > _LARGE:
                    said = f"{call.item['function']} takes {format_size(len(data))} with what it "
                    note(f"{said}refers to; pass large objects as arguments: they are stored once")
                self._file.parent.mkdir(exist_ok=True)
                share(self._file.parent)
                self._stored[key] = stored(self._file, data)
                self._dirty = True
            call.types[place][1:4] = self._stored[key]
            call.stored["file"] = self._file.name
            if place == FUNCTION:
                call.how.tag = call.types[place]

    @staticmethod
    def _pickled(call: Call, place: str, value: Any) -> bytes:
        try:
            return dumps(value)
        except Exception:  # noqa: BLE001 - of methods of the user
            what, *rest = steps(place)
            name = f"argument {int(rest[0]) + 1}" if what == "args" else "".join(rest[:1])
            inside = (f"[{int(one) if one.isdecimal() else one!r}]" for one in rest[1:])
            why = refusal(value, f"{name}{''.join(inside)}" if rest else "the function")
            message = f"{call.item['function']}: {why.message}"
            raise ConfigError(
                message, hint="pass what workers need to make it, such as a name"
            ) from None

    def sync(self) -> None:
        """Commit what was stored, before items name it."""
        if self._dirty:
            self._dirty = False
            ValueFile(self._file).sync()

    def _how(self, function: Any) -> _Function:
        """How workers get a function; compared for each call, but once for all calls of a map."""
        if not self._maps:
            return _Function(function)
        if self._mapped is None:
            self._mapped = _Function(function)
        return self._mapped

    @contextmanager
    def mapping(self) -> Iterator[None]:
        """Take the functions of all calls inside of the block for the same."""
        self._maps = True
        try:
            yield
        finally:
            self._maps, self._mapped = False, None


class _Function:
    """How workers get a function; without a reference to it."""

    tag: Sequence[Any] = ()
    """Where its pickle is stored."""

    def __init__(self, function: Any) -> None:
        if not callable(function):
            message = f"{function!r:.200} is not a function"
            raise ConfigError(message, hint="pass a function, and its arguments after it")
        self.is_imported, self.name = name_of(function)
        self.same: dict[str, str] = {}
        """Place -> fingerprint."""
        if not self.is_imported or is_users(function):
            code, held = of_function(function)
            self.same = {FUNCTION: code, **({HELD: held} if held else {})}


class Call:
    """The item of a call, and what it has beside JSON."""

    item: Item

    def __init__(self, how: _Function, function: Any) -> None:
        self.how = how
        self.types: dict[str, Any] = {}
        self.same = dict(how.same)
        self.stored: dict[str, Any] = {"same": self.same}
        self.parts: list[tuple[str, Any]] = []
        if how.tag:
            self.types[FUNCTION] = how.tag
        elif not how.is_imported:
            self.types[FUNCTION] = ["pickle"]
            self.parts.append((FUNCTION, function))

    def form(self, place: str, value: Any) -> Any:
        """The natural form of an argument."""
        if type(value) in _SAME or (type(value) is int and -_LARGE_INT < value < _LARGE_INT):
            return value
        found, form = _Parts(), None
        try:
            form = Forms(found.types, found).form(value, place)
            fits = len(found.types) <= _MOST_TYPES
        except Exception:  # noqa: BLE001 - of methods of the user, or too deep
            fits = False
        if not fits:
            found, form = _Parts(), described(value, None)
            found.pickle(place, value)
        self.types |= found.types
        self.parts += found.parts
        self.same |= {where: fingerprint(content) for where, content in found.parts}
        return form


class _Parts:
    """The parts of one argument that JSON does not have; see :class:`Forms`."""

    def __init__(self) -> None:
        self.types: dict[str, Any] = {}
        self.parts: list[tuple[str, Any]] = []

    def part(self, place: str, kind: str, content: Any, *more: Any) -> None:
        self.types[place] = [kind, 0, 0, "", *more]
        self.parts.append((place, content))

    def pickle(self, place: str, value: Any) -> None:
        self.part(place, "pickle", value)


def key_of(item: Item, *, code: bool = True) -> bytes:
    """Bytes that are equal iff two items are the same call; ``code``: of the same code."""
    kept = item.get("stored")
    if kept is None or (code and "types" not in kept):
        return canonical(item)
    same, types = kept["same"], kept.get("types", {})
    known = {place: one for place, one in same.items() if code or place != FUNCTION}
    if item["function"].endswith("<lambda>"):  # one name of many functions
        known = same
    kinds = {place: tag[0] if place in same else tag for place, tag in types.items()}
    return canonical({**item, "stored": [known, kinds]})


class RemoteTraceback(Exception):  # noqa: N818 - as concurrent.futures has it
    """The cause of an exception of a call: its traceback in the worker, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def settle(future: Future[Any], row: dict[str, Any], values: Values) -> None:
    """End a call's future as its row says."""
    try:
        if row["state"] == "done":
            future.set_result(values.restored({**row})["value"])
        else:
            future.set_exception(_exception(row, values))
    except Exception as refusal:  # noqa: BLE001 - else nobody would end the future
        future.set_exception(refusal)


def _exception(row: dict[str, Any], values: Values) -> BaseException:
    """The exception of a failed call, or a CallError if it is not there."""
    item, error, attempts = row["item"], row["error"], row["attempts"]
    failed = f"{shown(item)} failed after {counted(attempts, 'attempt')}"
    hint = f"'hpctk status {values.root}' shows where; fix the cause, 'hpctk retry {values.root}', "
    hint += "and start the script again"
    if "exception" in row:
        with suppress(UnrestoredError):
            found, trace = values.exception(row)
            if isinstance(found, BaseException):
                with suppress(Exception):  # its class may take no attributes
                    BaseException.__setattr__(found, "__cause__", RemoteTraceback(trace))
                    BaseException.add_note(found, f"{failed}; {hint}")
                return found
    return CallError(f"{failed}: {error}", hint=hint, item=item, error=error, attempts=attempts)


def shown(item: Item) -> str:
    """A call as Python writes it, shortened."""
    words = [repr(one) for one in item["args"]]
    words += [f"{key}={one!r}" for key, one in item.get("kwargs", {}).items()]
    inside = ", ".join(words)
    short = inside if len(inside) <= _SHOWN else f"{inside[:_SHOWN]}..."
    return f"{item['function']}({short})"


def code_path() -> tuple[str, ...]:
    """Directories from which workers import modules, in the order of this process.

    That of a script comes first, and the current one only if the script could import from it. The
    others are those that the script or PYTHONPATH added.
    """
    main, here = sys.modules["__main__"], str(Path.cwd())
    file = getattr(main, "__file__", None) if main.__spec__ is None else None
    own = (str(Path(file).resolve().parent),) if file is not None else ()
    is_program = file is None or not file.endswith(".py")  # such as a notebook, or pytest
    current = [here] if is_program or here in sys.path else []
    added = [one for one in sys.path if os.path.isabs(one) and not is_installed(f"{one}/")]
    return tuple(dict.fromkeys((*own, *current, *filter(os.path.isdir, added))))


def name_of(function: Any) -> tuple[bool, str]:
    """Whether workers can import a function by the name ``module:name``; the name, to show it."""
    kind = type(function)
    module = getattr(function, "__module__", None) or kind.__module__
    name = getattr(function, "__qualname__", None) or kind.__qualname__
    found = sys.modules.get(module) if module != "__main__" else None
    has_file = getattr(found, "__spec__", None) is not None
    is_imported = name.isidentifier() and has_file and getattr(found, name, None) is function
    return is_imported, f"{module}:{name}"
