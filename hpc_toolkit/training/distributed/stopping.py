"""Agree on one step after which all ranks save their state and exit with 75."""

from __future__ import annotations

import logging
import math
import os
import signal
from typing import TYPE_CHECKING, Any, Self

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.processes import WARNING
from hpc_toolkit.training.distributed.group import LOGGER, get_distributed_info, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.system.clock import Clock


_SIGNALS = (WARNING, signal.SIGTERM)


class StopSignal:
    """Notices SIGUSR1, SIGTERM and the end of the job's time; the ranks then agree on one step.

    Signals reach ranks at different steps, so each only sets a flag. All ranks call `agreed` once
    after every step. Every few steps, about once per ``look_every_s``, it makes one all-reduce
    (MAX) of two numbers: whether a rank wants to stop, and rank 0's choice of the number of steps
    until the next check. So it returns True on all ranks after the same step::

        with process_group(), StopSignal() as stop:
            for step in ...:
                ...
                if stop.agreed(saving_s=checkpoints.saving_s):
                    checkpoints.save(step)
                    raise SystemExit(TRY_AGAIN)

    If a step takes longer than the one before it, the next check comes later than ``look_every_s``.
    The number of steps between checks at most doubles each time. A rank that hangs within a step
    does not stop.
    """

    def __init__(
        self,
        signals: Iterable[int] = _SIGNALS,
        *,
        deadline: float | None = None,
        margin_s: float = 30.0,
        look_every_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        """Watch ``signals`` and a ``deadline`` in epoch seconds, by default HPCTK_DEADLINE.

        ``margin_s`` is how long before the deadline the checkpoint should be complete.
        """
        self._signals = tuple(signals)
        self._deadline = _deadline_of(os.environ) if deadline is None else deadline
        self._margin_s = margin_s
        self._look_every_s = look_every_s
        self._clock = clock or SystemClock()
        self._before: dict[int, Any] = {}
        self._steps = 0
        self._next_look = 1
        self._looked = (0, self._clock.monotonic())
        self.received: int | None = None
        """The last signal that this rank got, if any."""
        self.stopping = False
        """Whether the ranks agreed to stop."""

    def __enter__(self) -> Self:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        self._looked = (self._steps, self._clock.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            # A second warning signal must not kill a rank that is already leaving.
            signal.signal(number, signal.SIG_IGN if self.stopping else before)

    def agreed(self, *, saving_s: float = 0.0) -> bool:
        """Return whether all ranks stop after this step; every rank calls it after each step.

        ``saving_s`` is how long a checkpoint takes; this time is kept free before the deadline.
        """
        self._steps += 1
        if self.stopping or self._steps < self._next_look:
            return self.stopping
        step_s, steps = self._pace()
        ready_by = self._clock.wall() + saving_s + steps * step_s + self._margin_s
        wants = self.received is not None or ready_by >= self._deadline
        wanted, steps = _highest(int(wants), steps)
        self._next_look = self._steps + max(1, steps)
        # Read the clock after the all-reduce: the wait for other ranks must not count as step time.
        self._looked = (self._steps, self._clock.monotonic())
        self.stopping = bool(wanted)
        if self.stopping:
            why = signal.Signals(self.received).name if self.received else "deadline or other rank"
            logging.getLogger(LOGGER).info("stopping after %d steps here: %s", self._steps, why)
        return self.stopping

    def _pace(self) -> tuple[float, int]:
        """Return the seconds per step since the last check, and the steps until the next one."""
        steps, then = self._looked
        passed = self._steps - steps
        step_s = (self._clock.monotonic() - then) / passed
        fitting = math.floor(self._look_every_s / step_s) if step_s > 0 else 2 * passed
        return step_s, max(1, min(fitting, 2 * passed))

    def _note(self, number: int, _frame: object) -> None:
        self.received = number


def _highest(wanted: int, steps: int) -> tuple[int, int]:
    """Return the maximum of ``wanted`` over the ranks, and rank 0's ``steps``."""
    if world_size() == 1:
        return wanted, steps
    import torch
    import torch.distributed as dist

    info = get_distributed_info()
    pair = torch.tensor([wanted, steps if dist.get_rank() == 0 else 0], device=info.device)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX)
    highest, chosen = pair.tolist()
    return highest, chosen


def _deadline_of(environ: os._Environ[str]) -> float:
    text = environ.get("HPCTK_DEADLINE")
    try:
        return float(text) if text else math.inf
    except ValueError as error:
        msg = f"HPCTK_DEADLINE is {text!r}, which is not a time in epoch seconds"
        hint = "unset it, or set it to epoch seconds as printed by 'date +%s'"
        raise ConfigError(msg, hint=hint) from error
