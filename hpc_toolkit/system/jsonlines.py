"""Strict JSON, and many short texts in one call: one by one takes two to three times as long."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from typing import Any, TypeVar

T = TypeVar("T")

AT_ONCE = 256
"""Texts of one call: few enough to stay in the processor's cache."""

_MARK = int.from_bytes(os.urandom(7)) + 10**17
"""Stands between two values. Nobody can know it, so no text can contain it, whatever it says."""
_SEPARATOR = b",%d," % _MARK

_TOO_DEEP = "it is nested too deeply, or contains itself"
_PLAIN = frozenset([str, int, float, bool, type(None)])


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON, but null is")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. ValueError: it has a key twice, of which Python would keep the last."""
    found = dict(pairs)
    for key in found if len(found) < len(pairs) else ():
        if len(values := [value for name, value in pairs if name == key]) > 1:
            raise ValueError(f"it has the key {key!r} {len(values)} times: {values!r:.80}")
    return found


# Made once: with options, ``json.loads`` and ``json.dumps`` make a new coder for each call.
decoder = partial(json.JSONDecoder, parse_constant=_refuse_constant)
"""Makes a decoder that rejects constants that JSON does not have."""
_DECODER = decoder()
decode = _DECODER.decode
"""Like ``json.loads`` of text, but reject constants that JSON does not have, such as NaN."""
raw_decode = _DECODER.raw_decode
"""As :data:`decode` of text that begins with JSON; also returns where that ends."""


def _refuse(value: object) -> object:
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


# json.JSONEncoder makes one for each call, which takes as long as to encode a small result.
_CHUNKS = c_make_encoder(
    None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, False
)


def encode(value: Any) -> str:
    """Encode a value as compact ASCII.

    Raises ValueError: a number is not finite, or the value is too deep or contains itself;
    TypeError: not JSON.
    """
    try:
        return "".join(_CHUNKS(value, 0))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def not_json(item: dict[str, Any]) -> str:
    """Which value of an item JSON does not have, and why; "" if none."""
    for key, value in item.items():
        try:
            encode(value)
        except (TypeError, ValueError) as error:
            return f"{key!r} is {value}" if isinstance(value, float) else f"{key!r}: {error}"
    return ""


def is_kept(value: Any) -> bool:
    """Whether all keys of a value are text. ValueError: it is too deep, or contains itself."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return False
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return True
    try:
        return _PLAIN.issuperset(map(type, value)) or all(map(is_kept, value))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def is_plain(value: Any) -> bool:
    """Whether JSON keeps a value as it is, if its numbers are finite. RecursionError: too deep."""
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str:
                return False
        value = value.values()
    elif kind is not list:
        return kind in _PLAIN
    return _PLAIN.issuperset(map(type, value)) or all(map(is_plain, value))


def decode_each(texts: Sequence[bytes], decode: Callable[[str], Any] = decode) -> list[Any]:
    """Decode texts that are one JSON value each.

    Raises ValueError or RecursionError if one of them is not; which one, :func:`decode` tells.
    """
    found = decode((b"[%s]" % _SEPARATOR.join(texts)).decode()) if texts else []
    # With a mark between any two values, no text is a part of a value, or more than one.
    if len(found) != max(0, 2 * len(texts) - 1) or found[1::2] != [_MARK] * (len(texts) - 1):
        raise ValueError("a text is not one JSON value")
    return found[::2]


def encode_each(values: Sequence[Any]) -> list[bytes]:
    """What :func:`encode` makes of each value. Raises as it does."""
    marked = [_MARK] * max(0, 2 * len(values) - 1)
    marked[::2] = values
    return encode(marked)[1:-1].encode().split(_SEPARATOR) if values else []


@contextmanager
def without_collections() -> Iterator[None]:
    """Do not look for cycles in memory: JSON has none, and it takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def batches(values: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(values)
    while some := list(islice(rest, AT_ONCE)):
        yield some
