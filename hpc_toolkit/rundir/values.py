"""Natural forms: the JSON that people expect of a value, and the types that JSON lacks.

``types`` maps places in the JSON (JSON Pointers, RFC 6901) to what Python had there, so that
:func:`restore` gives the value back. What is large or has no JSON form is kept elsewhere, in a
:mod:`value file <hpc_toolkit.rundir.valuefiles>`; its place in the JSON shows its type and size.
"""

from __future__ import annotations

import math
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

from hpc_toolkit.system.jsonlines import encode
from hpc_toolkit.system.quantities import format_size

STORED = frozenset(("npy", "torch", "bytes", "pickle"))
"""Types of what is in a value file."""
Types = dict[str, Any]
"""Place -> a word, or a list that begins with one and has what the type needs."""

MOST_DEPTH = 100
"""Deepest nesting of a natural form: readers of JSON have limits."""
_SMALL = 512
"""Most elements of an array in a natural form."""
_INLINE = 1 << 16
"""Most bytes of bytes or of an array in a natural form."""
_LONG_BITS = 14000
"""Numbers of more bits have too many digits for str()."""

_SEQUENCES = {kind.__name__: kind for kind in (tuple, set, frozenset)}
_BY_TEXT = {
    **dict.fromkeys(("datetime", "date", "time"), "datetime"),
    **dict.fromkeys(("PosixPath", "PurePosixPath", "PureWindowsPath"), "pathlib"),
    "complex": "builtins",
    "Decimal": "decimal",
    "Fraction": "fractions",
    "UUID": "uuid",
}
"""Classes whose natural form is a text -> the module that has them."""
_NOT_FINITE = frozenset(("nan", "inf", "-inf"))


class Forms:
    """Makes natural forms and notes their types; without a ``store``, only to show values.

    A store keeps parts of a value: by ``part(place, kind, content, ...)`` bytes, or an array for
    ``npy`` or ``torch``; by ``pickle(place, value)`` an object, which returns its size.
    """

    def __init__(self, types: Types, store: Any) -> None:
        self._types, self._store = types, store

    def form(self, value: Any, place: str = "", depth: int = 0) -> Any:
        """Raises RecursionError: the value is nested too deeply, or contains itself."""
        if depth > MOST_DEPTH:
            raise RecursionError
        return _FORMS.get(type(value), Forms._other)(self, value, place, depth)

    def _int(self, value: int, place: str, _depth: int) -> Any:
        if value.bit_length() <= _LONG_BITS:
            return value
        self._types[place] = "int"
        return hex(value)

    def _float(self, value: float, place: str, _depth: int) -> Any:
        if math.isfinite(value):
            return value
        self._types[place] = repr(value)
        return None

    def _sequence(self, value: Any, place: str, depth: int) -> Any:
        if type(value) is not list:
            self._types[place] = type(value).__name__
        if isinstance(value, set | frozenset):
            try:  # so that equal sets have equal forms
                value = sorted(value, key=_order)
            except TypeError:
                del self._types[place]
                return self._object(value, place, depth, sorted(map(natural, value), key=repr))
        return [self.form(one, f"{place}/{at}", depth + 1) for at, one in enumerate(value)]

    def _dict(self, value: dict[Any, Any], place: str, depth: int) -> Any:
        if not {str}.issuperset(map(type, value)):
            named = dict(zip(map(str, value), value.values(), strict=True))
            if len(named) < len(value) or any(" at 0x" in key for key in named):
                return self._object(value, place, depth, [*value.items()])
            if not all(type(key) in (str, int, bool, type(None)) for key in value):
                return self._object(value, place, depth, named)
            self._types[place] = ["dict", [*value]]
            value = named
        return {
            key: self.form(one, f"{place}{pointer(key)}", depth + 1) for key, one in value.items()
        }

    def _bytes(self, value: bytes, place: str, _depth: int) -> Any:
        if len(value) > _INLINE:
            if self._store is not None:
                self._store.part(place, "bytes", value)
            return described(value, len(value))
        self._types[place] = "bytes"
        return b64encode(value).decode()

    def _other(self, value: Any, place: str, depth: int) -> Any:
        kind, name = type(value), type(value).__name__
        np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if getattr(sys.modules.get(_BY_TEXT.get(name, "")), name, None) is kind:
            return self._text(value, place, depth)
        if np is not None and isinstance(value, np.generic):
            return self._scalar(value, place, depth)
        if np is not None and kind is np.ndarray and not value.dtype.hasobject:
            return self._array(value, place, value)
        if torch is not None and kind is getattr(torch, "Tensor", None) and not vars(value):
            return self._tensor(value, place, depth)
        if name == "timedelta" and kind is sys.modules["datetime"].timedelta:
            seconds = value.total_seconds()
            if kind(seconds=seconds) == value:
                self._types[place] = name
                return seconds
        return self._object(value, place, depth, _simpler(value))

    def _text(self, value: Any, place: str, depth: int) -> Any:
        name = type(value).__name__
        text = value.isoformat() if name == "datetime" else str(value)
        if repr(_from_text(name, text)) != repr(value):  # such as a named time zone
            return self._object(value, place, depth, text)
        self._types[place] = name
        return text

    def _scalar(self, value: Any, place: str, depth: int) -> Any:
        """A number or text of numpy, which keeps its type."""
        made = value.item() if value.dtype.kind in "biufU" else None
        if type(made) not in (bool, int, float, str):
            return self._object(value, place, depth, str(value))
        kind: Any = type(value)
        self._types[place] = _name_of(kind)
        if type(made) is float and not math.isfinite(made):
            self._types[place] += f" {made!r}"
            return None
        return made

    def _array(self, array: Any, place: str, value: Any, *tensor: Any) -> Any:
        """An array, or the array of the numbers of a ``tensor``: its dtype, True for a gradient."""
        kind, small = array.dtype.kind, array.size <= _SMALL and array.nbytes <= _INLINE
        if small and (kind in "biU" or (kind == "f" and array.itemsize <= 8)):
            shown = value.tolist()
            if kind != "f" or sys.modules["numpy"].isfinite(array).all():
                what = ["tensor", tensor[0]] if tensor else ["array", array.dtype.str]
                self._types[place] = [*what, list(array.shape), *tensor[1:]]
                return shown
        if self._store is not None:
            self._store.part(place, *(("torch", array, *tensor) if tensor else ("npy", array)))
        if small and kind in "fcM":
            return Forms({}, None).form(
                array.astype(str).tolist() if kind == "M" else value.tolist()
            )
        return described(value, array.nbytes)

    def _tensor(self, value: Any, place: str, depth: int) -> Any:
        there, dtype = value.detach().cpu(), str(value.dtype).removeprefix("torch.")
        try:
            there = there.resolve_conj().resolve_neg()
            # numpy lacks bfloat16: its bytes are those of int16.
            narrow = there.view(sys.modules["torch"].int16) if dtype == "bfloat16" else there
            array = narrow.numpy()
        except (TypeError, RuntimeError):  # such as a sparse tensor
            return self._object(there, place, depth, None)
        if narrow is not there and not there.isfinite().all():
            return self._object(there, place, depth, None)
        return self._array(array, place, there, dtype, *[True] * value.requires_grad)

    def _object(self, value: Any, place: str, depth: int, shown: Any) -> Any:
        """An object that is pickled; ``shown`` is a simpler value that shows it, or None."""
        size = None if self._store is None else self._store.pickle(place, value)
        if shown is not None:
            with suppress(Exception):  # of methods of the user, or too deep
                form = Forms({}, None).form(shown, "", depth + 1)
                if size is None or size <= _INLINE or len(encode(form)) <= _INLINE:
                    return form
        return described(value, size)


def _order(member: Any) -> Any:
    """Where a member comes in the order of a set. TypeError: its type has no place in it."""
    kind = type(member)
    if kind in (int, bool) or (kind is float and not math.isnan(member)):
        return "", member
    if kind in (str, bytes, float, type(None)) or (
        getattr(sys.modules.get(_BY_TEXT.get(kind.__name__, "")), kind.__name__, None) is kind
    ):
        return kind.__name__, member if kind in (str, bytes) else repr(member)
    if kind not in (tuple, frozenset):
        raise TypeError
    members = [*map(_order, member)]
    return kind.__name__, members if kind is tuple else sorted(members)


_FORMS: dict[type, Callable[[Forms, Any, str, int], Any]] = {
    **dict.fromkeys((str, bool, type(None)), lambda _forms, value, _place, _depth: value),
    **dict.fromkeys((list, *_SEQUENCES.values()), Forms._sequence),
    int: Forms._int,
    float: Forms._float,
    dict: Forms._dict,
    bytes: Forms._bytes,
}


@cache
def _name_of(kind: type) -> str:
    """The type of numbers or texts of numpy; asking numpy takes half of the time of a value."""
    return f"numpy.{'str' if issubclass(kind, str) else sys.modules['numpy'].dtype(kind).name}"


def natural(value: Any) -> Any:
    """The natural form of a value, to show it or to compare it."""
    try:
        return Forms({}, None).form(value)
    except Exception:  # noqa: BLE001 - of methods of the user, or too deep
        return described(value, None)


def _simpler(value: Any) -> Any:
    """A value of simpler types that shows an object; None if there is none."""
    with suppress(Exception):  # of methods of the user
        kind = type(value)
        if hasattr(kind, "__dataclass_fields__"):
            return {one: getattr(value, one) for one in kind.__dataclass_fields__}
        if hasattr(kind, "_asdict"):  # a named tuple
            return value._asdict()
        if isinstance(value, Enum | str):
            return value.value if isinstance(value, Enum) else str.__str__(value)
        for simple in (int, float, dict, list, tuple, set, frozenset):
            if issubclass(kind, simple):
                return simple(value)
        if hasattr(kind, "__fspath__") or hasattr(kind, "isoformat"):
            return str(value)
    return None


def described(value: Any, size: int | None) -> str:
    """An object's type, shape and size, such as "<pandas.DataFrame (3, 2), 1.2 KiB>"."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    name = kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"
    with suppress(Exception):  # of methods of the user
        name += f" {value.dtype}" if hasattr(value, "dtype") else ""
        name += f" {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"<{name}>" if size is None else f"<{name}, {format_size(size)}>"


def restore(value: Any, types: Types, stored: Callable[[Any], Any]) -> Any:
    """The value whose natural form and types these are; ``value`` is changed.

    ``stored`` reads what is in a value file.
    """
    holder = [value]
    for place in sorted(types, key=lambda place: -place.count("/")):
        parent: Any = holder
        *path, last = ["0", *steps(place)]
        for key in path:
            parent = parent[int(key) if isinstance(parent, list) else key]
        at: Any = int(last) if isinstance(parent, list) else last
        tag = types[place]
        parent[at] = stored(tag) if tag[0] in STORED else made(tag, parent[at])
    return holder[0]


def pointer(key: str) -> str:
    """A step of a JSON Pointer."""
    return f"/{key.replace('~', '~0').replace('/', '~1')}"


def steps(place: str) -> list[str]:
    """The keys of a JSON Pointer."""
    return [one.replace("~1", "/").replace("~0", "~") for one in place.split("/")[1:]]


def made(tag: Any, form: Any) -> Any:
    """What Python had in the place of a natural form that tells all."""
    if isinstance(tag, str):
        if tag in _MADE or tag in _BY_TEXT:
            return _MADE[tag](form) if tag in _MADE else _from_text(tag, form)
        import numpy as np

        name, _, number = tag.removeprefix("numpy.").partition(" ")
        return np.dtype(name).type(number or form)
    kind, *more = tag
    if kind == "dict":
        return dict(zip(more[0], form.values(), strict=True))
    if kind == "array":
        import numpy as np

        return np.array(form, dtype=more[0]).reshape(more[1])
    import torch

    found = torch.tensor(form, dtype=getattr(torch, more[0])).reshape(more[1])
    return found.requires_grad_() if more[2:] else found


_MADE: dict[str, Callable[[Any], Any]] = {
    **_SEQUENCES,
    **{word: lambda _, word=word: float(word) for word in _NOT_FINITE},  # type: ignore[misc]
    "int": lambda text: int(text, 16),
    "bytes": b64decode,
    "timedelta": lambda seconds: import_module("datetime").timedelta(seconds=seconds),
}


def _from_text(name: str, text: str) -> Any:
    kind = getattr(import_module(_BY_TEXT[name]), name)
    return kind.fromisoformat(text) if _BY_TEXT[name] == "datetime" else kind(text)


def not_finite(types: Types) -> dict[str, float]:
    """The places that have NaN or an infinity, and which of them."""
    words = ((place, tag.split(" ")[-1]) for place, tag in types.items() if isinstance(tag, str))
    return {place: float(word) for place, word in words if word in _NOT_FINITE}
