"""A shell command as a workload."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import (
    CommandInterruptedError,
    PermanentError,
    WorkloadError,
)
from hpc_toolkit.system.processes import die_with_parent, readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TAIL = 2000
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_SIGNALS_APART_S = 2.0
"""Seconds until all processes of a step have a signal: Slurm signals one after the other."""


# Opens or closes a shell context in which a quoted value is not one word.
_OPENING = re.compile(r"""\\.?|['"`]|\(\(|<<<|<<|\$$|(?:^|(?<=\s))\#""", re.DOTALL)
_CLOSING = {
    "'": re.compile("'"),
    '"': re.compile(r'\\.|"', re.DOTALL),
    "`": re.compile(r"\\.|`", re.DOTALL),
    "((": re.compile(r"\)\)"),
    "#": re.compile("\n"),
    "<<": re.compile(r"(?!)"),  # the end of a here-document is not searched for
}
_CONTEXTS = {
    "'": "inside quotes",
    '"': "inside quotes",
    "`": "inside backquotes",
    "((": "inside arithmetic",
    "#": "inside a comment",
    "<<": "inside a here-document",
    "\\": "behind a backslash",
    "$": "behind a $",
}


def needed_keys(command: str | None) -> list[str]:
    """The item keys that a command uses; without a command, none.

    Raises WorkloadError: a placeholder is not a plain ``{key}``, or is in a context where the shell
    would not read its quoted value as one word and might execute it.
    """
    keys: list[str] = []
    context = ""
    try:
        parts = list(string.Formatter().parse(command or ""))
    except ValueError as error:
        message = f"command {command!r}: {error}"
        raise WorkloadError(message, hint="write {{ and }} for braces of the shell") from error
    for text, key, spec, conversion in parts:
        # Text after a placeholder continues a word, so "#" at its start begins no comment.
        context = _context_after(f"x{text}" if keys else text, context)
        if key is None:
            continue
        if not key.isidentifier() or spec or conversion:
            message = f"command {command!r}: {{{key}}} is not a plain {{key}} placeholder"
            raise WorkloadError(message, hint="write {{ and }} for braces of the shell")
        if context:
            message = f"command {command!r}: {{{key}}} stands {_CONTEXTS[context]}"
            hint = f'values are quoted already; assign the value first: x={{{key}}}; ... "$x"'
            if context == "$":
                hint = f"a variable of the shell is written ${{{{{key}}}}}"
            raise WorkloadError(message, hint=hint)
        keys.append(key)
    return keys


def _context_after(text: str, context: str) -> str:
    """The shell context at the end of ``text``, which began in context ``context``; "" for none."""
    at = 0
    while found := (_CLOSING[context] if context else _OPENING).search(text, at):
        at, mark = found.end(), found[0]
        if mark in {"\\", "$"} and at == len(text):
            return mark
        if not mark.startswith("\\") and mark != "<<<":
            context = "" if context else mark
    return context


def fill(command: str, item: dict[str, Any]) -> str:
    """Fill in the command; each value becomes one shell word. PermanentError for a missing key."""
    parts = []
    for text, key, _, _ in string.Formatter().parse(command):
        parts.append(text)
        if key is None:
            continue
        if key not in item:
            message = f"the item has no key {key!r}, which the command needs"
            raise PermanentError(message)
        value = item[key]
        parts.append(shlex.quote(value if isinstance(value, str) else json.dumps(value)))
    return "".join(parts)


class CommandWorkload:
    """Runs a command per item; the value is the last line of its output if that is a JSON object.

    The output goes to the worker's log. An item does not fail if a signal ended its command while
    the worker was asked to stop.
    """

    def __init__(self, command: str) -> None:
        needed_keys(command)
        self._command = command
        self._asked_to_stop = False

    def note_signal(self) -> None:
        """Note that the worker's processes, this command's among them, got an outside signal."""
        self._asked_to_stop = True

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: None, items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return map(self._run_one, items)

    def _run_one(self, item: dict[str, Any]) -> dict[str, Any]:
        text = fill(self._command, item)
        with subprocess.Popen(
            ["/bin/bash", "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "HPCTK_ITEM": json.dumps(item)},
            preexec_fn=die_with_parent,  # noqa: PLW1509 - an executor has one thread
        ) as process:
            tail, errors = b"", b""
            for chunk, is_error in _output(process):
                stream = sys.stderr if is_error else sys.stdout
                stream.buffer.write(chunk)
                stream.buffer.flush()
                if is_error:
                    errors = (errors + chunk)[-_TAIL:]
                else:
                    tail = (tail + chunk)[-(1 << 20) :]
        return self._value(process.returncode, tail, errors)

    def _value(self, code: int, tail: bytes, errors: bytes) -> dict[str, Any]:
        if code != 0:
            if self._was_asked_to_stop(code):
                raise CommandInterruptedError
            raise RuntimeError(_failure(code, tail, errors))
        lines = tail.strip().rsplit(b"\n", 1)
        try:
            value = json.loads(lines[-1])
        except ValueError:
            value = None
        return value if isinstance(value, dict) else {"exit_code": code}

    def _was_asked_to_stop(self, code: int) -> bool:
        """Whether a stop signal ended the command; this process may get that signal later."""
        number = -code if code < 0 else code - 128
        if number <= 0:
            return False
        end = time.monotonic() + (_SIGNALS_APART_S if number in _STOP_SIGNALS else 0)
        while not self._asked_to_stop and time.monotonic() < end:
            time.sleep(0.01)
        return self._asked_to_stop


def _failure(code: int, tail: bytes, errors: bytes) -> str:
    """Message about a command that failed; its first line has the last line of stderr, if any."""
    why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if said := errors.decode(errors="replace").strip():
        before, _, last = said.rpartition("\n")
        whole = f"\nlast lines of stderr:\n{said}" if before else ""
        return f"{why}; its stderr ends with: {last}{whole}"
    said = tail[-_TAIL:].decode(errors="replace").strip()
    return f"{why}; its output ends with: {said}" if said else f"{why}; no output"


def _output(process: subprocess.Popen[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield a process's output until it ends, and whether it is from stderr.

    Children of the process may hold the pipes open longer.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = {process.stdout.fileno(): False, process.stderr.fileno(): True}
    ended = os.pidfd_open(process.pid)
    try:
        while pipes:
            ready = readable(*pipes, ended)
            if ready == {ended}:
                return
            for pipe in ready & pipes.keys():
                chunk = os.read(pipe, 1 << 16)
                if chunk:
                    yield chunk, pipes[pipe]
                else:
                    del pipes[pipe]
    finally:
        os.close(ended)
