"""A shell command as a workload."""

from __future__ import annotations

import json
import os
import shlex
import signal
import string
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import PermanentError, WorkloadError
from hpc_toolkit.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TAIL = 2000


class CommandInterruptedError(Exception):
    """A signal from outside ended the command; that is no failure of its item."""


def placeholders(command: str) -> list[str]:
    """The keys that a command takes from its item.

    Raises:
        WorkloadError: a placeholder is not a plain ``{key}``.
    """
    keys = []
    try:
        parts = list(string.Formatter().parse(command))
    except ValueError as error:
        message = f"command {command!r}: {error}"
        raise WorkloadError(message, hint="write {{ and }} for braces of the shell") from error
    for _, key, spec, conversion in parts:
        if key is None:
            continue
        if not key.isidentifier() or spec or conversion:
            message = f"command {command!r}: {{{key}}} is not a plain {{key}} placeholder"
            raise WorkloadError(message, hint="write {{ and }} for braces of the shell")
        keys.append(key)
    return keys


def fill(command: str, item: dict[str, Any]) -> str:
    """The command for one item; every value is one word of the shell, whatever it contains.

    Raises:
        PermanentError: the item lacks a key.
    """
    parts = []
    for text, key, _, _ in string.Formatter().parse(command):
        parts.append(text)
        if key is None:
            continue
        if key not in item:
            message = f"the command needs {key!r}, which the item does not have"
            raise PermanentError(message)
        value = item[key]
        parts.append(shlex.quote(value if isinstance(value, str) else json.dumps(value)))
    return "".join(parts)


class CommandWorkload:
    """Runs a command per item; the value is the last line of its output if that is a JSON object.

    The output goes to the worker's log. A command that a signal ended while its worker was told to
    stop is no failure of the item.
    """

    def __init__(self, command: str) -> None:
        placeholders(command)
        self._command = command
        self._told_to_stop = False

    def note_signal(self) -> None:
        """The worker's processes were signalled from outside, this command's among them."""
        self._told_to_stop = True

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
            env={**os.environ, "HPCTK_ITEM": json.dumps(item)},
            preexec_fn=die_with_parent,  # noqa: PLW1509 - an executor has one thread
        ) as process:
            assert process.stdout is not None
            tail = b""
            while chunk := os.read(process.stdout.fileno(), 1 << 16):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                tail = (tail + chunk)[-(1 << 20) :]
        return self._value(process.returncode, tail)

    def _value(self, code: int, tail: bytes) -> dict[str, Any]:
        if code != 0:
            if self._told_to_stop and (code < 0 or code > 128):
                raise CommandInterruptedError
            said = tail[-_TAIL:].decode(errors="replace").strip()
            why = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            message = f"{why}; its output ends with: {said}" if said else f"{why}; no output"
            raise RuntimeError(message)
        lines = tail.strip().rsplit(b"\n", 1)
        try:
            value = json.loads(lines[-1])
        except ValueError:
            value = None
        return value if isinstance(value, dict) else {"exit_code": code}
