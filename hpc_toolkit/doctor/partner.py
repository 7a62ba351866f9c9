"""The other side: carries out the lead's requests through its own path to the directory.

It is a child of the lead, or the second task of a Slurm step.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.doctor import filesystem, locks, node
from hpc_toolkit.doctor.children import Child
from hpc_toolkit.doctor.sides import (
    ANSWER_S,
    BYE,
    LEAD,
    OTHER,
    Channel,
    SilentSideError,
    make_area,
    remove_area,
    side_of,
)
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.system.ranks import in_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

ARRIVAL_S = 20.0
STEP_ARRIVAL_S = 180.0
"""Tasks of one step may start minutes apart on a busy cluster."""
_GOES_WITHIN_S = 1.0


class Partner:
    def __init__(self, area: Path) -> None:
        self._area = area
        self._holder: locks.Holder | None = None
        self._changes: filesystem.Changes | None = None

    def serve(self, *, arrival_s: float) -> None:
        """Answer the lead's requests until it ends the examination, or is silent."""
        channel = Channel(self._area, OTHER, LEAD)
        channel.connect(arrival_s)
        number, act = 0, ""
        try:
            while act != BYE:
                number += 1
                asked = channel.receive(number, ANSWER_S)
                act = asked.pop("act")
                channel.send(number, self._answer(act, asked))
        finally:
            self._let_go()

    def _answer(self, act: str, words: dict[str, Any]) -> dict[str, Any]:
        acts: dict[str, Callable[..., Any]] = {
            "where": lambda: side_of(self._area.parent).to_json(),
            "race": lambda own: filesystem.race(self._area / "race", own),
            "prepare": self._prepare,
            "change": self._change,
            "hold": self._hold,
            "let_go": self._let_go,
            "try": lambda name: locks.try_lock(self._area / name),
            "devices": node.look_at_gpus,
            BYE: os.getpid,
        }
        try:
            return {"answer": acts[act](**words)}
        except OSError as error:
            told = {"errno": error.errno or 0, "error": error.strerror or str(error)}
            return {**told, "path": str(error.filename) if error.filename else None}

    def _prepare(self, name: str) -> None:
        self._changes = filesystem.Changes(self._area / name)

    def _change(self) -> None:
        assert self._changes is not None
        self._changes.make()

    def _hold(self, name: str) -> str:
        self._holder = locks.Holder(self._area / name)
        return self._holder.outcome

    def _let_go(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder = None


@dataclass(frozen=True, slots=True)
class Step:
    token: str
    """Identifier that both tasks share, and that no other step has."""
    leads: bool
    """Whether this task examines and reports."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Step | None:
        """Return the step of this process; None outside a step, or in a step of one task."""
        if not in_step(environ):
            return None
        tasks = environ.get("SLURM_NTASKS", "")
        if tasks == "1":
            return None
        if tasks != "2":
            message = f"this step has {tasks or 'an unknown number of'} tasks; doctor needs two"
            raise ConfigError(message, hint="srun -N2 --ntasks-per-node=1 hpctk doctor DIR")
        keys = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        token = "-".join(environ.get(key) or "0" for key in keys)
        return cls(re.sub(r"[^A-Za-z0-9-]", "-", token), environ.get("SLURM_PROCID") == "0")


def join_step(directory: Path, step: Step, *, arrival_s: float = STEP_ARRIVAL_S) -> None:
    """Act as the second task of a step: carry out the requests of the first one, which reports."""
    try:
        area = make_area(directory, step.token, OTHER)
    except OSError as error:
        message = f"cannot write to {directory}: {error.strerror}"
        raise RunError(message, hint="both nodes must see the directory and may write") from error
    try:
        Partner(area).serve(arrival_s=arrival_s)
    except SilentSideError:
        # In all other cases the first task removes the area.
        remove_area(area)
        raise


@contextmanager
def helper(root: Path, area: Path) -> Iterator[None]:
    """Have the other side as a child, which uses ``root``, a path to the directory of ``area``."""
    _check_same(root, area, root / area.name)
    token = area.name.rpartition("doctor-")[2]
    child = Child(lambda: Partner(make_area(root, token, OTHER)).serve(arrival_s=ARRIVAL_S))
    try:
        yield
        with suppress(TimeoutError, OSError):
            child.answer(_GOES_WITHIN_S)
    finally:
        child.end()


def _check_same(root: Path, area: Path, twin: Path) -> None:
    """Check by mkdir that both paths lead to one directory: a lookup might only ask a cache."""
    try:
        twin.mkdir()
    except FileExistsError:
        return
    except OSError as error:
        message = f"cannot write to {root}: {error.strerror}"
        raise ConfigError(message, hint="--pair names another mount of the directory") from error
    with suppress(OSError):
        twin.rmdir()
    message = f"{root} is not {area.parent} through another mount"
    raise ConfigError(message, hint="--pair names another mount of the directory")
