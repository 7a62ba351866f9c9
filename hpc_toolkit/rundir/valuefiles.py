"""Value files: what is large or has no JSON form, one file for each worker beside its journal.

A worker's executor appends, and the worker syncs the file before it writes the line that names
the bytes by offset, length and CRC-32. So every line in a journal names bytes that are there.

Only :meth:`Values.restored` unpickles, and only in a run whose code this user may execute.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from hpc_toolkit.errors import RunError, describe
from hpc_toolkit.rundir import pickles
from hpc_toolkit.rundir.files import closing, shared, write_all
from hpc_toolkit.rundir.layout import RESULTS, RunPaths, shown_item
from hpc_toolkit.rundir.trust import refuse_untrusted
from hpc_toolkit.rundir.values import Forms, Types, described, made, not_finite, restore, steps
from hpc_toolkit.system.jsonlines import encode
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.terminal import note

_MOST_TYPES = 1000
"""Most typed places of one value; with more, a pickle of the whole value takes less room."""
_CHUNK = 1 << 20


class Encoded:
    """A value as the fields of a journal line, and what its value file gets."""

    def __init__(self, value: Any) -> None:
        """Raises UnstorableError: a part of the value has no form and cannot be pickled."""
        self.types: Types = {}
        self.parts: list[tuple[str, Any]] = []
        self.natural, fits = None, False
        try:
            self.natural = Forms(self.types, self).form(value)
            fits = len(self.types) <= _MOST_TYPES
        except (pickles.UnstorableError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - of methods of the user, or too deep
            fits = False
        if not fits:
            self.types.clear()
            self.parts.clear()
            size = self.pickle("", value)
            if self.natural is None or size is None:
                self.natural = described(value, size)

    def part(self, place: str, kind: str, content: Any, *more: Any) -> None:
        self.parts.append((place, content))
        self.types[place] = [kind, 0, 0, "", *more]

    def pickle(self, place: str, value: Any) -> int | None:
        """Take an object as its pickle, and return the size of that; None: it is not known yet."""
        data = _pickled(value, place)
        self.part(place, "pickle", data)
        return len(data)

    def line(self, path: str | None) -> tuple[str, bool]:
        """The fields of a journal line, and whether the value file ``path`` has grown.

        The file must be synced before the line is written; without a path none is written. Raises
        OSError: the file cannot be written.
        """
        if self.parts and path is not None:
            with _appending(path) as fd:
                for place, content in self.parts:
                    self.types[place][1:4] = _append(fd, content)
        types = f'"types":{encode(self.types)},' if self.types else ""
        return f'{types}"value":{encode(self.natural)}', bool(self.parts)


def exception_field(error: BaseException, trace: str, path: str) -> str:
    """Append an exception and its traceback; the field of the journal line, or "".

    The file must be synced before the line is written. Raises OSError: it cannot be written; other
    exceptions: this one cannot be pickled.
    """
    data = pickles.exception_bytes(error, trace)
    return f',"exception":{encode(["pickle", *stored(path, data)])}' if data else ""


def stored(path: str | Path, content: Any) -> list[Any]:
    """Append bytes or an array to a value file; its offset, length and checksum there."""
    with _appending(path) as fd:
        return [*_append(fd, content)]


def _appending(path: str | Path) -> AbstractContextManager[int]:
    return closing(shared(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), path))


class _Output:
    """A file for numpy, which writes an array in pieces."""

    def __init__(self, fd: int) -> None:
        self._fd, self.size, self.sum = fd, 0, 0

    def write(self, data: bytes) -> None:
        write_all(self._fd, data)
        self.size += len(data)
        self.sum = crc32(data, self.sum)


def _append(fd: int, content: Any) -> tuple[int, int, str]:
    """Append bytes or an array; return offset, length and checksum."""
    start, out = os.fstat(fd).st_size, _Output(fd)
    if isinstance(content, bytes):
        out.write(content)
    else:
        import numpy as np

        np.lib.format.write_array(out, content, allow_pickle=False)
    return start, out.size, f"{out.sum:08x}"


def _pickled(value: Any, place: str) -> bytes:
    """Raises UnstorableError: a part of the value cannot be pickled; the message names it."""
    try:
        return pickles.dumps(value)
    except MemoryError:  # which another attempt may have
        raise
    except Exception:  # noqa: BLE001 - of methods of the user
        where = "value" + "".join(f"[{int(s) if s.isdecimal() else s!r}]" for s in steps(place))
        raise pickles.refusal(value, where) from None


class Values:
    """Reads results of one run back as Python had them."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self.root = paths, paths.root
        self._trusted = False

    def restored_rows(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Each row as :meth:`restored` does; an UnrestoredError is the value of its row."""
        lost: list[pickles.UnrestoredError] = []
        for row in rows:
            try:
                yield self.restored(row)
            except pickles.UnrestoredError as error:
                lost.append(error)
                yield {**row, "value": error}
        if lost:
            what = counted(len(lost), "result")
            note(f"{what} of {self.root} not restored: {lost[0]}; {lost[0].hint}", "warning")

    def restored(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row, with its value as it was returned.

        Raises UnrestoredError: a value file is damaged, or a class cannot be imported here;
        RunError: other users could have written a pickle, which would run their code.
        """
        if types := row.pop("types", None):
            try:
                row["value"] = restore(row["value"], types, lambda tag: self._stored(row, tag))
            except RunError:
                raise
            except (Exception, SystemExit) as error:  # also of code that unpickling runs
                message = f"the result of {encode(row['item'])[:200]} cannot be restored: "
                hint = "read it with the code that stored it"
                if isinstance(error, ModuleNotFoundError):
                    hint = f"install {error.name}, or add its directory to PYTHONPATH"
                hint += "; 'hpctk gather' does without"
                raise pickles.UnrestoredError(message + describe(error), hint=hint) from error
        return row

    def columns(self, row: dict[str, Any]) -> dict[Any, Any]:
        """The columns of a row's value; numbers, arrays and dates have their types.

        This never unpickles: a pickled object stays as it is shown.
        """
        found = value_columns(row)
        for place, tag in row.get("types", {}).items():
            if place.count("/") == (type(row["value"]) is dict):
                key = steps(place)[0] if place else WHOLE
                found = {**found, key: self._typed(row, tag, found[key])}
        return found

    def _typed(self, row: dict[str, Any], tag: Any, form: Any) -> Any:
        if isinstance(tag, str):
            is_typed = tag in _TYPED or tag.startswith("numpy.")
            return made(tag, form) if is_typed else form
        if tag[0] in ("npy", "torch"):
            return self._stored(row, tag, plain=True)
        if tag[0] in ("array", "tensor"):
            dtype = tag[1] if tag[1] != "bfloat16" else "float32"
            return made(["array", dtype, tag[2]], form)
        return form

    def exception(self, row: dict[str, Any]) -> tuple[BaseException, str]:
        """The exception of a failed call, and its traceback.

        Raises UnrestoredError: it cannot be made again here; RunError as :meth:`restored` does.
        """
        try:
            error, trace = self._stored(row, row["exception"])
        except RunError:
            raise
        except Exception as another:  # also of code that unpickling runs
            message = f"the exception cannot be restored: {describe(another)}"
            raise pickles.UnrestoredError(message) from another
        return error, trace

    def _stored(self, row: dict[str, Any], tag: Any, *, plain: bool = False) -> Any:
        """What a value file has; ``plain``: tensors as arrays."""
        if tag[0] == "pickle" and not self._trusted:
            refuse_untrusted(self._paths.root)
            self._trusted = True
        return read_part(self._paths.values(row["worker"]), tag, plain=plain, own=True)


def with_results(item: dict[str, Any], own: str | None) -> dict[str, Any]:
    """An item with the results of earlier stages in it as Python had them (rule R17).

    ``own`` is the reader's value file; None: a command, which gets the natural forms. The item may
    be changed. Raises RunError: as :meth:`Values.restored`.
    """
    kept = item["stored"]
    if type(kept) is not dict or kept.keys() != {RESULTS}:
        return item  # of a call, or of a list with a key of that name
    item = shown_item(item)
    if own is None:
        return item
    values = Values(RunPaths(Path(own).parents[1]))
    holder: list[dict[str, Any]] = [item]
    for place, worker, types in kept[RESULTS]:
        parent: Any = holder
        steps_to: list[Any] = [0, *place]
        last = steps_to.pop()
        for key in steps_to:
            parent = parent[key]
        row = {"item": place, "value": parent[last], "types": types, "worker": worker}
        parent[last] = values.restored(row)["value"]
    return holder[0]


def read_part(path: Path, tag: Any, *, plain: bool = False, own: bool = False) -> Any:
    """What ``tag`` names in a value file, which is unpickled: the run must be trusted.

    ``plain``: tensors as arrays; ``own``: see :func:`loads`. Raises RunError: the file is damaged.
    """
    kind, start, length, total, *of_tensor = tag
    try:
        with path.open("rb") as file:
            _check(file, start, length, total)
            file.seek(start)
            content = _array(file) if kind in ("npy", "torch") else file.read(length)
    except (OSError, EOFError) as error:
        message = f"{path} does not have bytes {start} to {start + length} of a value: {error}"
        raise pickles.UnrestoredError(message, hint="try again later; else restore it") from error
    if kind == "pickle":
        return pickles.loads(content, own=own)
    return _tensor(content, *of_tensor, plain=plain) if of_tensor else content


def _check(file: BinaryIO, start: int, length: int, total: str) -> None:
    """EOFError: a part of a value file is not what was written."""
    file.seek(start)
    found, left = 0, length
    while left and (data := file.read(min(left, _CHUNK))):
        found, left = crc32(data, found), left - len(data)
    if left or f"{found:08x}" != total:
        raise EOFError("they are cut off" if left else "their checksum is wrong")


def _array(file: BinaryIO) -> Any:
    import numpy as np

    return np.lib.format.read_array(file, allow_pickle=False)


def _tensor(array: Any, dtype: str, has_gradient: bool = False, *, plain: bool) -> Any:
    """A tensor from its numbers, or ``plain`` an array, which has float32 for bfloat16."""
    narrow = dtype == "bfloat16"
    if plain:
        return (array.view("u2").astype("u4") << 16).view("f4") if narrow else array
    import torch

    tensor = torch.from_numpy(array)
    return (tensor.view(torch.bfloat16) if narrow else tensor).requires_grad_(has_gradient)


WHOLE = object()
"""The column of a value that is not a dict, whatever keys other values have."""
_TYPED = frozenset(
    ("datetime", "date", "time", "timedelta", "Decimal", "bytes", "nan", "inf", "-inf")
)


def value_columns(row: dict[str, Any]) -> dict[Any, Any]:
    """The columns of a row's value in its natural form, but with NaN and infinities."""
    value = row["value"]
    found = value if type(value) is dict else {WHOLE: value} if row["state"] == "done" else {}
    for place, number in not_finite(row.get("types", {})).items():
        if place.count("/") == (type(value) is dict):
            found = {**found, steps(place)[0] if place else WHOLE: number}
    return found
