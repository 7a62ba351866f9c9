"""Messages from an executor to its worker: one per item, and some about loading and the end."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.system.memory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from mmap import mmap

# Messages to the worker: one line each; the first byte is the kind.
DONE, FAILED, PERMANENT = b"d", b"f", b"p"  # the rest is the beginning of a journal line
LOADING, LOADED = b"l", b"L"  # a load began, or ended: the item's clock starts again
END = b"e"  # the request is over; the rest says why: "" (all items), "stopped", "interrupted"
FAILING = "failing"  # reason of END: many items failed in a row; the rest may be sent again
PREFETCHES = b"a"  # a workload was loaded; the rest is "yes" if it can prefetch, or ""
BROKEN = b"w"  # the workload itself cannot be loaded; the rest says why

CONSECUTIVE_FAILURES = 8
"""Failures in a row after which an executor stops until its worker has looked at them."""

_TRACEBACK = 4000


class Report:
    """Turns the results of one request into messages."""

    def __init__(
        self,
        request: dict[str, Any],
        send: Callable[[bytes, bytes], None],
        stop: mmap | bytes = b"\0",
    ) -> None:
        """``stop``: its first byte becomes 1 when the worker wants no further item to start."""
        unit = json.dumps(f"{request['stage']}/{request['unit']}")
        self._where = f'"unit":{unit},"generation":{request["generation"]},"item":'
        self._positions = request["positions"]
        self._send, self._stop = send, stop
        self._deadline: float | None = request["deadline"]
        self._expected_s: float = request["expected_s"]
        self._log_end = _log_size()
        self.index = 0
        """Items reported so far."""
        self._since = time.monotonic()
        self._failures_left = int(request["failures_left"])

    @property
    def failing(self) -> bool:
        """Whether the worker must look at the failures in a row before the next item."""
        return self._failures_left <= 0

    @property
    def over(self) -> bool:
        """Whether no further item may start: a stop was requested, or it would not end in time."""
        if self._stop[0] or self._deadline is None:
            return bool(self._stop[0])
        return time.monotonic() + self._expected_s > self._deadline

    def restart_clock(self) -> None:
        self._since = time.monotonic()

    def result(self, value: Any) -> None:
        try:
            text = _strict_json(value)
        except (TypeError, ValueError) as error:
            self.failure(error)
        else:
            self._failures_left = CONSECUTIVE_FAILURES
            self._report(DONE, "done", f'"value":{text}')

    def failure(self, error: BaseException) -> None:
        permanent = isinstance(error, PermanentError)
        fields = json.dumps(
            {
                "error": _message(error),
                "error_type": type(error).__name__,
                "oom": is_out_of_memory(error),
                "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK:],
            }
        )[1:-1]
        if permanent:
            self._report(PERMANENT, "permanent", fields)
        else:
            self._failures_left -= 1
            self._report(FAILED, "failed", fields)

    def _report(self, kind: bytes, name: str, fields: str) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._expected_s = max(self._expected_s, seconds)
        logged = self._logged()
        position = self._positions[self.index]
        self.index += 1
        self._send(
            kind,
            f'{{"type":"{name}",{self._where}{position},"at":{time.time():.3f},'
            f'"seconds":{seconds:.6f}{logged},{fields}'.encode(),
        )

    def _logged(self) -> str:
        """The field with the byte range of the worker's log that this item wrote; "" if none."""
        sys.stdout.flush()
        start, self._log_end = self._log_end, _log_size()
        return f',"log":[{start},{self._log_end}]' if self._log_end > start else ""


def try_item(workload: Any, group: Any, item: dict[str, Any]) -> dict[str, Any]:
    """Run one item in this process; return the line that a worker would write in its journal."""
    lines: list[bytes] = []
    place = {"stage": "try", "unit": "try", "generation": 1, "positions": [0]}
    limits = {"deadline": None, "expected_s": 0.0, "failures_left": 1}
    report = Report({**place, **limits}, lambda _kind, line: lines.append(line))
    try:
        for value in workload.run(workload.load(group), iter([item])):
            report.result(value)
            break
        else:
            report.failure(RuntimeError("run() yielded fewer results than it took items"))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
        report.failure(error)
    record: dict[str, Any] = json.loads(lines[0] + b"}")
    return record


def _log_size() -> int:
    return os.fstat(1).st_size


def _message(error: BaseException) -> str:
    if isinstance(error, PermanentError):
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _strict_json(value: Any) -> str:
    """Encode a result as strict JSON; an error names the path of the value that is not JSON."""
    if type(value) is not dict:
        message = f"a result must be a dict, not {type(value).__name__}"
        raise TypeError(message)
    try:
        return encode(value)
    except (TypeError, ValueError):
        problem = json_problem(value, "value")
        if problem is None:
            raise
        raise ValueError(problem) from None


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    message = f"{type(value).__name__} is not JSON"
    raise TypeError(message)


encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain).encode
"""Encode a value as strict JSON; numbers of numpy become plain ones."""


def json_problem(value: Any, path: str) -> str | None:
    """Describe the first part of a value that is not JSON; None if all of it is."""
    if isinstance(value, dict | list | tuple):
        pairs = [(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    return f"{path} has the key {key!r}, which is not text"
            pairs = [(inner, f"{path}.{key}") for key, inner in value.items()]
        return next(filter(None, (json_problem(*pair) for pair in pairs)), None)
    if isinstance(value, float) or getattr(value, "ndim", None) == 0:
        number = float(value)
        return None if math.isfinite(number) else f"{path} is {number}, which JSON does not have"
    if value is None or isinstance(value, str | int | bool):
        return None
    advice = "; convert it with .tolist()" if hasattr(value, "tolist") else ""
    return f"{path} is a {type(value).__name__}, which JSON does not have{advice}"
