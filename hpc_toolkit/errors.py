"""Every exception that hpc_toolkit raises on purpose.

An error has its own class only if a caller would handle it differently.
"""

from __future__ import annotations

import errno
import os
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

# A FUSE filesystem may return EINTR after a signal, and Python does not repeat that call.
PASSING = frozenset(
    {
        # A mounted filesystem whose server does not answer; it may answer later.
        *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENOLINK),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EREMOTEIO),
        *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN),
    }
)
"""Errors that can be fixed, or pass by themselves, so the same call is worth retrying."""

TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN),
        *(errno.EINTR, errno.ENOSPC, errno.EDQUOT),
    }
)
"""Errors of the run's filesystem that a worker waits out with its executor loaded."""


class HpcToolkitError(Exception):
    """An error that the user can act on: what happened, where, and how to fix it.

    The command line prints ``error: <message>`` and ``hint: <hint>`` and exits with ``exit_code``;
    a traceback ends with both.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code
        self.message = message
        """What is wrong, and where."""
        self.hint = hint
        """What to do about it; empty if there is no advice."""
        if hint:
            # A traceback prints notes but not attributes.
            self.add_note(f"hint: {hint}")

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), hint=self.hint), (self.message,), vars(self)


class ConfigError(HpcToolkitError, ValueError):
    """A value of an argument, configuration file, option or environment variable is not usable."""


class RenderError(ConfigError):
    """A script cannot be rendered from these values."""


class RunError(HpcToolkitError):
    """A run directory is missing, damaged, unsafe, or not in a state that allows the request."""


class ItemsError(HpcToolkitError, ValueError):
    """A list of items is not usable; the message names the line."""

    def __init__(self, message: str, *, number: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.number = number
        """The item that it is about, from 0, if a caller can name its line."""


class WorkloadError(HpcToolkitError):
    """The code that a run names cannot be found, imported or constructed."""


class PermanentError(HpcToolkitError):
    """Raised by a workload if an item can never succeed; the item fails and is not retried.

    Missing weights and malformed input are permanent; a full disk or a lost GPU is not.
    """


class CallError(HpcToolkitError):
    """A call of :class:`hpc_toolkit.Executor` failed for good; ``future.result()`` raises it."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        item: dict[str, Any] | None = None,
        error: str = "",
        attempts: int = 0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.item = item or {}
        """The call, as the run records it: ``function``, ``args`` and ``kwargs``."""
        self.error = error
        """Type and text of the last attempt's exception, or what ended the attempt."""
        self.attempts = attempts
        """Attempts that counted; the death of a worker does not."""


TRY_AGAIN = 75
"""Exit code of a process that did nothing wrong and whose work is not finished: start it again."""


def exit_code_of(error: OSError) -> int:
    """75 for an error that may pass, else 1."""
    return TRY_AGAIN if error.errno in PASSING else 1


class TryAgainLaterError(HpcToolkitError):
    """Nothing is wrong, but the work is not finished: time is up, or a drain was requested."""

    exit_code = TRY_AGAIN


class CommandInterruptedError(Exception):
    """A signal from outside ended an item's command; the item has not failed."""


LONGEST_TEXT = 4000
"""Characters of an exception's text that are kept; a traceback gets as many."""


def shortened(text: str) -> str:
    """Return a text, or the start and the end of a long one, and its length between them."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:1000]}\n... ({len(text):,} characters) ...\n{text[1000 - LONGEST_TEXT :]}"


def describe(error: BaseException) -> str:
    """Type and text of an exception whose own methods may fail; a long text is shortened."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as another:  # noqa: BLE001 - code of the user
        text = f"its text cannot be read, str() raised {type(another).__name__}"
    return shortened(f"{name}: {text}" if text else name)


_MOST_NAMES = 60
"""Most names that a hint lists."""


def near_miss(word: str, known: list[str]) -> str:
    """A hint that names the closest of ``known``, or some of them if none is close."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"known: {', '.join(sorted(known)[:_MOST_NAMES])}{more}"


def near_path(path: Path, otherwise: str) -> str:
    """A hint that names an existing path of nearly the same name, or else what is given."""
    import difflib

    try:
        names = os.listdir(path.parent)
    except OSError:
        names = []
    close = [one for one in difflib.get_close_matches(path.name, names, n=1) if one != path.name]
    return f"did you mean {str(path.parent / close[0])!r}?" if close else otherwise
