"""A command that runs on a host, with all processes that it started."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.closingline import CLOSING
from tests.sharedfs.outcome import Ended

if TYPE_CHECKING:
    from pathlib import Path

    from tests.sharedfs.hosts import Hosts

_ABORT_S = 5.0


@dataclass(frozen=True)
class Ranks:
    """A command of hpctk on a host, mostly ``work``."""

    hosts: Hosts
    host: str
    mark: str
    """What its environment and that of its children has, see :data:`tests.sharedfs.agent.MARK`."""
    process: subprocess.Popen[bytes]
    """What started it on the host, and ends with it."""
    out: Path
    err: Path

    def ended(self, *, limit_s: float) -> Ended:
        """Wait for the end."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            where = self.where()
            message = f"the workers of {self.host} still run after {limit_s:g} s: {where}"
            raise AssertionError(message) from None
        err = CLOSING.sub("", self.err.read_text())
        return Ended(self.host, code, self.out.read_text(), err)

    def family(self) -> list[int]:
        """The command, its workers and their executors, by their ids on the host."""
        return self.hosts.family(self.host, self.mark)

    def where(self) -> str:
        """What they wait for in the kernel and in Python, which ends them."""
        family = self.family()
        stacks = zip(family, self.hosts.stacks(self.host, family), strict=True)
        lines = [f"{pid}: {stack}" for pid, stack in stacks]
        # faulthandler prints the stacks.
        self.hosts.signal(self.host, family[::-1], signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ABORT_S)
        return "\n".join([*lines, self.err.read_text()])

    def kill(self) -> None:
        """SIGKILL all of them as if at one moment."""
        family = self.family()
        self.hosts.signal(self.host, family, signal.SIGSTOP)
        # Children first: when the last parent outside of its process group ends, the kernel wakes
        # a worker that is stopped (setpgid(2)), and it would write what it was kept from writing.
        self.hosts.signal(self.host, family[::-1], signal.SIGKILL)
        end = time.monotonic() + _ABORT_S
        # One that waits for a mount that does not answer may stay until the hosts end.
        while self.hosts.living(self.host) & set(family) and time.monotonic() < end:
            time.sleep(0.01)
        # nsenter(1) stops itself with what it started, and would not see its end.
        self.process.kill()
        self.process.wait()
