"""Keep the coordinator of a campaign running, beside the ranks of a job or local workers."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import TRY_AGAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CUT_SHORT = 143
"""Exit code of a process that SIGTERM ended."""
_LIVES = 5
_LONG_S = 600.0
"""A life of this many seconds counts as success: a search takes days."""
_TELL_S = 5.0


def shell_code(code: int) -> int:
    """The exit code of a process, 128 + N for signal N, for which Python has -N."""
    return code if code >= 0 else 128 - code


class Supervisor:
    """Starts a process again, up to five times, when it is killed: its decisions are in the run.

    ``stop_workers`` asks the workers to exit, once no coordinator will decide for them. Every
    ``look_s`` seconds it is tried whether another coordinator has ended.
    """

    def __init__(
        self,
        argv: Sequence[str],
        stop_workers: Callable[[], None],
        *,
        log: Callable[[str], object] = str,
        look_s: float = 30.0,
        **options: Any,
    ) -> None:
        self._argv = list(argv)
        self._options = options
        self._log = log
        self._look_s = look_s
        self._stop_workers = stop_workers
        self._lives = _LIVES
        self._code: int | None = None
        self._next = 0.0
        self._stopped = False
        self._start()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, **self._options
        )

    @property
    def running(self) -> bool:
        return self._child is not None

    def ended(self) -> int | None:
        """Its exit code once it will not be started again; 128 + N for signal N."""
        return self._code

    def stop(self) -> None:
        """End it by SIGTERM; ``ended`` then returns its last code, 143 if it had to be ended."""
        if self._stopped:
            return
        self._stopped = True
        if self._child is not None:
            self._child.terminate()
        elif self._code is None:
            self._code = CUT_SHORT

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def poll(self, *, ranks: bool) -> float | None:
        """Act on its end; the seconds after which to call again, None for at the end of a child.

        ``ranks`` says whether workers run that may have to be asked to exit.
        """
        now = time.monotonic()
        if self._child is not None and (code := self._child.poll()) is not None:
            self._child = None
            self._next = now
            self._after(shell_code(code), now)
        if self._child is None and self._code is None and now >= self._next:
            self._start()
        if self._code is None:
            return None if self._child is not None else max(0.0, self._next - now)
        return self._tell(now) if ranks and self._code and not self._stopped else None

    def _after(self, code: int, now: float) -> None:
        if now - self._began > _LONG_S:
            self._lives = _LIVES
        if self._stopped:
            self._code = CUT_SHORT
        elif code == TRY_AGAIN:
            self._log("another coordinator decides for this run; looking again, since it may end")
            self._next = now + self._look_s
        elif code > 128 and self._lives:
            self._lives -= 1
            self._log(f"the coordinator was killed (code {code}): starting it again")
        else:
            self._code = code

    def _tell(self, now: float) -> float:
        """Ask the workers to exit, again and again: a step that is just starting hears nothing."""
        if now >= self._next:
            self._log(f"the coordinator ended with code {self._code}: telling the ranks to finish")
            self._stop_workers()
            self._next = time.monotonic() + _TELL_S
        return max(0.0, self._next - time.monotonic())
