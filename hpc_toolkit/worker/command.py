"""A shell command as a workload."""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from hpc_toolkit.errors import CommandInterruptedError, PermanentError, WorkloadError
from hpc_toolkit.system.jsonlines import unique
from hpc_toolkit.system.processes import STOP_SIGNALS, describe_exit, die_with_parent, readable
from hpc_toolkit.worker.memory import kernel_kills

_TAIL, _SEARCHED = 2000, 1 << 14
"""Bytes at the end of stderr that a message shows, and that are searched for a lack of memory."""
_LONGEST_LINE = 64 << 20
"""Bytes of the longest line that is read as a result."""
_LONGEST_WORD = (128 << 10) - 1
"""Bytes of the longest argument or variable that Linux passes to a program (execve(2))."""
_FROM_FILE = "read the item from the JSON file $HPCTK_ITEM_FILE"
_SIGNALS_APART_S = 2.0
"""Seconds until all processes of a step have a signal: Slurm signals one after the other."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_SLURM_KILL = re.compile(rb"slurmstepd: .*\boom[-_ ]kill")
"""Line about a step that srun started, perhaps on other nodes."""
_NO_MEMORY = re.compile(rb"MemoryError\b|bad_alloc|[Oo]ut of memory|Cannot allocate memory")
"""Last line of a program that ends because the kernel or CUDA gives it no more memory."""
_RAISED = re.compile(rb"^(?:\[rank\d+\]: *|\d+: *)*(?:\w+\.)*\w*MemoryError\b.*", re.MULTILINE)
"""The end of a traceback of Python, also of one of several ranks; launchers print more after it."""


_KEY = re.compile(r"[^\W\d][\w-]*(\.[^\W\d][\w-]*)*")

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
    """The item keys that a command uses, such as ``key.part``; without a command, none.

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
        if not _KEY.fullmatch(key) or spec not in ("", "args") or conversion:
            message = f"command {command!r}: {{{key}}} is not a plain {{key}} placeholder"
            hint = "write {{ and }} for braces of the shell, and read an item whose keys have other"
            raise WorkloadError(message, hint=f"{hint} characters from $HPCTK_ITEM_FILE")
        if context:
            message = f"command {command!r}: {{{key}}} stands {_CONTEXTS[context]}"
            hint = f'values are quoted already; assign the value first: x={{{key}}}; ... "$x"'
            if context == "$":
                hint = f"a variable of the shell is written ${{{{{key}}}}}"
            raise WorkloadError(message, hint=hint)
        if spec and (text or keys) and not re.search(r"(?<!\\)\s\Z", text):
            # The second word of x={key:args} would be a command.
            message = f"command {command!r}: {{{key}:args}} is not a word of its own"
            raise WorkloadError(message, hint=f"write a blank before {{{key}:args}}")
        keys.append(key)
    return keys


def _value_of(item: dict[str, Any], key: str) -> Any:
    """The value of a key; if the item has none of this name, of its parts between dots."""
    if key in item:
        return item[key]
    value: Any = item
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise PermanentError(f"the item has no key {key!r}, which the command needs")
        value = value[name]
    return value


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


def fill(command: str, item: dict[str, Any]) -> bytes:
    """Fill in the command; each value becomes one shell word, or with ``:args`` a word for each
    element of a list or word of a text, as the shell splits it; nothing is expanded or executed.

    Raises PermanentError: a key is missing, or a value cannot be part of a command.
    """
    parts = []
    for text, key, spec, _ in string.Formatter().parse(command):
        parts.append(text)
        if key is None:
            continue
        part = _value_of(item, key)
        try:
            words = _words(part, spec)
        except ValueError as error:
            message = f"the value of {key!r} cannot be split into words: {error}: {part!a:.80}"
            hint = f"close its quotes, or write {{{key}}} for one word"
            raise PermanentError(message, hint=hint) from error
        if re.search("[\0\ud800-\udc7f\udd00-\udfff]", "".join(words)):  # others stand for bytes
            message = f"the value of {key!r} has a character that no command can take: {part!a:.80}"
            raise PermanentError(message, hint=_FROM_FILE)
        parts.append(shlex.join(words))
    filled = "".join(parts).encode(errors="surrogateescape")
    if len(filled) > _LONGEST_WORD:
        longest = max(
            needed_keys(command), key=lambda key: len(str(_value_of(item, key))), default=""
        )
        message = f"with the value of {longest!r} the command is over {_LONGEST_WORD:,} bytes long"
        raise PermanentError(message, hint=_FROM_FILE)
    return filled


def _words(value: Any, spec: str | None) -> list[str]:
    """The words of a command for a value. ValueError: a text has a quote that is not closed."""
    if spec and isinstance(value, list):
        return [_words(one, "")[0] for one in value]
    word = value if isinstance(value, str) else json.dumps(value)
    return shlex.split(word) if spec else [word]


class CommandWorkload:
    """Runs a command per item; the value is the last line of its output if that is a JSON object.

    A line ends with a newline or, as progress bars write it, a carriage return.

    The output goes to the worker's log. An item does not fail if a signal ended its command while
    the worker was asked to stop.
    """

    def __init__(self, command: str, *, pipefail: bool = False) -> None:
        needed_keys(command)
        self._command = command
        self._bash = ["/bin/bash", *(["-o", "pipefail"] if pipefail else []), "-c"]
        self._asked_to_stop = False
        self._kernel_kills = 0

    def note_signal(self) -> None:
        """Note that the worker's processes, this command's among them, got an outside signal."""
        self._asked_to_stop = True

    def load(self, group: Any) -> None:
        """Nothing to prepare."""

    def run(self, context: None, items: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return map(self._run_one, items)

    def _run_one(self, item: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(item)
        # In memory, so that a command that is killed leaves no file behind.
        with open(os.memfd_create("item"), "w", encoding="ascii") as file:
            print(text, file=file, flush=True)
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            environ = {**os.environ, "HPCTK_ITEM": text, "HPCTK_ITEM_FILE": path}
            if len(f"HPCTK_ITEM={text}") > _LONGEST_WORD:
                del environ["HPCTK_ITEM"]
            self._kernel_kills = kernel_kills()
            process = subprocess.Popen(
                [*self._bash, fill(self._command, item)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - an executor has one thread
            )
            with process:
                output, errors = _copied(process)
        return self._value(process.returncode, output, errors)

    def _value(self, code: int, output: bytearray, errors: bytes) -> dict[str, Any]:
        if code != 0:
            if self._was_asked_to_stop(code):
                raise CommandInterruptedError
            lack = _lack_of_memory(errors)
            by_kernel = code in _KILLED and kernel_kills() > self._kernel_kills
            ran_out = lack or by_kernel or _SLURM_KILL.search(errors)
            raise (MemoryError if ran_out else RuntimeError)(_failure(code, output, errors, lack))
        line = output[_last_line(output) :].strip().removeprefix(codecs.BOM_UTF8)
        is_long = len(line) > _LONGEST_LINE  # its beginning is lost
        if not (line.startswith(b"{") or is_long):
            return {"exit_code": code}
        try:
            found: dict[str, Any] = json.loads(line.decode(), object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            unread = f"it is over {_LONGEST_LINE:,} bytes long" if is_long else str(error)
            sys.stderr.write(f"hpctk: the last line is not read as a result: {unread}\n")
            found = {"exit_code": code, "unread_line": unread}
        return found

    def _was_asked_to_stop(self, code: int) -> bool:
        """Whether a stop signal ended the command; this process may get that signal later."""
        number = -code if code < 0 else code - 128
        if number <= 0:
            return False
        end = time.monotonic() + (_SIGNALS_APART_S if number in STOP_SIGNALS else 0)
        while not self._asked_to_stop and time.monotonic() < end:
            time.sleep(0.01)
        return self._asked_to_stop


def _copied(process: subprocess.Popen[bytes]) -> tuple[bytearray, bytes]:
    """Copy the output to the log; return the last line of stdout and the end of stderr."""
    output, room, errors = bytearray(), 1 << 20, b""
    for chunk, is_error in _output(process):
        stream = sys.stderr if is_error else sys.stdout
        stream.buffer.write(chunk)
        stream.buffer.flush()
        if is_error:
            errors = (errors + chunk)[-_SEARCHED:]
            continue
        output += chunk
        if len(output) > room:
            del output[: max(_last_line(output), len(output) - _LONGEST_LINE - 1)]
            room = max(1 << 20, 2 * len(output))
    return output, errors


def _last_line(output: bytearray) -> int:
    """Where the last line that is not blank begins."""
    end = len(output.rstrip())
    return max(output.rfind(b"\n", 0, end), output.rfind(b"\r", 0, end)) + 1


def _lack_of_memory(errors: bytes) -> bytes:
    """The line of stderr by which a command reports that it has no memory; b"" if none does."""
    last = errors.rstrip().rpartition(b"\n")[2]
    if _NO_MEMORY.search(last):
        return last
    lines: list[bytes] = _RAISED.findall(errors)
    return lines[-1] if lines else b""


def _failure(code: int, output: bytearray, errors: bytes, cause: bytes) -> str:
    """Message about a command that failed; its first line has the ``cause`` in stderr, if any, or
    the last line of stderr."""
    why = describe_exit(code)
    if said := errors[-_TAIL:].decode(errors="replace").strip():
        before, _, last = said.rpartition("\n")
        whole = f"\nlast lines of stderr:\n{said}" if before else ""
        line = cause.decode(errors="replace").strip()[:_TAIL] or last
        return f"{why}; its stderr {'ends with' if line == last else 'has'}: {line}{whole}"
    said = output[-_TAIL:].decode(errors="replace").strip()
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
