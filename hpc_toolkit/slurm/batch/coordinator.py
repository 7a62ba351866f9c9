"""The coordinator of a campaign beside the ranks of its job: started, watched, started again."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LIVES = 5
_LONG_S = 600.0
"""A life of this many seconds counts as success: a search takes days."""
_ANOTHER = 75
_LOOK_S = 30.0
_TELL_S = 5.0


class CoordinatorProcess:
    """The process that decides what is evaluated next.

    It can be killed and started again, since its decisions are in the run.

    Args:
        argv: the command that runs it.
        log: writes a line to the job's log.
        stop_ranks: asks the ranks to leave, once no coordinator will decide for them.
    """

    def __init__(
        self, argv: Sequence[str], log: Callable[[str], None], stop_ranks: Callable[[], None]
    ) -> None:
        self._argv = list(argv)
        self._log = log
        self._stop_ranks = stop_ranks
        self._lives = _LIVES
        self._code: int | None = None
        self._next = 0.0
        self._stopped = False
        self._start()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = subprocess.Popen(self._argv)

    def ended(self) -> int | None:
        """Its exit code once it will not be started again; negative for a signal."""
        return self._code

    def stop(self) -> None:
        """End it by SIGTERM; ``ended`` then returns its last code, 143 if it had to be ended."""
        if self._stopped:
            return
        self._stopped = True
        if self._child is not None:
            self._child.terminate()
        elif self._code is None:
            self._code = 143

    def poll(self, *, ranks: bool) -> float | None:
        """Act on its end; the seconds after which to call again, None for at the end of a child.

        ``ranks`` says whether the step runs.
        """
        now = time.monotonic()
        if self._child is not None and (code := self._child.poll()) is not None:
            self._child = None
            self._next = now
            self._after(code if code >= 0 else 128 - code, now)
        if self._child is None and self._code is None and now >= self._next:
            self._start()
        if self._code is None:
            return None if self._child is not None else max(0.0, self._next - now)
        return self._tell(now) if ranks and self._code and not self._stopped else None

    def _after(self, code: int, now: float) -> None:
        if now - self._began > _LONG_S:
            self._lives = _LIVES
        if self._stopped:
            self._code = 143
        elif code == _ANOTHER:
            self._log("another coordinator decides for this run; looking again, since it may end")
            self._next = now + _LOOK_S
        elif code > 128 and self._lives:
            self._lives -= 1
            self._log(f"the coordinator was killed (code {code}): starting it again")
        else:
            self._code = code

    def _tell(self, now: float) -> float:
        """Ask the ranks to leave, again and again: a step that is just starting hears nothing."""
        if now >= self._next:
            self._log(f"the coordinator ended with code {self._code}: telling the ranks to finish")
            self._stop_ranks()
            self._next = time.monotonic() + _TELL_S
        return max(0.0, self._next - time.monotonic())
