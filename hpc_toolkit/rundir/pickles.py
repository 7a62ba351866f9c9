"""Pickles of results, arguments, functions and exceptions, by cloudpickle.

Loading one runs code, so only runs are read whose code this user may execute.
"""

from __future__ import annotations

import copyreg
import io
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any

from hpc_toolkit.errors import PermanentError, RunError, describe

_MOST_PARTS = 8
"""Levels of attributes that are searched for a part that cannot be pickled."""
_LARGEST_EXCEPTION = 1 << 24


class UnstorableError(PermanentError):
    """A result cannot be stored in any form; its item fails and is not retried."""


class UnrestoredError(RunError):
    """A value or an exception that a run has stored cannot be made again here."""


def exception_bytes(error: BaseException, trace: str) -> bytes:
    """The pickle of an exception and its traceback; b"" if it is too large.

    Raises what the methods of the exception raise: it cannot be pickled.
    """
    data = dumps((error, trace))
    try:
        loads(data)
    except Exception:  # noqa: BLE001 - of methods of the user, such as __init__ with other arguments
        data = dumps((_Bare(error), trace))
    return data if len(data) <= _LARGEST_EXCEPTION else b""


class _Bare:
    """Pickles as an exception that is made without a call of its ``__init__``."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        return _exception_of, (type(self._error), self._error.args, vars(self._error))


def _exception_of(kind: type[BaseException], args: Any, fields: dict[str, Any]) -> BaseException:
    found = kind.__new__(kind, *args)
    vars(found).update(fields)
    return found


@cache
def _pickler() -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc] # without types
        """Moves tensors to the CPU: the process that reads them may have no GPU."""

        def reducer_override(self, part: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(part, torch.Tensor) and part.device.type != "cpu":
                there = part.detach().cpu()
                if isinstance(part, torch.nn.Parameter):
                    there = torch.nn.Parameter(there, part.requires_grad)
                return there.__reduce_ex__(4)
            found = super().reducer_override(part)
            if isinstance(part, type) and type(found) is tuple and len(found[1]) > 3:
                fields = found[1][3]
                if isinstance(fields, dict):  # of a class that is not an enumeration
                    fields["__qualname__"] = part.__qualname__
                    # Without them, the state of its objects would need a __dict__.
                    fields |= (
                        {"__slots__": vars(part)["__slots__"]} if "__slots__" in vars(part) else {}
                    )
            return found

    return Pickler


@cache
def reducers() -> Mapping[type, Any]:
    """How objects of types are pickled that do not say it themselves, such as patterns."""
    import cloudpickle

    return ChainMap(cloudpickle.Pickler.dispatch_table, copyreg.dispatch_table)


def dumps(value: Any) -> bytes:
    """The bytes of a pickle. Raises what the methods of the value raise."""
    out = io.BytesIO()
    _pickler()(out).dump(value)
    return out.getvalue()


def loads(data: bytes, *, own: bool = False) -> Any:
    """Unpickle what is in a run that is trusted.

    ``own``: objects of classes of ``__main__`` become objects of this process's classes of the
    same name, as if these could be imported. A script that is started again expects them.
    """
    import pickle  # noqa: TID251 - see above

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            named = _NAMED.get(name) if module == "cloudpickle.cloudpickle" else None
            if named is None:
                return found
            return lambda *given: _own_class(*named(*given)) or found(*given)

    return Unpickler(io.BytesIO(data)).load() if own else pickle.loads(data)  # noqa: S301 - see above


def _own_class(name: str, module: str) -> type | None:
    found = getattr(sys.modules["__main__"], name, None) if module == "__main__" else None
    return found if isinstance(found, type) else None


_NAMED: dict[str, Callable[..., tuple[str, str]]] = {
    "_make_skeleton_class": lambda _kind, name, _bases, fields, *_: (
        fields.get("__qualname__", name),
        fields.get("__module__", ""),
    ),
    "_make_skeleton_enum": lambda _bases, _name, qualname, _members, module, *_: (qualname, module),
    "_class_setstate": lambda kind, _state: (kind.__qualname__, kind.__module__),
}
"""Functions by which cloudpickle makes or fills a class -> its name and module, by what they get.
"""


def refusal(value: Any, where: str, depth: int = 0) -> UnstorableError:
    """The error that names the innermost part of an object that cannot be pickled."""
    try:
        dumps(value)
        what = "could not be stored at first, and then it could"
    except Exception as error:  # noqa: BLE001 - of methods of the user
        what = f"cannot be stored: {describe(error)}"
    if "recursion" in what:
        return UnstorableError(f"{where} is nested too deeply to be stored")
    with suppress(Exception):  # of methods of the user
        for name, part in _parts_of(value, where) if depth < _MOST_PARTS else ():
            try:
                dumps(part)
            except Exception:  # noqa: BLE001 - of methods of the user
                return refusal(part, name, depth + 1)
    hint = "leave it out of the result, or give its class a __getstate__ that does"
    return UnstorableError(f"{where} is a {type(value).__name__}, which {what}", hint=hint)


def _parts_of(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{where}[{key!r:.40}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{where}[{at}]", one) for at, one in enumerate(value))
    elif isinstance(value, FunctionType):
        code, known = value.__code__, value.__globals__
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        found = {name: known[name] for name in code.co_names if name in known}
        found |= {name: cell.cell_contents for name, cell in cells}
        yield from ((f"{name!r} in {where}", one) for name, one in found.items())
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        yield from ((f"{where}.{name}", one) for name, one in vars(value).items())
