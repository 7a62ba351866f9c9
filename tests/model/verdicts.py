"""Who lives, by the real verdicts: what can be seen of a death is what the world says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.queue.leases import Liveness, Verdict
from hpc_toolkit.queue.presence import read_presence
from tests.manualclock import ManualClock
from tests.model.values import EVILS, State

if TYPE_CHECKING:
    from tests.model.choices import Choices
    from tests.model.machine import Model

HEARTBEAT = 1
"""Of everybody, always: that an owner was silent for the lease is a choice."""


class Verdicts(Liveness):
    """The real verdicts, at a time that is chosen when they are asked for."""

    def __init__(self, model: Model, state: State, choices: Choices, me: int) -> None:
        place = model.place(me)
        super().__init__(
            model.paths,
            ManualClock(),
            host=f"host-of-{place}",
            boot=f"boot-{place}",
            lease_s=180.0,
        )
        self._model, self._state, self._choices, self._me = model, state, choices, me
        self.wrong = 0
        self._silent: dict[str, bool] = {}

    def verdict(self, worker: str) -> Verdict:
        number = self._model.number(worker)
        lives = number is not None and self._state.actors[number].phase not in ("dead", "gone")
        may_err = self._state.left[EVILS.index("false")] > self.wrong
        by = self._model.config.deaths_by
        if worker not in self._silent:
            may_be_silent = (not lives and by == "lease") or (lives and may_err)
            silent = may_be_silent and self._choices.of(2) == 1
            self._silent[worker] = silent
            self.wrong += lives and silent
        since = -1e9 if self._silent[worker] else self.clock.monotonic()
        seen = self._seen[worker]
        seen.presence, seen.since = read_presence(self.paths.worker(worker)), since
        verdict = super().verdict(worker)
        wrong = lives and not verdict.alive and not self._silent[worker]
        assert not wrong, "I4: a worker that was heard within the lease is held for dead"
        if not verdict.alive and not verdict.finished and not lives:
            assert verdict.evidence == by, f"R6: a death is seen by {verdict.evidence}, not by {by}"
            assert by != "slurm" or verdict.explained, "R15: what Slurm explains is unexplained"
        return verdict
