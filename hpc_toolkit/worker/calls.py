"""Calls of functions as items: how an executor writes them, and the workload that makes them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import CallError, ConfigError, RunError
from hpc_toolkit.rundir.layout import WorkloadSpec
from hpc_toolkit.rundir.values import Forms
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.worker.attempts import WORLD
from hpc_toolkit.worker.code import CALLS, code_file
from hpc_toolkit.worker.loading import load_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.rundir.valuefiles import Values

WORKLOAD = CALLS
_SHOWN = 200


class Calls:
    """The workload: it imports the function that an item names, and calls it."""

    importing = False
    """Whether this process is importing a user's function."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: None, items: Iterable[Item]) -> Iterator[Any]:
        for item in items:
            function = self._function(item["function"])
            yield function(*item["args"], **item.get("kwargs", {}))

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            Calls.importing = True
            try:
                self._functions[name] = load_object(name, ())
            finally:
                Calls.importing = False
            WORLD.keep()  # a script may change the directory when it is imported
        return self._functions[name]


def unfold(function: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call without the ``functools.partial`` that holds a part of its arguments."""
    while type(function) is partial:  # a subclass may do something else
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    return function, args, kwargs


def item_of(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Item:
    """The item of a call. Raises ConfigError: an argument is not JSON; the message names it."""
    given = {**{f"argument {at}": one for at, one in enumerate(args, 1)}, **kwargs}
    # What the worker gets: a tuple becomes a list here already, and numpy's numbers plain ones.
    made = {name: _argument(f"{function}: {name}", value) for name, value in given.items()}
    item: Item = {"function": function, "args": [*made.values()][: len(args)]}
    return item | ({"kwargs": {name: made[name] for name in kwargs}} if kwargs else {})


class _Noted(dict[str, Any]):
    """The types of an argument, and of its parts that only a value file could hold."""

    def part(self, place: str, kind: str, *_more: Any) -> None:
        self[place] = {"npy": "array", "torch": "tensor"}.get(kind, kind)

    def pickle(self, place: str, value: Any) -> int:
        if not isinstance(value, str | int | float):  # of a subclass, which becomes plain
            self[place] = type(value).__name__
        return 0


def _argument(where: str, value: Any) -> Any:
    """An argument as JSON. ConfigError: the function would get something else."""
    types, form = _Noted(), None
    try:
        form = Forms(types, types).form(value)
    except RecursionError:
        types = _Noted({"": f"{type(value).__name__} that is nested too deeply"})
    for place, tag in types.items():
        if isinstance(tag, str):  # JSON has nearly the same as a tuple, and as a number of numpy
            is_close = tag == "tuple" or (tag.startswith("numpy.") and " " not in tag)
        else:
            is_close = tag[0] in ("array", "tensor") and not tag[2]
        if not is_close:
            keys = " with keys that are not text" if tag[0] == "dict" else ""
            what = tag if isinstance(tag, str) else tag[0]
            message = f"{where}{place} is of type {what!r}{keys}, which JSON does not have"
            hint = "pass numbers, text, lists and dicts; for anything else, the name of a file"
            raise ConfigError(message, hint=hint)
    return form


def settle(future: Future[Any], row: dict[str, Any], values: Values) -> None:
    """End a call's future as its row says."""
    if row["state"] == "done":
        try:
            result = values.restored({**row})["value"]
        except RunError as refusal:
            future.set_exception(refusal)
        else:
            future.set_result(result)
        return
    item, error, attempts = row["item"], row["error"], row["attempts"]
    message = f"{shown(item)} failed after {counted(attempts, 'attempt')}: {error}"
    hint = f"'hpctk status {values.root}' shows where; fix the cause, 'hpctk retry {values.root}', "
    hint += "and start the script again"
    future.set_exception(CallError(message, hint=hint, item=item, error=error, attempts=attempts))


def shown(item: Item) -> str:
    """A call as Python writes it, shortened."""
    words = [repr(one) for one in item["args"]]
    words += [f"{key}={one!r}" for key, one in item.get("kwargs", {}).items()]
    inside = ", ".join(words)
    short = inside if len(inside) <= _SHOWN else f"{inside[:_SHOWN]}..."
    return f"{item['function']}({short})"


def code_path() -> tuple[str, ...]:
    """Directories from which workers import functions, in the order of this process.

    That of a script comes first, and the current one only if the script could import from it.
    """
    main, here = sys.modules["__main__"], str(Path.cwd())
    file = getattr(main, "__file__", None) if main.__spec__ is None else None
    own = (str(Path(file).resolve().parent),) if file is not None else ()
    is_program = file is None or not file.endswith(".py")  # such as a notebook, or pytest
    return tuple(dict.fromkeys((*own, *([here] if is_program or here in sys.path else ()))))


def name_of(function: object, path: tuple[str, ...]) -> str:
    """The ``module:name`` by which workers import a function, from the directories ``path``.

    Raises ConfigError: it has no such name.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if not callable(function) or not isinstance(module, str) or not isinstance(name, str):
        message = f"{function!r:.200} is not a function with a name, so workers cannot import it"
        hint = "pass a function of a module, and its arguments to submit()"
        raise ConfigError(message, hint=hint)
    known = getattr(sys.modules.get(module), name, None)
    if known is not function:
        message = f"workers cannot import {name} from module {module!r}"
        hint = "define it with 'def' at the top level of a module; pass what it needs as arguments"
        if known is not None:
            hint = f"the module has another {name} now: import it again"
        raise ConfigError(message, hint=hint)
    return f"{_script_module(name, path) if module == '__main__' else module}:{name}"


def _script_module(name: str, path: tuple[str, ...]) -> str:
    """The name under which workers import the script that is running."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)  # python -m NAME
    if file is None:
        message = f"workers cannot import {name}: it is defined in a notebook or a shell"
        raise ConfigError(message, hint=f"write it to a file: 'from work import {name}'")
    module, script = Path(file).stem, Path(file).resolve()
    found = code_file(WorkloadSpec(function=f"{module}:{name}", path=path))
    if module.isidentifier() and found is not None and found.resolve() == script:
        return module
    message = f"workers cannot import {name} from {file}"
    where = f"'import {module}' finds {found}" if found else f"{module!r} is not a module's name"
    hint = f"{where}; move {name} to a module beside the script, and import it"
    raise ConfigError(message, hint=hint)
