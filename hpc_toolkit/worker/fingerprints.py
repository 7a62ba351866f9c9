"""Fingerprints of functions and objects, which are the same each time that a script is started.

The bytes of a pickle are not: they depend on addresses, on the order of sets, and on what was
pickled before. A fingerprint has what can be compared: the code of functions of the user, what
it refers to, and the state of objects. A part that cannot be compared counts by its type alone.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir.pickles import dumps, reducers
from hpc_toolkit.worker.code import is_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, range, type(...)))
_MOST = 100_000
"""Most parts that are compared; what follows counts by its type."""
_DEEPEST = 200
_LENGTH = 16
_CACHED = type(lru_cache(len))
"""The type of functions with ``functools.lru_cache``."""


def fingerprint(value: object) -> str:
    """16 hexadecimal digits; equal for equal values, also in another process."""
    found = _Fingerprint()
    found.add(value)
    return found.text


def of_function(function: Any) -> tuple[str, str]:
    """The fingerprint of the code of a function, and of what it holds; "" if it holds nothing.

    A function holds the variables of an enclosing function, a method its object, and an object
    that can be called its state.
    """
    held: list[Any] = []
    if isinstance(function, MethodType):
        held.append(function.__self__)
        function = function.__func__
    found = _Fingerprint()
    if isinstance(function, FunctionType):
        found.add_code_of(function)
        held += function.__closure__ or ()
        held += [function.__defaults__] if "<locals>" in function.__qualname__ else []
    elif isinstance(function, (type, BuiltinFunctionType)):
        found.add(function)
    else:
        found.add(type(function))
        held.append(function)
    return found.text, fingerprint(held) if any(one is not None for one in held) else ""


def is_users(function: object) -> bool:
    """Whether a function or class has code of the user, and not of an installed package."""
    inner = getattr(function, "__wrapped__", function)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    code = getattr(inner, "__code__", None)
    # FunctionType has a descriptor of that name.
    file = code.co_filename if isinstance(code, CodeType) else getattr(module, "__file__", None)
    return not is_installed(file) if file else getattr(module, "__name__", "") == "__main__"


class _Fingerprint:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._depth = 0
        self._kept: list[object] = []  # or another object could get the address of one

    @property
    def text(self) -> str:
        return self._hash.hexdigest()[:_LENGTH]

    def _note(self, *words: object) -> None:
        self._hash.update("\0".join(map(str, words)).encode(errors="surrogatepass") + b"\1")

    def add(self, value: Any) -> None:
        kind = type(value)
        self._note(kind.__module__, kind.__qualname__)
        if kind is bytes:
            self._note(len(value))
            self._hash.update(value)
        elif kind in _PLAIN:
            self._note(repr(value))
        elif id(value) in self._seen:
            self._note(self._seen[id(value)])
        elif len(self._kept) < _MOST and self._depth < _DEEPEST:
            self._seen[id(value)] = len(self._kept)
            self._kept.append(value)
            self._depth += 1
            self._parts(value)
            self._depth -= 1
        else:
            self._pickle(value)

    def _pickle(self, value: Any) -> None:
        """Add a pickle of what is too large or deep: in doubt a call runs again."""
        with suppress(Exception):  # it cannot be pickled
            self._hash.update(dumps(value))

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)
        self._note("end")

    def _parts(self, value: Any) -> None:
        np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        add = _PARTS.get(type(value))
        if add is not None:
            add(self, value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, _CACHED):
            self.add(value.__wrapped__)
        elif np is not None and type(value) is np.ndarray and not value.dtype.hasobject:
            self._note(repr(value.dtype), value.shape)
            self._hash.update(np.ascontiguousarray(value).reshape(-1).view("u1").data)
        elif torch is not None and isinstance(value, torch.Tensor):
            self._tensor(value, torch)
        else:
            self._object(value)

    def _set(self, value: Any) -> None:
        members = []
        for one in value:
            member = _Fingerprint()
            # Each member begins with what is known before the set, which has no order.
            member._seen, member._kept = {**self._seen}, [*self._kept]
            member._depth = self._depth
            member.add(one)
            members.append(member.text)
        self._note(*sorted(members))

    def _dict(self, value: dict[Any, Any]) -> None:
        self._all(chain.from_iterable(value.items()))

    def _function(self, value: FunctionType) -> None:
        self.add_code_of(value)
        self._all((value.__defaults__, *(value.__closure__ or ())))

    def _method(self, value: MethodType) -> None:
        self._all((value.__self__, value.__func__))

    def _builtin(self, value: BuiltinFunctionType) -> None:
        own = value.__self__
        self._note(value.__qualname__, value.__module__)
        self._all(() if own is None or isinstance(own, (type, ModuleType)) else (own,))

    def add_code_of(self, function: FunctionType) -> None:
        """Add the code of a function and what it refers to, without what it holds."""
        self._note(function.__module__, function.__qualname__)
        if is_installed(function.__code__.co_filename):
            return  # the version of a package is not looked at
        self._code(function.__code__, function.__doc__)
        self._all((function.__kwdefaults__, vars(function)))
        names, known = sorted(set(_names(function.__code__))), function.__globals__
        for name in (name for name in names if name in known):
            self.add(known[name])
            if isinstance(module := known[name], ModuleType) and _is_users_module(module):
                self._all(vars(module)[one] for one in names if one in vars(module))
        if "<locals>" not in function.__qualname__:
            self.add(function.__defaults__)

    def _cell(self, cell: CellType) -> None:
        try:
            self.add(cell.cell_contents)
        except ValueError:
            self._note("not filled yet")

    def _code(self, code: CodeType, doc: str | None) -> None:
        arguments = code.co_argcount + code.co_kwonlyargcount
        self._note(code.co_code.hex(), code.co_flags, code.co_names, code.co_freevars)
        self._note(code.co_varnames[:arguments], code.co_posonlyargcount)
        self._note(code.co_exceptiontable.hex())
        self._all(one for one in code.co_consts if one is None or one != doc)

    def _class(self, kind: type) -> None:
        self._note(kind.__module__, kind.__qualname__)
        if is_users(kind):
            self._all(kind.__bases__)
            own = {name: one for name, one in vars(kind).items() if name not in _OF_EACH_CLASS}
            self._all(chain.from_iterable(sorted(own.items())))

    def _tensor(self, value: Any, torch: Any) -> None:
        there = value.detach().cpu()
        try:
            self._note(value.dtype, tuple(value.shape), value.requires_grad)
            self.add(there.contiguous().reshape(-1).view(torch.uint8).numpy())
        except (TypeError, RuntimeError):  # such as a sparse tensor
            self._pickle(value)

    def _object(self, value: Any) -> None:
        try:
            reducer = reducers().get(type(value))
            reduced = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - of methods of the user, or not made to be pickled
            return
        if isinstance(reduced, str | bytes):
            self._note(reduced)
            return
        for at, part in enumerate(reduced):
            # The members of a collection come as iterators.
            self._all(part) if at in (3, 4) and part is not None else self.add(part)


_PARTS: dict[type, Callable[[_Fingerprint, Any], None]] = {
    **dict.fromkeys((set, frozenset), _Fingerprint._set),
    **dict.fromkeys((list, tuple), _Fingerprint._all),
    dict: _Fingerprint._dict,
    ModuleType: lambda self, value: self._note(value.__name__),
    FunctionType: _Fingerprint._function,
    CellType: _Fingerprint._cell,
    CodeType: lambda self, value: self._code(value, None),
    MethodType: _Fingerprint._method,
    BuiltinFunctionType: _Fingerprint._builtin,
}
_OF_EACH_CLASS = frozenset(
    ("__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__")
)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


def _is_users_module(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not is_installed(file)
