"""Files with one array for each column, which keep the types of numbers: npz and Parquet."""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir.values import natural
from hpc_toolkit.system.installation import how_to_add

if TYPE_CHECKING:
    from collections.abc import Iterator

_ABSENT = type(None)
_MOST_DEPTH = 20


def _text(value: Any) -> str | None:
    """A cell of a column of text."""
    shown = natural(value)
    if isinstance(shown, str | None):
        return shown
    return str(shown) if isinstance(shown, int | float) else json.dumps(shown)


def npz_of(columns: dict[str, list[Any]]) -> bytes:
    """An npz with these columns, which numpy reads without pickle."""
    import numpy as np

    buffer = io.BytesIO()
    # np.savez takes names as keyword arguments, so a column could not be called "file".
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for column, values in columns.items():
            for name, array in _members(column, values):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    return buffer.getvalue()


def _members(name: str, values: list[Any]) -> Iterator[tuple[str, Any]]:
    """The arrays that keep a column: one, or one for each row with an array."""
    import numpy as np

    kinds = {type(value) for value in values}
    if np.ndarray not in kinds or not kinds <= {np.ndarray, _ABSENT}:
        yield name, _array(values, kinds)
    elif len(kinds) == 1 and len({(one.dtype, one.shape) for one in values}) == 1:
        yield name, np.stack(values)
    else:
        arrays = ((at, one) for at, one in enumerate(values) if one is not None)
        yield from ((f"{name}[{at}]", one) for at, one in arrays)


def _array(values: list[Any], kinds: set[type]) -> Any:
    """An array that keeps all of these cells: of a type of numbers if one does, else of text."""
    import numpy as np

    (known, *other) = kinds - {_ABSENT} or {_ABSENT}
    is_float = issubclass(known, np.floating)
    if issubclass(known, np.generic) and not other and (is_float or _ABSENT not in kinds):
        return np.array(values, dtype=known)  # of absent values NaN
    values = [natural(value) for value in values]
    kinds = set(map(type, values))
    for integer in (np.int64, np.uint64):
        limits = np.iinfo(integer)
        if kinds == {int} and limits.min <= min(values) and max(values) <= limits.max:
            return np.array(values, dtype=integer)
    if kinds == {bool}:
        return np.array(values)
    exact = all(type(value) is not int or abs(value) <= 2**53 for value in values)
    if exact and kinds <= {bool, int, float, _ABSENT}:
        return np.array(values, dtype=np.float64)
    return np.array([_text(value) or "" for value in values])


def parquet_of(columns: dict[str, list[Any]]) -> bytes:
    """Parquet with these columns; one whose values have no common type becomes text.

    Raises ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        message = "writing Parquet needs pyarrow, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="parquet")) from error

    buffer = io.BytesIO()
    table = pa.table({_utf8(name): _arrow(name, some) for name, some in columns.items()})
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _arrow(name: str, values: list[Any]) -> Any:
    import pyarrow as pa

    # The type of the errors must not depend on whether there is one.
    kind = pa.string() if name.removeprefix("hpctk.") == "error" else None
    present = [one for one in values if one is not None]
    shapes = {(one.dtype, one.ndim) if hasattr(one, "ndim") else None for one in present}
    if len(shapes) == 1 and (shape := shapes.pop()) is not None and shape[0].kind in "biuf":
        kind = pa.from_numpy_dtype(shape[0])
        for _ in range(shape[1]):
            kind = pa.list_(kind)
        values = [one if one is None else one.tolist() for one in values]
    else:  # Arrow takes arrays of one dimension only
        values = [natural(one) if hasattr(one, "ndim") else one for one in values]
    try:
        if any(map(_has_object, values)) or len(set(map(_zoned, values)) - {None}) > 1:
            raise pa.ArrowInvalid
        return pa.array(values, kind)
    except (
        pa.ArrowInvalid,
        pa.ArrowTypeError,
        pa.ArrowNotImplementedError,
        OverflowError,
        UnicodeError,
    ):
        texts = map(_text, values)
        return pa.array([text if text is None else _utf8(text) for text in texts], pa.string())


def _has_object(value: Any, depth: int = 0) -> bool:
    """Whether Arrow would add keys to objects, or refuse lists that are nested so deeply."""
    if not isinstance(value, list):
        return isinstance(value, dict)
    return depth > _MOST_DEPTH or any(_has_object(one, depth + 1) for one in value)


def _zoned(value: Any) -> bool | None:
    """Whether a time has a zone: Arrow would drop it where another has none."""
    return value.tzinfo is not None if hasattr(value, "tzinfo") else None


def _utf8(text: str) -> str:
    """Text that UTF-8 can encode: JSON may contain one half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()
