"""One real coordinator on files in memory, played from what the files answered it (rule R14).

All that a coordinator does follows from its answers: which entries of the logs and which results it
sees, and what became of the names that it creates. So its answers so far are its whole state, and
it is played again from its beginning to the next question. A question that it asks to the files is
one step; what it sees may be as old as what it saw before, and never older.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest

import hpc_toolkit.campaign.coordinator
import hpc_toolkit.campaign.search
from hpc_toolkit.bandit import Observation, Pull, make_policy
from hpc_toolkit.bandit.asktell import round_options
from hpc_toolkit.campaign.coordinator import Coordinator
from hpc_toolkit.campaign.settings import METRICS, TASKS
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue import log
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir.journal import encode_line
from tests.model.memorydisk import ROOT, Content, Disk, mounted, run_paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpc_toolkit.bandit import ArmTable, Policy, StopRules
    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.rundir.layout import Manifest

SCORES = {1: 1.0, 2: 0.0}
"""Of every item, by the generation that did it: two results of one item never agree."""


class Result(NamedTuple):
    """A ``done`` line."""

    stage: str
    entry: int
    item: int
    """Its position."""
    generation: int
    unit: str

    @property
    def journal(self) -> tuple[str, bytes]:
        """The journal that has it, and nothing else."""
        worker = f"w-{self.stage}-{self.entry}-{self.item}-{self.generation}"
        record = {
            "type": "done",
            "unit": f"{self.stage}/{self.unit}",
            "generation": self.generation,
            "item": self.item,
            "at": 0.0,
            "seconds": 1.0,
            "value": {"score": SCORES[self.generation]},
        }
        return f"{ROOT}/journals/{worker}.jsonl", encode_line(record)


class Answer(NamedTuple):
    """What the files say to a coordinator."""

    what: str
    """``miss``, ``entry`` or ``still`` without its payload, of a look at the log; ``results``;
    ``won``, ``repeated``, ``lost`` or ``taken`` of a name that it creates; ``woke`` after a sleep.
    """
    target: str = ""
    data: bytes | None = b""
    """Of the entry that it sees; None while that is not visible."""
    results: tuple[Result, ...] = ()
    """That it sees for the first time."""


class Halt(NamedTuple):
    """Where a coordinator stands: before a question, or at its end."""

    at: str
    """``log``, ``results``, ``create``, ``sleep`` or ``end``."""
    stage: str = ""
    entry: int = 0
    target: str = ""
    data: bytes = b""
    code: int = -1
    error: str = ""
    asked: tuple[str, ...] = ()
    """The arms that it asked, replayed ones included."""
    mine: int = 0
    """Decisions that it replayed or wrote."""
    met: int = 0
    """Decisions in what it read of the log."""
    seen: tuple[Result, ...] = ()
    segments: tuple[tuple[int, bytes], ...] = ()
    """What it read of the log of the tasks, by entry."""
    excuse: str = ""
    """Why it may end without a rival: a reply was ``lost``, a payload is ``late``."""


class _Suspended(BaseException):
    """There is no answer yet."""

    def __init__(self, halt: Halt) -> None:
        super().__init__(halt)
        self.halt = halt


class Steered:
    """A policy of which each ask shows the last told score: then the first arm, else the last."""

    name = "steered"

    def __init__(self, arms: ArmTable, stop: StopRules | None) -> None:
        self._arms = arms
        self._budget = None if stop is None else stop.pulls
        self._told: dict[str, Observation] = {}

    def tell(self, observation: Observation) -> None:
        known = self._told.setdefault(observation.arm, observation)
        assert known == observation, "an arm is told another result"

    def ask(self, n: int, pending: Sequence[Pull] = ()) -> list[Pull]:
        taken = {*self._told, *(pull.arm for pull in pending)}
        free = [arm for arm in self._arms.ids if arm not in taken]
        scores = [score for told in self._told.values() for score in told.scores.values()]
        chosen = free if 2 * sum(scores) >= len(scores) else free[::-1]
        return [Pull(arm) for arm in chosen[:n]]

    def stop(self, pending: Sequence[Pull] = ()) -> str | None:
        spent = len({*self._told, *(pull.arm for pull in pending)})
        return None if self._budget is None or spent < self._budget else "the budget"


def made_policy(name: str, arms: ArmTable, seed: int, **options: Any) -> Policy:
    """``steered``, or a real one."""
    if name == Steered.name:
        return cast("Policy", Steered(arms, options.get("stop")))
    return make_policy(name, arms, seed, **options)


def options_of(name: str, options: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Of the policy of the tests there are none."""
    return dict(options) if name == Steered.name else round_options(name, options, size)


class _InMemory(Coordinator):
    """Says from when on the log of the tasks matters, and what was replayed."""

    files: _Files
    replayed = 0

    def _replay(self, rows: list[dict[str, Any]] | None) -> None:
        self.files.deciding = True
        super()._replay(rows)
        self.replayed = self._search.decisions.entries


class _Files(Disk):
    """Answers as it is told, and ends the coordinator at the first question beyond that."""

    def __init__(self, base: dict[str, Content], answers: Sequence[Answer], known: bool) -> None:
        super().__init__(dict(base), {}, name="coordinator")
        self._known = known
        self.deciding = not known
        """Whether looks are questions; before that all is as ``base`` has it."""
        self.seen: set[Result] = set()
        self.late: set[str] = set()
        self._answers = iter(answers)
        self.no_reply = False
        self.asks = 0
        """That it wrote."""

    def ask(self, halt: Halt) -> Answer:
        answer = next(self._answers, None)
        if answer is None:
            raise _Suspended(halt)
        return answer

    def urandom(self, count: int) -> bytes:
        return sum("/log/" in key for key in self.image).to_bytes(count, "big")

    def listdir(self, path: object) -> list[str]:
        if str(path) == f"{ROOT}/journals" and self.deciding:
            for result in self.ask(Halt("results")).results:
                self.seen.add(result)
                name, data = result.journal
                self.image[name] = data
        return super().listdir(path)

    def readlink(self, path: object) -> str:
        key = str(path)
        stage, entry = _place(key)
        open_ = self.deciding and not (self._known and stage == METRICS)
        if (key not in self.image or key in self.late) and open_:
            answer = self.ask(Halt("log", stage, entry))
            if answer.what == "entry":
                self._show(key, stage, answer)
        return super().readlink(path)

    def _show(self, key: str, stage: str, answer: Answer) -> None:
        self.image[key] = answer.target
        if answer.data is None:
            self.late.add(key)
        else:
            self.late.discard(key)
            self.image[f"{ROOT}/stages/{stage}/{answer.target}"] = answer.data

    def symlink(self, target: str, path: object) -> None:
        key = str(path)
        stage, entry = _place(key)
        data = self.image.get(f"{ROOT}/stages/{stage}/{target}", b"")
        assert isinstance(data, bytes)
        answer = self.ask(Halt("create", stage, entry, target, data))
        if answer.what == "taken":
            self._show(key, stage, answer)
        else:
            self._put(key, target)
            self.asks += stage == TASKS and target.startswith("items/")
        if answer.what in ("taken", "repeated"):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), key)
        if answer.what == "lost":
            self.no_reply = True
            raise OSError(errno.EIO, os.strerror(errno.EIO), key)


def _place(key: str) -> tuple[str, int]:
    parts = key.split("/")
    assert parts[-2] == "log", key
    return parts[-3], int(parts[-1])


def play(
    campaign: Campaign,
    manifest: Manifest,
    base: dict[str, Content],
    answers: Sequence[Answer],
    *,
    known: bool,
) -> tuple[Halt, Any]:
    """Where a coordinator stands that was answered so, and a value that is equal where all is equal
    on which its next steps rest; ``known``: what it does before its replay is settled by ``base``.
    """
    disk = _Files(base, answers, known)
    where: list[Any] = []
    with mounted(disk):
        paths = run_paths()
        view = RunView(paths, manifest)
        coordinator = _InMemory(view, campaign)
        coordinator.files = disk
        try:
            coordinator.run()
            halt = Halt("end", code=0)
        except _Suspended as suspended:
            halt = suspended.halt
            where = _frames(suspended)
        except HpcToolkitError as error:
            halt = Halt("end", code=error.exit_code, error=error.message)
        except OSError as error:  # as the command line has it
            halt = Halt("end", code=75, error=str(error))
        search, found = getattr(coordinator, "_search", None), coordinator._stage.log.segments
        decisions = None if search is None else (search.decisions, search.fresh)
        halt = halt._replace(
            asked=tuple(pull.arm for pull in search.decisions.asked) if search else (),
            mine=coordinator.replayed + disk.asks,
            met=sum(segment.decision is not None for segment in found.values()),
            seen=tuple(sorted(disk.seen)),
            segments=tuple((entry, segment.path.read_bytes()) for entry, segment in found.items()),
            excuse="late" if disk.late else "lost" if disk.no_reply else "",
        )
    if halt.at == "end":
        return halt, (halt.code, halt.asked, halt.excuse, halt.met > halt.mine)
    read = [
        (name, data)
        for name, data in sorted(disk.image.items())
        if ("/log/" in name or "/items/" in name) and name not in base
    ]
    taken = [stage._taken for stage in view.stages.values()]
    return halt, repr((halt, where, decisions, read, taken))


def _frames(suspended: _Suspended) -> list[Any]:
    """Each function that is not done, its line and its plain variables."""
    found = []
    at = suspended.__traceback__
    while at is not None:
        names = sorted(at.tb_frame.f_locals.items())
        plain = [(name, text) for name, value in names if " at 0x" not in (text := _text(value))]
        found.append((at.tb_frame.f_code.co_name, at.tb_lineno, plain))
        at = at.tb_next
    return found[1:]


def _text(value: object) -> str:
    return repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)


@contextmanager
def coordinators_at_hand() -> Iterator[None]:
    """Have coordinators stop where they would sleep, and know the policy of the tests."""

    def sleep(_seconds: float) -> None:
        from tests.model.memorydisk import _disks

        cast("_Files", _disks[-1]).ask(Halt("sleep"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCTK_FILESYSTEM", "local")
        patch.setattr(hpc_toolkit.campaign.coordinator, "time", SimpleNamespace(sleep=sleep))
        patch.setattr(hpc_toolkit.campaign.coordinator, "monotonic", lambda: 0.0)
        patch.setattr(hpc_toolkit.bandit, "make_policy", made_policy)
        patch.setattr(hpc_toolkit.campaign.search, "round_options", options_of)
        patch.setattr(log, "_TRIES", 2)
        patch.setattr(log, "_PAUSE_S", 0.0)
        yield


def decisions_in(segments: Sequence[bytes]) -> list[dict[str, Any]]:
    """What the headers say that was decided."""
    headers = [json.loads(data.partition(b"\n")[0]) for data in segments]
    return [header["decision"] for header in headers if header.get("decision") is not None]
