"""Every step that workers and commands can take on one small run.

A state is a value: the files, and of each process what it has seen of them and what it is doing.
A step rebuilds that process from the state and calls the real code: ``Picker``, ``Liveness``,
``ControlReader``, ``UnitRunner``, ``StageLog``, ``gather``, ``retry``. Time is a choice: an owner
was silent for longer than the lease or was not. So is delay: a process may read what it read
before. Exclusive names and a process's own files are never old.
"""

from __future__ import annotations

import errno
from itertools import product
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.control import (
    ControlReader,
    DeathNotice,
    ask_to_drain,
    give_notice,
)
from hpc_toolkit.queue.items import add_items, encode_segment
from hpc_toolkit.queue.leases import Liveness, Verdict
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import DRAINING, FINISHED, RUNNING, Presence, read_presence
from hpc_toolkit.queue.units import claim_name
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.explain import retry_failed
from hpc_toolkit.results.gather import NotCompleteError, gather
from hpc_toolkit.rundir.layout import Manifest, RunPaths
from hpc_toolkit.worker.unitlines import Outcome
from tests.manualclock import ManualClock
from tests.model.hands import KINDS, Hands
from tests.model.memorydisk import ROOT, Content, Disk, mounted, run_paths
from tests.model.values import (
    EVILS,
    STAGE,
    TORN,
    Actor,
    Choices,
    Claim,
    Config,
    Sees,
    State,
    Take,
    claims_in,
    every,
    pay,
    payloads_in,
    put,
    replies,
    spend,
)
from tests.toyrun import plain_items, spec_of, units_of

if TYPE_CHECKING:
    from collections.abc import Iterator


HEAD = f"{STAGE}/head"
HEARTBEAT = 1
"""Of everybody, always: that an owner was silent for the lease is a choice."""


def _head(length: int, told: int) -> bytes:
    """As the log writes it: an entry that follows takes the place of what was told before it."""
    entries = max(length, told)
    return b".\n" * entries + (b"." if 0 < told == entries else b"")


def _told(head: Content) -> int:
    assert isinstance(head, bytes)
    entries, told = divmod(len(head), 2)
    return entries if told else 0


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


class Model:
    """The steps of one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config
        retry: dict[str, Any] = {}
        if config.steps:
            limit = {"on": "oom", "memory": "x2", "up_to": 1 << config.steps}
            retry = {"needs": {"memory": 1}, "retry": limit}
        self.spec = spec_of(max_attempts=config.max_attempts, **retry)
        self.manifest = Manifest(run="run", stages=(self.spec,))
        self.paths: RunPaths = run_paths()
        self.names = [f"w{number}" for number in range(config.workers)]
        self._memo: dict[Any, Any] = {}
        self._beats: dict[tuple[int, str], bytes] = {}

    def place(self, number: int) -> int:
        """Whose host a worker is on."""
        return 0 if self.config.deaths_by == "lock" else number

    def number(self, worker: str) -> int | None:
        return self.names.index(worker) if worker in self.names else None

    def initial(self) -> State:
        """The run as ``init`` leaves it, and processes that have seen nothing."""
        config = self.config
        world: dict[str, Content] = {}
        with mounted(Disk(world, world, name="init")), units_of(config.units[0]):
            log = StageLog(self.paths.stage("items"))
            log.add_segment(encode_segment(plain_items(sum(config.units)), group_by=None))
            if config.sealed:
                log.seal()
        sees = Sees(0, frozenset(), (0,) * config.workers, 0)
        return State(
            log=tuple(str(world[f"{STAGE}/log/{n:06d}"]) for n in range(1, log.length + 1)),
            payloads=frozenset(payloads_in(world)),
            claims=frozenset(),
            journals=(b"",) * config.workers,
            presence=(RUNNING,) * config.workers,
            control=(),
            told=0,
            actors=(Actor("idle", sees),) * (config.workers + len(config.people)),
            left=tuple(config.evils.get(evil, 0) for evil in EVILS),
        )

    # What a process sees.

    def files(self, state: State, sees: Sees | None = None) -> dict[str, Content]:
        """The files, all of them or as one process sees them."""
        log = state.log if sees is None else state.log[: sees.log]
        claims = state.claims if sees is None else sees.claims
        control = state.control if sees is None else state.control[: sees.control]
        found: dict[str, Content] = {f"{STAGE}/{path}": data for path, data in state.payloads}
        found[HEAD] = _head(len(log), state.told if sees is None else sees.told)
        found.update((f"{STAGE}/log/{n:06d}", target) for n, target in enumerate(log, 1))
        found.update(
            (f"{STAGE}/claims/{claim_name(unit, generation)}", owner)
            for unit, generation, owner in claims
        )
        found.update((f"{ROOT}/control/{name}", data) for name, data in control)
        for number, name in enumerate(self.names):
            data = state.journals[number]
            if sees is not None:
                data = data[: sees.journals[number]]
            found[f"{ROOT}/journals/{name}.jsonl"] = data
            found[f"{ROOT}/workers/{name}.json"] = self._beat(number, state.presence[number])
        return found

    def _beat(self, number: int, presence: str) -> bytes:
        key = (number, presence)
        if key not in self._beats:
            # Wall clocks are years apart: nothing may depend on them.
            at = [0.0, 4e9, 1.7e9][number % 3]
            place = self.place(number)
            self._beats[key] = Presence(
                worker=self.names[number],
                host=f"host-of-{place}",
                boot=f"boot-{place}",
                pid=1,
                rank=number,
                job=None,
                state=presence,
                heartbeat=HEARTBEAT,
                at=at,
                started=at,
            ).encode()
        return self._beats[key]

    def _looks(self, state: State, who: int, sees: Sees) -> Iterator[Sees]:
        """What a process may see next: of each kind of file the newest, or what it saw."""
        stale = self.config.stale
        parts: list[list[Any]] = [
            [len(state.log), *([sees.log] if "log" in stale else [])],
            [state.claims, *([sees.claims] if "claims" in stale else [])],
            [len(state.control), *([sees.control] if "control" in stale else [])],
        ]
        for number, journal in enumerate(state.journals):
            old = number != who and "journals" in stale
            parts.append([len(journal), *([sees.journals[number]] if old else [])])
        parts.append([state.told, *([sees.told] if "head" in stale else [])])
        yield from {
            Sees(log, claims, tuple(journals), control, word, sees.old)
            for log, claims, control, *journals, word in product(*map(set, parts))
        }

    # Steps.

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Every (what happens, state after it) but those that change nothing."""
        for who, actor in enumerate(state.actors):
            if actor.phase in ("gone", "dead"):
                continue
            if who >= self.config.workers:
                found = self._command(state, who, actor)
            elif actor.phase == "pass":
                found = self._pass(state, who, actor)
            else:
                found = self._next(state, who, actor)
            for what, after in found:
                if after != state:
                    yield f"{self.title(who)} {what}", after
            if who < self.config.workers:
                yield from self._crash(state, who, actor)

    def title(self, who: int) -> str:
        workers = self.config.workers
        return self.names[who] if who < workers else f"person {who - workers}"

    def _crash(self, state: State, who: int, actor: Actor) -> Iterator[tuple[str, State]]:
        dead = pay(self._with(state, who, actor._replace(phase="dead")), EVILS, "crash")
        if dead is not None:
            yield f"{self.names[who]} is killed", dead
            if actor.phase == "pass" and self.config.torn:
                torn = self._journal(dead, who, dead.journals[who] + TORN)
                yield f"{self.names[who]} is killed within a line", torn

    def _next(self, state: State, who: int, actor: Actor) -> Iterator[tuple[str, State]]:
        evils = (state.left[EVILS.index("false")], state.left[EVILS.index("lost")])
        for sees in self._looks(state, who, actor.sees):
            key = (
                "next", who, actor.phase, actor.take, *self._content(state, sees),
                state.claims, state.presence, state.told, sees.told, sees.old, *evils,
                tuple(one.phase in ("gone", "dead") for one in state.actors),
            )  # fmt: skip
            if key not in self._memo:
                self._memo[key] = set(every(lambda c: self._decide(state, who, actor, sees, c)))  # noqa: B023
            for outcome, taken, claims, wrong, lost, told, old in self._memo[key]:
                after = state._replace(claims=state.claims | claims, told=told)
                now = sees._replace(claims=sees.claims | claims, old=old)
                left = spend(state.left, EVILS.index("false"), wrong)
                after = after._replace(left=spend(left, EVILS.index("lost"), lost))
                yield from self._settle(after, who, actor._replace(sees=now), outcome, taken)

    def _settle(
        self, state: State, who: int, actor: Actor, outcome: str, taken: Take | None
    ) -> Iterator[tuple[str, State]]:
        idle = actor._replace(phase="idle", take=None, begun=None, script=(), positions=())
        if taken is not None:
            busy = idle._replace(phase="pass", take=taken)
            yield f"takes {taken.unit} generation {taken.generation}", self._with(state, who, busy)
        elif outcome == "wait":
            yield "looks", self._with(state, who, idle)
        elif outcome == "error":
            dead = self._with(state, who, idle._replace(phase="dead", code=75))
            yield "ends after an error", self._presence(dead, who, DRAINING)
        else:
            code = int(outcome)
            gone = self._with(state, who, idle._replace(phase="gone", code=code))
            yield f"leaves with {code}", self._presence(gone, who, FINISHED)

    def _decide(
        self, state: State, who: int, actor: Actor, sees: Sees, choices: Choices
    ) -> tuple[str, Take | None, frozenset[Claim], int, int, int, int]:
        """What one worker does between two passes, as ``Worker._main`` has it."""
        disk = self._disk(state, sees, self.names[who], choices)
        near = self.config.deaths_by == "lock"
        # Between hosts they are taken for free, as where the filesystem keeps none; nobody's own.
        disk.free_locks = {
            name
            for name, one in zip(self.names, state.actors, strict=False)
            if name != self.names[who] and (not near or one.phase in ("gone", "dead"))
        }
        with mounted(disk):
            view, liveness, picker = self._process(state, who, choices, sees)
            log = view.stages["items"].log
            found, outcome = None, "wait"
            try:
                if self._is_drained(who):
                    outcome = "75"
                else:
                    found = self._pick(actor, view, picker, choices)
                    if found is None and actor.phase != "again" and picker.reported_complete:
                        log.report_complete()
                        outcome = "0"
            except OSError:
                outcome = "error"
        created = claims_in(disk.changed)
        # A name that is in the way was read, so it is seen from now on.
        met = claims_in(disk.image) - sees.claims - created
        lost = len(disk.lost)
        taken = None
        if found is not None:
            taken = Take(found.unit.name, found.generation, found.died)
        told = _told(disk.changed[HEAD]) if HEAD in disk.changed else state.told
        old = -1 if log._old_word is None else log._old_word
        return outcome, taken, created | met, liveness.wrong, lost, told, old

    def _process(
        self, state: State, who: int, choices: Choices, sees: Sees
    ) -> tuple[RunView, Verdicts, Picker]:
        name, shared = self.names[who], self.config.shared
        view = RunView(self.paths, self.manifest, local=not shared)
        stage = view.stages["items"]
        mine = [claim[:2] for claim in sees.claims if claim[2] == name]
        if mine and not shared:  # a further claim is a hard link (docs/decisions/claims.md)
            stage.claims._twins[name] = stage.paths.claims / claim_name(*max(mine))
        liveness = Verdicts(self, state, choices, who)
        for notice in ControlReader(self.paths).poll()[1]:
            liveness.take_notice(notice)
        picker = Picker(view, liveness, ManualClock(), name, shared=shared)
        picker._random = choices  # type: ignore[assignment]
        for fresh in picker._fresh.values():
            fresh._random = choices  # type: ignore[assignment]
        if sees.old >= 0:  # it began to read before, and remembers what it was told
            stage.log._old_word, stage.log._complete_at = sees.old, sees.told
        view.poll_claims()
        view.poll()
        return view, liveness, picker

    def _is_drained(self, who: int) -> bool:
        requests, _ = ControlReader(self.paths).poll()
        return any(self.names[who] in request.workers for request in requests)

    def _pick(
        self, actor: Actor, view: RunView, picker: Picker, choices: Choices
    ) -> Assignment | None:
        if actor.phase == "again":
            assert actor.take is not None
            return picker.again(self._assignment(view, actor.take))
        # A death nearby lets a worker look for units to take over first.
        found = picker.takeover() if choices.of(2) else None
        found = found or picker.fresh(("", None))
        if found is None and self.config.shared:
            found = picker.take_released()
        if found is not None or picker.reported_complete:
            return found
        return picker.takeover()

    def _assignment(self, view: RunView, take: Take) -> Assignment:
        stage = view.stages["items"]
        return Assignment(stage, stage.unit(take.unit), take.generation, take.died)

    def _pass(self, state: State, who: int, actor: Actor) -> Iterator[tuple[str, State]]:
        assert actor.take is not None
        if actor.begun is None:
            begun = actor._replace(begun=actor.sees)
            yield from self._play(state, who, begun, "begins", ())
            return
        for evil, *events in self._events(state, who, actor):
            paid = pay(state, EVILS, evil)
            if paid is not None:
                yield from self._play(paid, who, actor, "/".join(events), tuple(events))

    def _events(self, state: State, who: int, actor: Actor) -> Iterator[tuple[str, ...]]:
        """(what it costs, what happens next) in a pass."""
        assert actor.take is not None
        ended = sum(event in KINDS for event in actor.script)
        asked = "asked" in actor.script
        after_stop = "asked" in actor.script[:-1]
        if ended < len(actor.positions) and not after_stop:
            for kind in self.config.kinds:
                yield ("" if kind == "done" else "error", kind, *(["end"] if asked else []))
        if ended == len(actor.positions) or asked:
            yield ("", "end")
        yield ("die", "die")
        if asked:
            yield ("abort", "abort")
        elif self._drain_is_there(state, who):
            yield ("", "asked")
        unit, generation, _ = actor.take
        if any((unit, generation + 1) == claim[:2] for claim in state.claims):
            yield ("", "look", "end")

    def _drain_is_there(self, state: State, who: int) -> bool:
        key = ("drain", who, state.control)
        if key not in self._memo:
            with mounted(self._disk(state, None, self.names[who])):
                self._memo[key] = self._is_drained(who)
        found: bool = self._memo[key]
        return found

    def _play(
        self, state: State, who: int, actor: Actor, what: str, events: tuple[str, ...]
    ) -> Iterator[tuple[str, State]]:
        assert actor.begun is not None
        script = (*actor.script, *events)
        before = 0 if not events else len(self._played(state, who, actor, actor.script)[0])
        data, outcome, positions = self._played(state, who, actor, script)
        after = self._journal(state, who, state.journals[who] + data[before:])
        journals = put(actor.sees.journals, who, len(after.journals[who]))
        actor = actor._replace(
            script=script, positions=positions, sees=actor.sees._replace(journals=journals)
        )
        if "asked" in events:
            after = self._presence(after, who, DRAINING)
        idle = actor._replace(phase="idle", take=None, begun=None, script=(), positions=())
        if outcome is None:
            yield what, self._with(after, who, actor)
        elif outcome is Outcome.STOPPED:
            gone = self._with(after, who, idle._replace(phase="gone", code=75))
            yield f"{what} and leaves", self._presence(gone, who, FINISHED)
        elif outcome is Outcome.DIED and "asked" not in script:
            again = idle._replace(phase="again", take=actor.take)
            yield what, self._with(after, who, again)
        else:
            yield what, self._with(after, who, idle)

    def _played(
        self, state: State, who: int, actor: Actor, script: tuple[str, ...]
    ) -> tuple[bytes, Outcome | None, tuple[int, ...]]:
        assert actor.begun is not None
        assert actor.take is not None
        key = ("pass", who, actor.take, script, *self._content(state, actor.begun))
        if key not in self._memo:
            disk = self._disk(state, actor.begun, self.names[who])
            with mounted(disk):
                view = RunView(self.paths, self.manifest)
                view.poll_claims()
                view.poll()
                hands = Hands(self.names[who], self.manifest, view, disk)
                data, outcome = hands.play(self._assignment(view, actor.take), script)
            self._memo[key] = (data, outcome, tuple(hands.positions))
        found: tuple[bytes, Outcome | None, tuple[int, ...]] = self._memo[key]
        return found

    def _command(self, state: State, who: int, actor: Actor) -> Iterator[tuple[str, State]]:
        commands = self.config.people[who - self.config.workers]
        what = commands[actor.at]
        for sees in self._looks(state, who, actor.sees):
            key = ("command", who, what, *self._content(state, sees), state.log, state.payloads)
            ended = tuple({"gone": 1, "dead": 2}.get(one.phase, 0) for one in state.actors)
            key = (*key, ended, state.left[EVILS.index("lost")])
            if key not in self._memo:
                call = lambda c: self._call(state, who, what, sees, c)  # noqa: B023, E731
                self._memo[key] = set(every(call))
            for done, log, payloads, control, lost, said in self._memo[key]:
                now = sees._replace(log=len(log) if log != state.log else sees.log)
                after = state._replace(log=log, payloads=payloads)
                if control:
                    after = after._replace(control=(*state.control, *control))
                after = after._replace(left=spend(state.left, EVILS.index("lost"), lost))
                at = actor.at + done
                phase = "gone" if at == len(commands) else "idle"
                mine = actor._replace(sees=now, at=at, phase=phase)
                yield f"{what}: {said}", self._with(after, who, mine)

    def _call(
        self, state: State, who: int, what: str, sees: Sees, choices: Choices
    ) -> tuple[bool, tuple[str, ...], frozenset[tuple[str, bytes]], Any, int, str]:
        disk = self._disk(state, sees, f"p{who}", choices)
        ended, said = True, "done"
        with mounted(disk):
            view = RunView(self.paths, self.manifest)
            try:
                self._do(what, view, state)
            except NotCompleteError:
                ended, said = False, "not complete"
            except HpcToolkitError as error:
                said = error.message
            except OSError as error:
                ended, said = False, f"fails: {errno.errorcode[error.errno or 0]}"
        names = sorted(key for key in disk.world if key.startswith(f"{STAGE}/log/"))
        log = tuple(str(disk.world[name]) for name in names)
        payloads = frozenset(pair for pair in payloads_in(disk.world) if pair[0] in log)
        if what == "add" and said == "done":
            added = any(b'"new"' in data for _, data in payloads)
            assert added, "R2: add says nothing is wrong and its items are not there"
        control = tuple(
            (key.rpartition("/")[2], data)
            for key, data in disk.changed.items()
            if key.startswith(f"{ROOT}/control/")
        )
        return ended, log, payloads, control, len(disk.lost), said

    def _do(self, what: str, view: RunView, state: State) -> None:
        stage = view.stages["items"]
        if what == "gather":
            gather(view, "items")
        elif what == "retry":
            retry_failed(view, stage)
        elif what == "seal":
            stage.log.poll()
            stage.log.seal()
        elif what == "add":
            with units_of(self.config.units[0]):
                add_items(StageLog(self.paths.stage("items")), [{"id": "new"}], self.spec)
        elif what in ("slurm", "rumour"):
            self._give_notices(state, wait=what == "slurm")
        else:
            ask_to_drain(self.paths, [self.names[int(what.removeprefix("drain-"))]])

    def _give_notices(self, state: State, *, wait: bool) -> None:
        """Slurm says that all have ended, which is old news of those who beat on."""
        phases = [actor.phase for actor in state.actors[: self.config.workers]]
        if wait and "dead" not in phases and any(phase != "gone" for phase in phases):
            message = "nobody is dead"
            raise NotCompleteError(message)
        notices = [
            DeathNotice(
                worker=name,
                heartbeat=HEARTBEAT - (phase not in ("gone", "dead")),
                explained=self.config.explained,
            )
            for name, phase in zip(self.names, phases, strict=True)
        ]
        give_notice(self.paths, notices)

    # The values.

    def _disk(
        self, state: State, sees: Sees | None, name: str, choices: Choices | None = None
    ) -> Disk:
        lost: list[str] = []
        left = state.left[EVILS.index("lost")] if choices is not None else 0
        reply = replies(choices or Choices([]), left, lost)
        return Disk(self.files(state, sees), self.files(state), name=name, reply=reply, lost=lost)

    def _content(self, state: State, sees: Sees) -> tuple[Any, ...]:
        """What a process sees, as a key."""
        journals = zip(state.journals, sees.journals, strict=True)
        seen = tuple(data[:length] for data, length in journals)
        return (state.log[: sees.log], sees.claims, seen, state.control[: sees.control])

    @staticmethod
    def _with(state: State, who: int, actor: Actor) -> State:
        return state._replace(actors=put(state.actors, who, actor))

    @staticmethod
    def _journal(state: State, who: int, data: bytes) -> State:
        return state._replace(journals=put(state.journals, who, data))

    @staticmethod
    def _presence(state: State, who: int, value: str) -> State:
        return state._replace(presence=put(state.presence, who, value))
