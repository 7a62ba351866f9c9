"""Lists of items as users give them: counts, grids and JSON lines; the types of their values."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, ItemsError, near_miss
from hpc_toolkit.system.jsonlines import batches, decode_each, decoder, encode, unique
from hpc_toolkit.system.quantities import parse_range

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item

MOST_ITEMS = 10_000_000
"""More items than this in a count or a grid are taken for a mistake."""


_HINT = 'write one object a line, such as {"seed": 1}'
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_WITH_COMMA = re.compile(
    r"""(?:^|,)\s*("[^",]+,[^"]*[^",]"|'[^',]+,[^']*[^',]'|\[[^],]+,[^]]*\])\s*(?:,|$)"""
)
"""A text in quotes, or a list, in the values of an option."""


class Written(float):
    """A number whose text differs from what Python writes, such as 3.10 or 1e5."""

    text: str


def read_float(text: str) -> float:
    """The number, which keeps its text if Python would write it in another way."""
    number = float(text)
    if repr(number) != text:
        number = Written(number)
        number.text = text
    return number


_decode = decoder(parse_float=read_float).decode
_decode_unique = decoder(parse_float=read_float, object_pairs_hook=unique).decode


def parse_items(lines: Iterable[bytes], *, source: str) -> Iterator[Item]:
    """Parse JSON lines; blank lines are skipped. An ItemsError names the line."""
    first = 1
    for some in batches(lines):
        try:
            items = decode_each(some, _decode)
            # With one colon for each key of the items, no key was there twice.
            if b"".join(some).count(b":") != sum(map(len, items)):
                items = decode_each(some, _decode_unique)
        except (TypeError, ValueError, RecursionError):
            items = []
        if items and {dict}.issuperset(map(type, items)):
            yield from items
        else:
            numbered = ((number, line) for number, line in enumerate(some, first) if line.strip())
            yield from (_parse_item(line, f"{source}, line {number}") for number, line in numbered)
        first += len(some)


def _parse_item(line: bytes, where: str) -> Item:
    try:
        # Without its newline, or an error at the end would be reported on the next line.
        item = parse_json(line.rstrip(b"\r\n"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError) or b"\0" in line:
            raise not_utf8(line, where.partition(",")[0], where) from error
        at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ItemsError(f"{where}{at}: {fault(error)}", hint=_HINT) from error
    if not isinstance(item, dict):
        raise ItemsError(f"{where}: not a JSON object but {type(item).__name__}", hint=_HINT)
    return item


def fault(error: Exception) -> str:
    """The message of an exception of :func:`parse_json`."""
    return f"{'' if type(error) is ValueError else 'not JSON: '}{getattr(error, 'msg', error)}"


def parse_json(line: bytes) -> Any:
    """Like ``json.loads``, but refuse repeated keys, NaN and infinities; keep a number's text."""
    return _decode_unique(line.decode(json.detect_encoding(line), "surrogatepass"))


def not_utf8(start: bytes, source: str, where: str) -> ItemsError:
    """The error about text that is not UTF-8; ``start`` is the beginning of the text."""
    encoding = "UTF-16" if start[:2] in _UTF_16 or b"\0" in start[:2] else "LATIN1"
    message = f"{where}: not UTF-8 but maybe {encoding}"
    return ItemsError(message, hint=f"convert it: iconv -f {encoding} -t UTF-8 {source} > NEW_FILE")


def counted(count: int, key: str) -> Iterator[Item]:
    """Items whose only ``key`` is 0 to ``count`` - 1. Raises ConfigError."""
    if not 1 <= count <= MOST_ITEMS:
        raise ConfigError(f"--count: {count} items", hint=f"write a number from 1 to {MOST_ITEMS}")
    return ({key: number} for number in range(count))


def grid(axes: Iterable[str], text: Collection[str] = ()) -> Iterator[Item]:
    """Items for every combination of the values of ``NAME=VALUES``; the last name varies fastest.

    VALUES are words and ranges FIRST:LAST[:STRIDE] of whole numbers, separated by commas; a range
    includes its last number. See :func:`typed` for the types of words; the values of names in
    ``text`` are text as written. Raises ConfigError: an axis has no name, no values or the name of
    another.
    """
    values: dict[str, list[Any]] = {}
    for axis in axes:
        name, equals, given = axis.partition("=")
        if not name or not equals:
            message = f"--grid: {axis!r} is not NAME=VALUES"
            raise ConfigError(message, hint="such as --grid lr=0.1,0.01 --grid seed=0:9")
        if name in values:
            message = f"--grid: {name} is given twice"
            raise ConfigError(message, hint="list all values of a name in one --grid")
        is_text = name in text
        values[name] = given.split(",") if is_text else parse_values(given, f"--grid {name}")
    return combinations(values, "--grid")


def combinations(values: Mapping[str, Sequence[Any]], where: str) -> Iterator[Item]:
    """Items for every combination; the last name varies fastest. Raises ConfigError: too many."""
    total = math.prod(map(len, values.values()))
    if total > MOST_ITEMS:
        message = f"{where}: {total} combinations"
        raise ConfigError(message, hint=f"use fewer values: at most {MOST_ITEMS} items")
    return (dict(zip(values, one, strict=True)) for one in itertools.product(*values.values()))


def parse_values(text: str, where: str) -> list[Any]:
    """Parse words and ranges, separated by commas, as one column. Raises ConfigError."""
    if cut := _WITH_COMMA.search(text):
        message = f"{where}: {cut[1]!r} would be split at its comma"
        raise ConfigError(
            message, hint="write texts with commas as a list into a file for --config"
        )
    values = list(itertools.chain(*(_values(part, where) for part in text.split(","))))
    return values if all(type(one) is int for one in values) else typed(list(map(str, values)))


def _values(text: str, where: str) -> Sequence[Any]:
    text = text.strip()
    if not text:
        raise ConfigError(f"{where}: a value is empty", hint="separate values by single commas")
    words = text.split(":")
    if len(words) > 1 and all(map(_is_whole, words)):
        numbers = parse_range(text, where=where)
        if len(numbers) > MOST_ITEMS:
            message = f"{where}: {text} has {len(numbers)} values"
            raise ConfigError(message, hint=f"use at most {MOST_ITEMS} values")
        return numbers
    if _is_like_range(words):
        message = f"{where}: {text!r} is not a range of whole numbers"
        hint = "a range is 0:9 or 0:100:10; write other values as a list into a file for --config"
        raise ConfigError(message, hint=hint)
    return [text]


def _is_like_range(words: list[str]) -> bool:
    """Whether numbers are between colons, or before or after one, and not all are digits."""
    if 2 <= len(words) <= 3 and any(words[:2]) and not all(map(str.isdecimal, words)):
        with suppress(ValueError):
            return bool([float(word) for word in words if word])
    return False


def _is_whole(word: str) -> bool:
    """Whether a word is a whole number as Python writes it: 00:30 is a time and not a range."""
    digits = word.strip().removeprefix("-")
    return digits.isascii() and digits.isdecimal() and (digits == "0" or digits[0] != "0")


def typed(cells: list[str]) -> list[Any]:
    """The values of one column of texts.

    They are numbers, or true and false, if JSON writes all of these values exactly as the texts;
    otherwise all stay text, so that 1.10 and 007 are kept as written.
    """
    written = f"[{','.join(cells)}]"
    try:
        values: list[Any] = _decode(written)
        kept = encode(values) == written and len(values) == len(cells)
    except (ValueError, RecursionError):
        return cells
    kinds = set(map(type, values))
    return values if kept and (kinds <= {int, float} or kinds == {bool}) else cells


def as_written(items: Iterable[Item]) -> Iterator[Item]:
    """Items for a command, with each number as it was written in the list."""
    for item in items:
        yield {key: getattr(value, "text", value) for key, value in item.items()}


def forced(items: Iterable[Item], kinds: Mapping[str, str]) -> Iterator[Item]:
    """Items whose values of these keys are ``text`` or ``number``.

    Raises ItemsError: a value is not a number. ConfigError: no item has a key.
    """
    missing = set(kinds)
    for number, item in enumerate(items):
        for key in kinds.keys() & item.keys():
            missing.discard(key)
            item[key] = _forced(item[key], kinds[key], f"item {number}: {key}")
        yield item
    for key in missing:
        message = f"no item has the key {key!r}, which --{kinds[key]} names"
        raise ConfigError(message, hint=near_miss(key, list(item)))


def _forced(value: Any, kind: str, where: str) -> Any:
    if kind == "text":
        return value if isinstance(value, str) else getattr(value, "text", None) or encode(value)
    found = value
    if isinstance(value, str) and value.isascii() and "_" not in value:
        with suppress(ValueError):
            found = read_float(value)
            found = int(value)
    if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
        return found
    message = f"{where} is {value!r:.80}, which is not a number"
    raise ItemsError(message, hint="leave out --number for this key, or fix the value")


_NAMES = {str: "text", **dict.fromkeys((int, float, Written), "numbers"), bool: "booleans"}


class Types:
    """Notes the types of the values of items, for a line about them."""

    def __init__(self) -> None:
        self._of: dict[str, dict[type, None]] = {}

    def note(self, items: Iterable[Item]) -> Iterator[Item]:
        for some in batches(items):
            are_alike = len(set(map(tuple, some))) == 1
            for alike in [some] if are_alike else [[item] for item in some]:
                for key in alike[0]:
                    types = map(type, map(itemgetter(key), alike))
                    self._of.setdefault(key, {}).update(dict.fromkeys(types))
            yield from some

    def __str__(self) -> str:
        """Such as "numbers: lr, depth; text: python"."""
        keys: dict[str, list[str]] = {}
        for key, types in self._of.items():
            names = dict.fromkeys(_NAMES.get(kind, "JSON") for kind in types)
            keys.setdefault(" or ".join(names), []).append(key)
        return "; ".join(f"{names}: {', '.join(some)}" for names, some in keys.items())
