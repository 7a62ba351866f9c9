"""Signal handling of a launch while its ranks run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.launch.rank import WARNINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def signals(names: str, warn: Callable[[int], None], *, last: bool) -> Iterator[Callable[[], None]]:
    """Call ``warn`` on a warning signal; raise torch's SignalException on a signal of ``names``.

    Yield a function that ignores all of them from then on, for when only the exit is left. The
    earlier handlers are restored afterwards, unless the process does nothing else (``last``).
    Outside the main thread, which alone gets signals, nothing changes.

    Raises:
        ConfigError: a name is not a signal, or no process can handle that signal.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    ending = {_signal(name.strip()) for name in names.split(",") if name.strip()}

    def end(number: int, _frame: object) -> None:
        found = signal.Signals(number)
        message = f"{found.name} came"
        raise SignalException(message, sigval=found)

    def over() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    before = {number: signal.getsignal(number) for number in {*ending, *WARNINGS}}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = names
    for number in WARNINGS:
        signal.signal(number, lambda number, _frame: warn(number))
    for number in ending:
        signal.signal(number, end)
    try:
        yield over
    finally:
        for number, handler in before.items() if not last else ():
            signal.signal(number, handler)


def _signal(name: str) -> signal.Signals:
    try:
        found = signal.Signals[name]
    except KeyError as error:
        message = f"--signals-to-handle: there is no signal {name!r}"
        raise ConfigError(message, hint="such as SIGTERM,SIGINT") from error
    if found in (signal.SIGKILL, signal.SIGSTOP):
        message = f"--signals-to-handle: no process can handle {name}"
        raise ConfigError(message, hint="such as SIGTERM,SIGINT")
    return found
