"""The grace period of an NFS server after its start: no new locks, and no new opens on v4."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.system.mounts import NFS
from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.system.mounts import Mount

LONGEST_S = 110.0
"""The default of Linux, 90 s, plus the pause before a client retries."""
_NOTE_AFTER_S = 10.0
_NOTE = (
    f"note: the NFS server has not answered for {_NOTE_AFTER_S:g} s. If it has just started, it "
    "answers after its grace period, 90 s by default. "
    f"Doctor waits up to {LONGEST_S:g} s for a lock\n"
)


class Grace:
    """The time that an examination waited for the server of one mount."""

    def __init__(self, mount: Mount) -> None:
        self.possible = mount.kind in NFS
        """Whether the server can have a grace period."""
        self._waited_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Print a note on stderr if the block waits for the server for long."""
        note = Timer(_NOTE_AFTER_S, sys.stderr.write, [_NOTE])
        if self.possible:
            note.start()
        began = time.monotonic()
        try:
            yield
        finally:
            note.cancel()
            self._waited_s = max(self._waited_s, time.monotonic() - began)

    def findings(self) -> list[Finding]:
        """Return a finding if the server took long to answer."""
        if not self.possible or self._waited_s <= _NOTE_AFTER_S:
            return []
        found = f"the NFS server answered after {format_duration(self._waited_s)}"
        means = (
            "a server that has just started grants no locks, and on NFSv4 opens no files, for 90 s "
            "by default; workers wait as well. What follows was measured afterwards"
        )
        return [Finding(check="grace period", verdict=Verdict.FINE, found=found, means=means)]
