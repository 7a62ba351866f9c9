"""Calls of an executor as items of a run: what it writes of a function and its arguments."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import CallError, ConfigError, RunError
from hpc_toolkit.queue.items import Item
from hpc_toolkit.run import MAX_WORKERS, Run, create_run
from hpc_toolkit.rundir.files import share
from hpc_toolkit.rundir.journal import ValueFile
from hpc_toolkit.rundir.layout import CALLS, list_stage
from hpc_toolkit.rundir.pickles import UnrestoredError, dumps, refusal
from hpc_toolkit.rundir.trust import refuse_untrusted
from hpc_toolkit.rundir.valuefiles import Encoded, Values, stored
from hpc_toolkit.rundir.values import pointer, steps
from hpc_toolkit.system.quantities import counted, format_size
from hpc_toolkit.system.terminal import note
from hpc_toolkit.worker.calls import CODE, FUNCTION, HELD
from hpc_toolkit.worker.code import is_installed
from hpc_toolkit.worker.fingerprints import fingerprint, is_users, of_function
from hpc_toolkit.worker.loading import new_manifest, refuse_lazy

_SHOWN = 200
_LARGE = 1 << 20
"""Bytes of a pickled function from which a note advises to pass data as arguments."""
_SAME, _LARGE_INT = frozenset((str, bool, type(None))), 1 << 63


def open_run(root: Path, **settings: Any) -> Run:
    """Open the run of an executor, or create it."""
    stage = list_stage(workload=CALLS, **settings)
    # Without any, workers do not look for those of single calls.
    needs = stage.needs if settings.get("needs") is None else stage.needs or {}
    stage = replace(stage, needs=needs, workload=replace(stage.workload, path=code_path()))
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
        self._formed: dict[int, _Formed] = {}

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Raises ConfigError: ``function`` cannot be called."""
        how = self._how(function)
        call = Call(how, function)
        if how.tag:
            call.stored["file"] = self._file.name
        known = self._formed if self._maps else None
        own = [call.form(f"/args/{at}", one, known) for at, one in enumerate(args)]
        named = {at: call.form(f"/kwargs{pointer(at)}", one, known) for at, one in kwargs.items()}
        item = {"function": how.name, "args": own, **({"kwargs": named} if named else {})}
        if call.codes:
            call.same[CODE] = " ".join(sorted(call.codes))
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
            tag = call.types[place]
            if tag[2]:  # of another call, which shares it
                call.stored["file"] = self._file.name
                continue
            is_object = tag[0] == "pickle"
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
            tag[1:4] = self._stored[key]
            call.stored["file"] = self._file.name
            if place == FUNCTION:
                call.how.tag = tag

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
        """Look once at what calls inside of the block share: the function, and equal objects."""
        self._maps = True
        try:
            yield
        finally:
            self._maps, self._mapped, self._formed = False, None, {}


class _Function:
    """How workers get a function; without a reference to it."""

    tag: Sequence[Any] = ()
    """Where its pickle is stored."""

    def __init__(self, function: Any) -> None:
        if not callable(function):
            message = f"{function!r:.200} is not a function"
            raise ConfigError(message, hint="pass a function, and its arguments after it")
        self.is_imported, self.name = name_of(function)
        refuse_lazy(function, self.name)
        self.same: dict[str, str] = {}
        """Place -> fingerprint."""
        self.code = ""
        """Fingerprint of the code that is reached by what the function holds."""
        if not self.is_imported or is_users(function):
            code, held, self.code = of_function(function)
            self.same = {FUNCTION: code, **({HELD: held} if held else {})}


class Call:
    """The item of a call, and what it has beside JSON."""

    item: Item

    def __init__(self, how: _Function, function: Any) -> None:
        self.how = how
        self.types: dict[str, Any] = {}
        self.same, self.codes = dict(how.same), {how.code} - {""}
        self.stored: dict[str, Any] = {"same": self.same}
        self.parts: list[tuple[str, Any]] = []
        if how.tag:
            self.types[FUNCTION] = how.tag
        elif not how.is_imported:
            self.types[FUNCTION] = ["pickle", 0, 0, ""]
            self.parts.append((FUNCTION, function))

    def form(self, place: str, value: Any, known: dict[int, _Formed] | None = None) -> Any:
        """The natural form of an argument; ``known`` are those that other calls of a map share."""
        if type(value) in _SAME or (type(value) is int and -_LARGE_INT < value < _LARGE_INT):
            return value
        formed = known.get(id(value)) if known is not None else None
        if formed is None:
            formed = _Formed(value)
            if known is not None:
                known[id(value)] = formed
        self.types |= {f"{place}{at}": tag for at, tag in formed.types.items()}
        self.parts += [(f"{place}{at}", content) for at, content in formed.parts]
        self.same |= {f"{place}{at}": text for at, text in formed.same.items()}
        self.codes |= formed.codes
        return formed.natural


class _Formed(Encoded):
    """An argument; objects are pickled only if the call is new.

    Calls that share it also share where its parts are stored.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        found = {at: _fingerprint(content) for at, content in self.parts}
        self.same = {at: text for at, (text, _) in found.items()}
        self.codes = {code for _, code in found.values() if code}

    def pickle(self, place: str, value: Any) -> None:
        self.part(place, "pickle", value)


def _fingerprint(content: Any) -> tuple[str, str]:
    """The fingerprints of a part; those of an array that cannot change are computed once."""
    at = id(content)
    if not _is_fixed(content):
        _fixed.pop(at, None)
        return fingerprint(content)
    if at not in _fixed:
        _fixed[at] = fingerprint(content)
        weakref.finalize(content, _fixed.pop, at, None).atexit = False
    return _fixed[at]


def _is_fixed(content: Any) -> bool:
    """Whether this is an array whose elements are read-only, also in what it is a view of."""
    np = sys.modules.get("numpy")
    if np is None or type(content) is not np.ndarray or content.dtype.hasobject:
        return False
    while type(content) is np.ndarray and not content.flags.writeable:
        content = content.base
    return content is None or type(content) is bytes


_fixed: dict[int, tuple[str, str]] = {}  # of arrays that exist, by their ids


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
