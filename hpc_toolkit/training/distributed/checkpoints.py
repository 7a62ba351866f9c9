"""A training's checkpoints: written whole or not at all, and read only if they are."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.rundir.files import list_names, replacing_file
from hpc_toolkit.training.distributed.generators import generator_states, set_generator_states
from hpc_toolkit.training.distributed.logs import LOGGER
from hpc_toolkit.training.distributed.place import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FORMAT = "hpctk-training-1"
"""What the file says it is."""

_NAME = re.compile(r"step-(\d{9})\.pt")
_log = logging.getLogger(LOGGER)


class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a sampler, a gradient scaler."""

    def state_dict(self) -> Any:
        """Its state, of tensors, numbers, texts, lists and dicts."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take that state up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a training goes on from."""

    step: int
    """Optimizer steps that were made."""
    path: Path
    """The file."""
    values: dict[str, Any]
    """What else was given to `Checkpoints.save`."""


class Checkpoints:
    """Checkpoints ``step-<n>.pt`` in a directory that all ranks see and that one training writes.

    A file holds the state of every part, the random number generators of every rank and the step.
    Rank 0 writes it under another name, syncs it, and gives it its name at last, so a kill at any
    moment leaves the older ones and no half one. It is a file of ``torch.save``, which is a pickle
    in a zip archive; it is read with ``weights_only=True``, which builds tensors and plain values
    and runs no code of the file's. Each rank must hold the whole model: states that are sharded
    over ranks are not gathered.
    """

    def __init__(
        self,
        directory: str | Path,
        parts: Mapping[str, Stateful],
        *,
        keep: int = 2,
        every: int = 0,
    ) -> None:
        """Save and restore ``parts`` by their names; a wrapped model is saved without its wrapping.

        ``keep`` is how many are kept, the one written last and the latest others; ``every`` how
        many steps lie between two that are `due`, 0 for none.
        """
        if keep < 1 or every < 0:
            msg = f"keep is {keep} and every is {every}"
            raise HpcToolkitError(msg, hint="keep at least 1, every 0 or more steps")
        self._directory = Path(directory)
        self._parts = dict(parts)
        self._keep = keep
        self._every = every
        self.saving_s = 0.0
        """How long the last save took on this rank; 0 before the first."""

    def due(self, step: int) -> bool:
        """Whether step ``step``, counted from 1, is one to save after."""
        return bool(self._every) and step % self._every == 0

    def save(self, step: int, **values: Any) -> Path:
        """Write the checkpoint after ``step`` steps; every rank calls it, after the same step.

        It is on disk when this returns, on any rank; then the oldest are removed. ``values`` are
        plain ones or tensors; rank 0's are kept.

        Raises:
            HpcToolkitError: on all ranks, where rank 0 cannot write.
        """
        began = time.monotonic()
        path = self._directory / f"step-{step:09d}.pt"
        generators = _gathered(generator_states())
        failure = ""
        if rank_and_size()[0] == 0:
            try:
                self._write(path, self._content(step, generators, values))
            except (OSError, RuntimeError) as error:  # torch wraps what a full disk says
                failure = f"{error}"
        failure = _of_main(failure)
        if failure:
            msg = f"{path} cannot be written: {failure}"
            raise HpcToolkitError(msg, hint="free space there; the checkpoints before it are whole")
        self.saving_s = time.monotonic() - began
        return path

    def latest(self) -> Path | None:
        """The latest whole checkpoint, as this process sees the directory; None without one."""
        return next(self._whole(), None)

    def restore(self) -> Restored | None:
        """Load the latest checkpoint that every rank can read; None if there is none.

        Every rank calls it. Files that are torn or none of ours are left alone, with a warning that
        says why. Where the world size changed, ranks beyond the old ones keep their generators.

        Raises:
            HpcToolkitError: it is whole, and does not fit the parts.
        """
        names = _of_main([path.name for path in self._whole()] if rank_and_size()[0] == 0 else [])
        for name in names:
            path = self._directory / name
            content, reason = _read(path)
            # Who restores what others cannot read would train something else.
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
            "parts": {name: _bare(part).state_dict() for name, part in self._parts.items()},
            "kinds": self._kinds(),
            "generators": generators,
            "values": values,
        }

    def _kinds(self) -> dict[str, str]:
        return {name: type(_bare(part)).__name__ for name, part in self._parts.items()}

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        import torch

        self._directory.mkdir(parents=True, exist_ok=True)
        for name in list_names(self._directory):
            if name.startswith(".step-") and name.endswith(".tmp"):
                # A killed writer left it: there is one writer, and this is it.
                (self._directory / name).unlink(missing_ok=True)
        with replacing_file(path) as file:
            torch.save(content, file)
        # Not this one, though others may have later steps: of a training before, or damaged.
        others = [old for old in self._named() if old != path]
        for old in others[self._keep - 1 :]:
            with contextlib.suppress(OSError):
                old.unlink()

    def _named(self) -> list[Path]:
        """Files that are called like checkpoints, the latest first."""
        names = sorted(filter(_NAME.fullmatch, list_names(self._directory)), reverse=True)
        return [self._directory / name for name in names]

    def _whole(self) -> Iterator[Path]:
        for path in self._named():
            if damage := _damage(path):
                _log.warning("skipped %s: %s", path, damage)
            else:
                yield path

    def _take_up(self, path: Path, content: dict[str, Any]) -> None:
        saved = content["parts"]
        if set(saved) != set(self._parts):
            msg = f"{path} holds {sorted(saved)}, and the training has {sorted(self._parts)}"
            raise HpcToolkitError(msg, hint="resume with the same parts, or in another directory")
        # An optimizer takes up the state of another kind without a word, and fails at its first
        # step. Files of hpc_toolkit's first versions say no kinds.
        kinds = content.get("kinds", {})
        for name, kind in self._kinds().items():
            if kinds.get(name, kind) != kind:
                msg = f"{path} does not fit: {name} is {kinds[name]} there, and {kind} here"
                hint = "resume with the same kinds of parts, or in another directory"
                raise HpcToolkitError(msg, hint=hint)
        for name, part in self._parts.items():
            try:
                _bare(part).load_state_dict(saved[name])
            except (RuntimeError, ValueError, KeyError) as error:
                msg = f"{path} does not fit: {name}: {error}"
                hint = "resume with the same model and settings, or in another directory"
                raise HpcToolkitError(msg, hint=hint) from error
        rank = rank_and_size()[0]
        if rank < len(content["generators"]):
            set_generator_states(content["generators"][rank])


def _bare(part: Any) -> Any:
    """A part without DistributedDataParallel around it, whose names differ."""
    from hpc_toolkit.training.distributed.wrapping import unwrapped

    return unwrapped(part)


def _damage(path: Path) -> str:
    """Why a file is no whole archive; "" if each of its bytes is what was written.

    torch itself reads on over bytes that changed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as error:  # noqa: BLE001 - a changed byte may name an encryption, or no text
        return f"it is no whole file of torch.save: {error}"
    return f"it is damaged in {bad}" if bad else ""


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """A checkpoint on the CPU, and why it cannot be one if it cannot."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a foreign file may raise anything in torch
        return {}, f"torch cannot load it: {str(error).splitlines()[0]}"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return {}, f"it is no checkpoint of the format {FORMAT}"
    return content, ""


def _gathered(value: Any) -> list[Any]:
    """The ranks' values, in their order (torch.distributed.all_gather_object)."""
    size = rank_and_size()[1]
    if size == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * size
    dist.all_gather_object(found, value)
    return found


def _of_main(value: Any) -> Any:
    """Rank 0's value (torch.distributed.broadcast_object_list)."""
    if rank_and_size()[1] == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
