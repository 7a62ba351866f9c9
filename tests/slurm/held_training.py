"""``examples/train_ddp.py`` that waits after one step of its first start, for a test to disturb it.

It goes on when it is told to stop, by SIGUSR1 or SIGTERM, or when the file is there that
HPCTK_HELD_UNTIL names.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import train_ddp

HELD = int(os.environ.get("HPCTK_HELD", "6"))
"""After this step; in the tests the last checkpoint is that of step 5."""


class HeldTraining(train_ddp.Training):
    """A training that says where it waits."""

    _made = 0

    def _step(self, batches: Any) -> float:
        loss = super()._step(batches)
        self._made += 1
        first = not self.info.restart and not int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        if first and self._made == HELD:
            self._wait()
        return loss

    def _wait(self) -> None:
        handler = signal.getsignal(signal.SIGUSR1)
        stop = getattr(handler, "__self__", None)
        names = [name for name in ("HPCTK_STAGED_1", "HPCTK_STAGED_2") if name in os.environ]
        places = [Path(os.environ[name]) for name in names]
        told = [str(os.getpid()), *(path.read_text() for path in places)]
        # Renamed, so that a test that sees it can read all of it.
        path = self.args.output / f"held-{self.info.rank}"
        part = path.with_suffix(".part")
        part.write_text("\n".join(told))
        part.rename(path)
        let_go = os.environ.get("HPCTK_HELD_UNTIL")
        while not (getattr(stop, "received", None) or (let_go and Path(let_go).exists())):
            time.sleep(0.05)


if __name__ == "__main__":
    train_ddp.Training = HeldTraining  # type: ignore[misc]
    sys.exit(train_ddp.main())
