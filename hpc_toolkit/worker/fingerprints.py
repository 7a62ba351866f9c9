"""Fingerprints of functions and objects, which are the same each time that a script is started.

The bytes of a pickle are not: they depend on addresses, on the order of sets, and on what was
pickled before. A fingerprint has what can be compared: the state of objects, and, separately, the
code of functions and classes of the user that they reach, with what that code refers to. A part
that cannot be compared counts by its type alone.
"""

from __future__ import annotations

import dis
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from zlib import crc32

from hpc_toolkit.rundir.pickles import dumps, reducers
from hpc_toolkit.worker.code import is_installed

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, range, type(...)))
_MOST = 100_000
"""Most parts that are compared; what follows counts by its type."""
_DEEPEST = 200
_LENGTH = 16
_LARGE, _PART = 1 << 20, 1 << 22
_digests: dict[tuple[int, int], tuple[list[int], bytes]] = {}
"""Address and length of large arrays -> checksums and digests of their parts."""
_MOST_DIGESTS = 100
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_CACHED = type(lru_cache(len))
"""The type of functions with ``functools.lru_cache``."""


def fingerprint(value: object) -> tuple[str, str]:
    """Fingerprints of a value, and of the code that it reaches, "" for none.

    16 hexadecimal digits each; equal for equal values and code, also in another process.
    """
    found = _Fingerprint(codes={})
    found.add(value)
    return found.text, found.text_of_codes


def of_function(function: Any) -> tuple[str, str, str]:
    """The fingerprints of a function's code, of what it holds, and of the code reached by that.

    A function holds the variables of an enclosing function, a method its object, and an object
    that can be called its state. "" if it holds nothing, or no code.
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
    is_empty = all(one is None for one in held)
    return found.text, *(("", "") if is_empty else fingerprint(held))


def is_users(function: object) -> bool:
    """Whether a function or class has code of the user, and not of an installed package."""
    inner = getattr(function, "__wrapped__", function)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    code = getattr(inner, "__code__", None)
    # FunctionType has a descriptor of that name.
    file = code.co_filename if isinstance(code, CodeType) else getattr(module, "__file__", None)
    return not is_installed(file) if file else getattr(module, "__name__", "") == "__main__"


class _Fingerprint:
    def __init__(self, codes: dict[int, tuple[Any, str]] | None = None) -> None:
        """``codes``: takes the code of functions and classes, by their ids; None: code counts."""
        self._hash, self._codes = hashlib.sha256(), codes
        self._seen: dict[int, int] = {}
        self._depth = 0
        self._kept: list[object] = []  # or another object could get the address of one

    @property
    def text(self) -> str:
        return self._hash.hexdigest()[:_LENGTH]

    @property
    def text_of_codes(self) -> str:
        # Sorted, because members of sets are reached in any order.
        codes = "".join(sorted({text for _, text in (self._codes or {}).values()}))
        return hashlib.sha256(codes.encode()).hexdigest()[:_LENGTH] if codes else ""

    def _is_apart(self, code: Any, add: Callable[[_Fingerprint, Any], None]) -> bool:
        """Whether code does not count here; then its own fingerprint is taken."""
        if self._codes is not None and id(code) not in self._codes:
            found = _Fingerprint()
            add(found, code)
            self._codes[id(code)] = code, found.text
        return self._codes is not None

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
        else:  # too large or deep: in doubt a call runs again
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
            self._hash.update(_digest(np.ascontiguousarray(value).reshape(-1).view("u1")))
        elif torch is not None and isinstance(value, torch.Tensor):
            self._tensor(value, torch)
        else:
            self._object(value)

    def _set(self, value: Any) -> None:
        # Each member begins with what is known before the set, which has no order.
        members, own, known = [], self._hash, len(self._kept)
        for one in value:
            self._hash = hashlib.sha256()
            self.add(one)
            members.append(self.text)
            for added in self._kept[known:]:
                del self._seen[id(added)]
            del self._kept[known:]
        self._hash = own
        self._note(*sorted(members))

    def _function(self, value: FunctionType) -> None:
        self._note(value.__module__, value.__qualname__)
        # Many functions may be called <lambda>: only their code distinguishes them.
        is_named = "<lambda>" not in value.__qualname__
        if is_users(value) and not (is_named and self._is_apart(value, _Fingerprint.add_code_of)):
            self.add_code_of(value)
        held = value.__closure__ or ()
        self._all((value.__defaults__, *held) if "<locals>" in value.__qualname__ else held)

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
        known = function.__globals__
        for name, *attributes in references(function.__code__):
            if name in known:
                self.add(found := known[name])
                for one in attributes:
                    if not (_is_users_module(found) and one in vars(found)):
                        break
                    self.add(found := vars(found)[one])
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
        if is_users(kind) and not self._is_apart(kind, _Fingerprint._class):
            self._all(kind.__bases__)
            own = {name: one for name, one in vars(kind).items() if not _MADE.match(name)}
            self._all(chain.from_iterable(sorted(own.items())))

    def _tensor(self, value: Any, torch: Any) -> None:
        there = value.detach().cpu()
        try:
            self._note(value.dtype, tuple(value.shape), value.requires_grad)
            self.add(there.contiguous().reshape(-1).view(torch.uint8).numpy())
        except (TypeError, RuntimeError):  # such as a sparse tensor
            self._object(value)

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
    dict: lambda self, value: self._all(chain.from_iterable(value.items())),
    ModuleType: lambda self, value: self._note(value.__name__),
    FunctionType: _Fingerprint._function,
    CellType: _Fingerprint._cell,
    CodeType: lambda self, value: self._code(value, None),
    MethodType: lambda self, value: self._all((value.__self__, value.__func__)),
    BuiltinFunctionType: _Fingerprint._builtin,
    TypeVar: lambda self, value: self._note(value.__name__),
    type(os.environ): lambda _self, _value: None,  # it differs from process to process
}
_MADE = re.compile(
    "__(doc|dict|weakref|firstlineno|static_attributes|pydantic_(?!fields__)[a-z_]+)__$"
)
"""Attributes that Python or pydantic makes of a class, some with addresses in them."""


@lru_cache(maxsize=1000)
def references(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that code reads, each with the attributes that it reads from it."""
    found: list[tuple[str, ...]] = []
    is_read = False
    for step in dis.get_instructions(code):
        if step.opname in _OF_GLOBALS:
            found.append((step.argval,))
            is_read = True
        elif is_read and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found[-1] += (step.argval,)
        elif step.opname != "EXTENDED_ARG":
            is_read = False
    inner = [
        one for const in code.co_consts if type(const) is CodeType for one in references(const)
    ]
    return tuple(sorted({*found, *inner}))


def _is_users_module(module: Any) -> bool:
    if not isinstance(module, ModuleType):
        return False
    # A package without __init__.py has only directories.
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return file is not None and not is_installed(file)


def _digest(data: Any) -> Any:
    """The bytes of an array, or a digest of many bytes.

    A digest is taken again only if a checksum differs from that of the bytes which were there
    before: many calls may share an array, and it may change between them.
    """
    if data.nbytes < _LARGE:
        return data.data
    parts = [data.data[at : at + _PART] for at in range(0, data.nbytes, _PART)]
    place = data.__array_interface__["data"][0], data.nbytes
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        sums = [*pool.map(crc32, parts)]
        if place not in _digests or _digests[place][0] != sums:
            if len(_digests) >= _MOST_DIGESTS:
                _digests.clear()
            digests = pool.map(lambda part: hashlib.sha256(part).digest(), parts)
            _digests[place] = sums, b"".join(digests)
    return _digests[place][1]
