"""Checkpoints of a training, written atomically and read only if they are intact; the agreement of
all ranks on one step after which they save their state and exit with 75.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import re
import signal
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.rundir.files import list_names, replacing_file
from hpc_toolkit.system.clock import Clock, SystemClock
from hpc_toolkit.system.processes import WARNINGS
from hpc_toolkit.training.distributed.group import LOGGER, rank_and_size, unwrapped, world_size


def generator_states() -> dict[str, Any]:
    """Return the states of torch on the CPU and this rank's GPU, and of Python's ``random``.

    NumPy's are not included: code that uses NumPy should create its own generators.
    """
    import torch

    version, words, gauss = random.getstate()
    cuda = torch.cuda.is_available()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
    }


def set_generator_states(states: dict[str, Any]) -> None:
    """Restore the result of `generator_states`; without a GPU its GPU state is ignored."""
    import torch

    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))


FORMAT = "hpctk-training-1"

CHECKPOINT_NAME = re.compile(r"step-(\d{9})\.pt")
"""Names of checkpoints; they sort by step."""
_log = logging.getLogger(LOGGER)


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a sampler, a gradient scaler."""

    def state_dict(self) -> Any:
        """Return the state, made of tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state that ``state_dict`` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The checkpoint from which a training resumes."""

    step: int
    """Number of optimizer steps done."""
    path: Path
    values: dict[str, Any]
    """The other values that were given to `Checkpoints.save`."""


class Checkpoints:
    """Checkpoints ``step-<n>.pt`` in a directory that all ranks see and that one training writes.

    A file holds the state of every part, the random number generators of every rank and the step.
    Rank 0 writes it under another name, syncs it and then renames it, so a kill at any moment
    leaves the older files and never a partial one. The file is written by ``torch.save``: a pickle
    in a zip archive. It is read with ``weights_only=True``, which builds tensors and plain values
    and runs no code from the file. Each rank must hold the complete model: states that are sharded
    over ranks are not gathered.
    """

    def __init__(
        self, directory: str | Path, parts: Mapping[str, Stateful], *, keep: int = 2, every: int = 0
    ) -> None:
        """Save and restore ``parts`` by their names; a wrapped model is saved without its wrapper.

        ``keep`` is the number of files to keep: the one written last and the latest others.
        ``every`` is the number of steps between two checkpoints that are `due`, 0 for none.
        """
        if keep < 1 or every < 0:
            msg = f"keep is {keep} and every is {every}"
            raise HpcToolkitError(msg, hint="keep at least 1, every 0 or more steps")
        self._directory = Path(directory)
        # DistributedDataParallel changes the names of parameters.
        self._parts = {name: unwrapped(part) for name, part in parts.items()}
        self._kinds = {name: type(part).__name__ for name, part in self._parts.items()}
        self._keep = keep
        self._every = every
        self.saving_s = 0.0
        """How long the last save took on this rank; 0 before the first."""

    def due(self, step: int) -> bool:
        """Return whether to save after step ``step``, counted from 1."""
        return bool(self._every) and step % self._every == 0

    def save(self, step: int, **values: Any) -> Path:
        """Write the checkpoint after ``step`` steps; every rank calls this after the same step.

        When it returns on any rank, the file is on disk and the oldest ones are removed.
        ``values`` are plain values or tensors; those of rank 0 are saved.

        Raises HpcToolkitError if rank 0 cannot write; raised on all ranks.
        """
        began = time.monotonic()
        path = self._directory / f"step-{step:09d}.pt"
        generators = _gathered(generator_states())
        failure = ""
        if rank_and_size()[0] == 0:
            try:
                self._write(path, self._content(step, generators, values))
            except (OSError, RuntimeError) as error:  # torch wraps the error of a full disk
                failure = f"{error}"
        if failure := _of_main(failure):
            msg = f"{path} cannot be written: {failure}"
            raise HpcToolkitError(msg, hint="free space there; earlier checkpoints are intact")
        self.saving_s = time.monotonic() - began
        return path

    def restore(self) -> Restored | None:
        """Load the latest checkpoint that every rank can read; return None if there is none.

        Every rank calls this. Damaged files and files of other formats are skipped, with a warning
        that gives the reason. If the world size grew, the added ranks keep their generators.

        Raises HpcToolkitError if the checkpoint is intact but does not fit the parts.
        """
        for path in _of_main(self._named()):
            content, reason = _read(path)
            # All ranks must restore the same file, or they would train different weights.
            if not all(_gathered(not reason)):
                _log.warning("skipped %s: %s", path, reason or "another rank cannot read it")
                continue
            self._take_up(path, content)
            return Restored(step=content["step"], path=path, values=content["values"])
        return None

    def _content(self, step: int, generators: list[Any], values: dict[str, Any]) -> dict[str, Any]:
        import torch

        return {
            "format": FORMAT,
            "step": step,
            "torch": str(torch.__version__),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "kinds": self._kinds,
            "generators": generators,
            "values": values,
        }

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        import torch

        self._directory.mkdir(parents=True, exist_ok=True)
        for name in list_names(self._directory):
            if name.startswith(".step-") and name.endswith(".tmp"):
                # A killed writer left it; this process is the only writer now.
                (self._directory / name).unlink(missing_ok=True)
        with replacing_file(path) as file:
            torch.save(content, file)
        # Keep the new file even if others have later steps: an earlier training's, or damaged ones.
        for old in [old for old in self._named() if old != path][self._keep - 1 :]:
            with contextlib.suppress(OSError):
                old.unlink()

    def _named(self) -> list[Path]:
        """Return the files that are named like checkpoints, the latest first."""
        names = sorted(filter(CHECKPOINT_NAME.fullmatch, list_names(self._directory)), reverse=True)
        return [self._directory / name for name in names]

    def _take_up(self, path: Path, content: dict[str, Any]) -> None:
        saved = content["parts"]
        if set(saved) != set(self._parts):
            msg = f"{path} holds {sorted(saved)}, and the training has {sorted(self._parts)}"
            raise HpcToolkitError(msg, hint="resume with the same parts, or use another directory")
        # An optimizer loads the state of another kind silently, and fails at its first step.
        for name, kind in self._kinds.items():
            if (there := content["kinds"][name]) != kind:
                msg = f"{path} does not fit: {name} is {there} there, and {kind} here"
                hint = "resume with the same kinds of parts, or use another directory"
                raise HpcToolkitError(msg, hint=hint)
        for name, part in self._parts.items():
            try:
                part.load_state_dict(saved[name])
            except (RuntimeError, ValueError, KeyError) as error:
                msg = f"{path} does not fit: {name}: {error}"
                hint = "resume with the same model and settings, or use another directory"
                raise HpcToolkitError(msg, hint=hint) from error
        rank = rank_and_size()[0]
        if rank < len(content["generators"]):
            set_generator_states(content["generators"][rank])


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Load a checkpoint on the CPU; return it, and the reason if it cannot be used."""
    import torch

    try:
        # torch itself loads files with changed bytes. One rank checks the bytes for all.
        if rank_and_size()[0] == 0:
            with zipfile.ZipFile(path) as archive:
                if bad := archive.testzip():
                    return {}, f"it is damaged in {bad}"
    except Exception as error:  # noqa: BLE001 - a changed byte may mean encryption, or invalid text
        return {}, f"not a complete file of torch.save: {error}"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a foreign file may raise anything in torch
        return {}, f"torch cannot load it: {str(error).splitlines()[0]}"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return {}, f"not a checkpoint of format {FORMAT}"
    return content, ""


def _gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order (torch.distributed.all_gather_object)."""
    size = rank_and_size()[1]
    if size == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * size
    dist.all_gather_object(found, value)
    return found


def _of_main(value: Any) -> Any:
    """Return rank 0's value (torch.distributed.broadcast_object_list)."""
    if rank_and_size()[1] == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


_SIGNALS = (*WARNINGS, signal.SIGTERM)


class StopSignal:
    """Notices a warning, SIGTERM and the end of the job's time; the ranks then agree on one step.

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

    # NCCL takes no tensor on a CPU. Another library's group does not know `process_group`'s device.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    pair = torch.tensor([wanted, steps if dist.get_rank() == 0 else 0], device=device)
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
