"""Claims: names that only one worker can create (rules R1, R3)."""

from __future__ import annotations

from pathlib import Path

from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import StagePaths

_SUFFIX = ".lock"
_FIRST = f".1{_SUFFIX}"


def claim_name(unit: str, generation: int) -> str:
    return f"{unit}.{generation}{_SUFFIX}"


def parse_claim(name: str) -> tuple[str, int] | None:
    """(unit, generation) of a claim's file name; None for any other file."""
    stem, dot, generation = name.removesuffix(_SUFFIX).rpartition(".")
    if not name.endswith(_SUFFIX) or not dot or not generation.isdigit():
        return None
    return stem, int(generation)


class Claims:
    """The claims of a stage that one process knows; an outdated view only costs repeated work."""

    def __init__(self, paths: StagePaths, *, local: bool = False) -> None:
        """``local``: the directory is on a filesystem of this kernel alone."""
        self._paths = paths
        self._local = local
        self._twins: dict[str, Path] = {}
        """The newest claim of each worker that claims through this object."""
        self.newest: dict[str, int] = {}
        """Highest generation seen of each claimed unit."""
        self._owners: dict[tuple[str, int], str] = {}

    def refresh(self) -> None:
        for name in files.list_names(self._paths.claims):
            # Nearly all claims are first ones, and a long list has tens of thousands.
            if name.endswith(_FIRST):
                self.newest.setdefault(name[: -len(_FIRST)], 1)
            elif (parsed := parse_claim(name)) is not None:
                self._note(*parsed)

    def _note(self, unit: str, generation: int) -> None:
        if generation > self.newest.get(unit, 0):
            self.newest[unit] = generation

    def generation(self, unit: str) -> int:
        """The newest generation seen; 0 if no worker claimed the unit."""
        return self.newest.get(unit, 0)

    def owner(self, unit: str, generation: int) -> str:
        """The worker that a claim names. Raises OSError: the claim cannot be read now."""
        key = (unit, generation)
        if key not in self._owners:
            path = self._paths.claims / claim_name(unit, generation)
            self._owners[key] = files.read_name(path)
        return self._owners[key]

    def create(self, unit: str, generation: int, worker: str) -> bool:
        """Claim a generation of a unit; return whether ``worker`` owns it.

        Raises OSError: the claim could not be created and does not exist.
        """
        path = self._paths.claims / claim_name(unit, generation)
        try:
            owner = files.create_name(path, worker, twin=self._twins.get(worker))
        except OSError:
            if not path.is_symlink() and not path.exists():
                raise
            # The claim exists but cannot be read: time its owner like a silent worker (rule R6).
            self._note(unit, generation)
            return False
        self._owners[unit, generation] = owner
        self._note(unit, generation)
        if owner == worker and self._local:
            self._twins[worker] = path
        return owner == worker

    def overtaken(self, unit: str, generation: int) -> bool:
        """Check the directory for a claim of the next generation."""
        path = self._paths.claims / claim_name(unit, generation + 1)
        if not path.is_symlink():
            return False
        self._note(unit, generation + 1)
        return True
