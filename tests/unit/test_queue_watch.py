"""Which deaths workers notice of which one per node looks at another node, and how many live."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.queue.assignment import Picker
from hpc_toolkit.queue.control import SILENT_NODE, ControlReader, DeathNotice, FreeUnit, give_free
from hpc_toolkit.queue.leases import Liveness, Verdict
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.presence import FINISHED, RUNNING
from hpc_toolkit.queue.watch import Watch
from tests.manualclock import ManualClock
from tests.replacedcalls import CountedCalls
from tests.toyrun import ToyRun, ToyWorker

LEASE_S = 120.0
LOOK_S = 20.0
"""Seconds between two looks; a heartbeat comes every 10 s, or every 15 s if another one watches."""
EACH = 3
NOTHING = ("", None)


class Crowd:
    """Nodes with three workers each, of which all but the dead ones beat, and one looks."""

    def __init__(self, toy: ToyRun, count: int, *, at_most: int = 1, each: int = EACH) -> None:
        self.clock = ManualClock()
        self.at_most = at_most
        self.workers: dict[str, ToyWorker] = {}
        self.watches: dict[str, Watch] = {}
        self.dead: set[str] = set()
        """Names of workers."""
        self.verdicts: dict[str, Verdict] = {}
        """Why those that died count as dead."""
        self.frozen: set[str] = set()
        self.unaware: set[str] = set()
        """Those that do not know yet that they must beat for their node."""
        for number in range(count):
            for local in range(each):
                host = f"n{number:05d}"
                name = f"{host}-{10 + local}-0"
                self.workers[name] = toy.worker(name, host=host)
                liveness = Liveness(toy.paths, self.clock, host=host, boot="b", lease_s=LEASE_S)
                self.watches[name] = Watch(liveness, name, self.clock)
        for name in self.living():
            self.beat(name)

    @classmethod
    def settled(cls, toy: ToyRun, count: int, **how: int) -> Crowd:
        """One in which everybody was looked at twice."""
        crowd = cls(toy, count, **how)
        assert [crowd.step() for _ in range(2)] == [[], []]
        return crowd

    def node(self, number: int) -> list[str]:
        return [name for name in self.workers if name.startswith(f"n{number:05d}-")]

    @property
    def explained(self) -> dict[str, str]:
        return {name: verdict.explained for name, verdict in self.verdicts.items()}

    @property
    def hosts(self) -> list[str]:
        """The nodes after the first one, in the order of its ring."""
        return list(next(iter(self.watches.values()))._hosts)

    def living(self) -> list[str]:
        return [name for name in self.workers if name not in self.dead | self.frozen]

    def observers(self) -> dict[str, str]:
        """The first living worker of each node."""
        return {name.partition("-")[0]: name for name in reversed(self.living())}

    def beat(self, name: str) -> None:
        observes = name in self.observers().values() and name not in self.unaware
        node, interval_s = (EACH, 10.0) if observes else (0, 15.0)
        self.workers[name].presence.update(node=node, interval_s=interval_s)

    def steps(self, count: int) -> set[str]:
        """The deaths that were seen in several steps."""
        return {died for _ in range(count) for died in self.step()}

    def step(self) -> list[str]:
        """The living beat, the observers look, and all wait; return the deaths that were seen."""
        died: list[str] = []
        for name in self.living():
            self.beat(name)
        for host, name in sorted(self.observers().items()):
            mates = [one for one in self.living() if one != name and one.startswith(f"{host}-")]
            self.watches[name].moves()
            found = self.watches[name].look(self.at_most, mates)
            self.verdicts |= found
            died += found
        for _ in range(int(LOOK_S)):
            self.clock.advance(1.0)
            for watch in self.watches.values():
                watch.moves()
        return died


def test_a_look_opens_one_file_of_each_other_node(toy: ToyRun) -> None:
    (watch, *_) = Crowd(toy, 20).watches.values()

    with CountedCalls() as counted:
        watch.look(3, watch._hosts.get(watch.host, ()) or ["n00000-11-0", "n00000-12-0"])

    assert len(counted.opened()) == 3


@pytest.mark.parametrize("count", [1, 2, 5])
def test_i3_nodes_that_die_together_are_seen_soon_after_half_a_lease(
    toy: ToyRun, count: int
) -> None:
    crowd = Crowd.settled(toy, 12)
    lost = crowd.hosts[3 : 3 + count]
    crowd.dead.update(name for name in crowd.workers if name.partition("-")[0] in lost)

    # The look that finds a node silent goes on to the next ones, and counts their silence.
    assert crowd.steps(5) == crowd.dead


@pytest.mark.parametrize("at_most", [1, 2])
def test_i3_more_silent_neighbors_than_one_look_passes_are_not_taken_for_a_failed_file_server(
    toy: ToyRun, at_most: int
) -> None:
    crowd = Crowd.settled(toy, 24, at_most=at_most)
    crowd.dead.update(name for name in crowd.workers if name.partition("-")[0] in crowd.hosts[3:15])

    crowd.steps(10)

    assert crowd.explained == dict.fromkeys(crowd.dead, SILENT_NODE)


def test_i3_an_item_is_not_to_blame_for_the_silence_of_its_node(toy: ToyRun) -> None:
    """A file server may fail for one node alone, and it has no power at times."""
    crowd = Crowd.settled(toy, 6)
    crowd.dead.update(crowd.node(3))
    crowd.frozen.add(crowd.node(1)[0])  # its node lives

    crowd.steps(10)

    silent = dict.fromkeys(crowd.dead, SILENT_NODE)
    assert crowd.explained == {**silent, crowd.node(1)[0]: ""}


def test_a_node_lives_while_one_of_its_workers_does(toy: ToyRun) -> None:
    crowd = Crowd.settled(toy, 6)
    first, second, _ = crowd.node(3)
    crowd.frozen.add(first)  # nothing of its node shows that it ended

    assert crowd.steps(8) <= {first}
    crowd.dead.update((first, second))
    assert crowd.steps(8) <= {first, second}


def test_i3_other_workers_of_a_node_have_time_to_beat_for_it(toy: ToyRun) -> None:
    crowd = Crowd.settled(toy, 6)
    first, *others = crowd.node(3)
    crowd.frozen.add(first)
    crowd.unaware.update(others)

    assert crowd.steps(10) == {first}


@pytest.mark.parametrize(
    ("count", "each", "lost"),
    [
        # The file server may have failed: of one's own heartbeats nothing is known either.
        pytest.param(2, EACH, 1, id="all other nodes are silent"),
        # It alone may wait for a file that another, lost, node had open.
        pytest.param(6, 1, 3, id="a node has one worker"),
    ],
)
def test_i3_only_a_full_lease_decides(toy: ToyRun, count: int, each: int, lost: int) -> None:
    crowd = Crowd.settled(toy, count, each=each)
    crowd.dead.update(crowd.node(lost))

    seen = [crowd.step() for _ in range(10)]

    assert seen[:5] == [[]] * 5
    assert {one for died in seen for one in died} == crowd.dead


def test_i3_all_nodes_that_a_look_reaches_may_wait_for_a_failed_file_server(toy: ToyRun) -> None:
    crowd = Crowd.settled(toy, 24)
    crowd.frozen.update(name for name in crowd.workers if name not in crowd.node(0))

    assert [crowd.step() for _ in range(5)] == [[]] * 5


def test_i3_a_process_that_was_stuck_counts_silences_anew(toy: ToyRun) -> None:
    """Nodes that lost their file server find it again one after the other."""
    crowd = Crowd.settled(toy, 6)
    crowd.dead.update(crowd.node(3))
    assert crowd.step() == []
    crowd.clock.advance(LEASE_S / 2)

    assert crowd.step() == []  # silent for 100 s, of which the observer was stuck for 60 s
    assert crowd.steps(4) == crowd.dead


def test_a_suspended_node_is_dead_after_a_full_lease(toy: ToyRun) -> None:
    crowd = Crowd.settled(toy, 6)
    gone = crowd.node(3)
    crowd.dead.update(gone)
    for watch in crowd.watches.values():
        for name in gone:
            beat = crowd.workers[name].presence.presence.heartbeat
            watch.liveness.take_notice(
                DeathNotice(worker=name, heartbeat=beat, explained="suspended")
            )

    seen = [crowd.step() for _ in range(10)]

    assert seen[:5] == [[]] * 5
    assert crowd.node(3)[0] in {one for died in seen for one in died}


class Observer:
    """The observer of a node ``n0``, which looks every 20 s."""

    def __init__(self, toy: ToyRun) -> None:
        self.toy, self.clock = toy, ManualClock()
        own = toy.worker("n0-900-0", host="n0")
        liveness = Liveness(toy.paths, self.clock, host="n0", boot="b", lease_s=LEASE_S)
        self.watch = Watch(liveness, own.name, self.clock)

    def look(self, *mates: str, times: int = 1) -> tuple[set[str], list[str]]:
        """Workers that died, and the files that were opened in the last look."""
        died, opened = set[str](), list[str]()
        for _ in range(times):
            for _ in range(int(LOOK_S)):
                self.clock.advance(1.0)
                self.watch.moves()
            with CountedCalls() as counted:
                died |= self.watch.look(2, mates).keys()
            opened = counted.opened()
        return died, opened


def test_i3_a_worker_of_the_own_node_is_seen_beside_many_that_died_before(toy: ToyRun) -> None:
    """Their host was started again since, or their filesystem mounted again."""
    for number in range(70):
        toy.worker(f"n0-{100 + number}-0", host="n0", boot="before")
    mate = toy.worker("n0-901-0", host="n0")
    observer = Observer(toy)
    observer.look(mate.name, times=20)

    died, opened = observer.look(times=10)

    assert mate.name in died
    assert len(opened) <= 2


def test_i3_a_worker_of_the_own_node_is_known_before_the_next_listing(toy: ToyRun) -> None:
    observer = Observer(toy)
    observer.look(times=2)
    mate = toy.worker("n0-901-0", host="n0")
    observer.watch.met = {mate.name}

    assert observer.look()[1] == [f"{mate.name}.json"]


def test_i3_a_worker_of_the_own_node_that_was_frozen_can_die(toy: ToyRun) -> None:
    mate = toy.worker("n0-901-0", host="n0", boot="b")
    observer = Observer(toy)
    assert observer.look(times=10)[0] == {mate.name}
    mate.presence.update()
    assert observer.look(mate.name, times=2)[0] == set()

    toy.paths.worker_lock(mate.name).touch()  # nobody holds it any more

    assert observer.look()[0] == {mate.name}


def test_a_look_does_not_read_all_workers_that_a_node_ever_had(toy: ToyRun) -> None:
    for number in range(200):
        toy.worker(f"n1-{100 + number}-0", host="n1").presence.update(state=FINISHED)
    last = toy.worker("n1-900-0", host="n1", node=1)
    observer = Observer(toy)

    opened = [observer.look()[1] for _ in range(5)]

    assert max(map(len, opened)) <= 64
    assert opened[-1] == [f"{last.name}.json"]


def test_a_node_is_not_dead_before_all_of_its_workers_were_looked_at(toy: ToyRun) -> None:
    for number in range(300):
        state = RUNNING if number < 2 else FINISHED
        toy.worker(f"n1-{100 + number}-0", host="n1").presence.update(state=state)
    last = toy.worker("n1-900-0", host="n1", node=1)
    other = toy.worker("n2-900-0", host="n2", node=1)
    observer = Observer(toy)
    died: set[str] = set()
    for _ in range(6):
        other.presence.update()
        last.presence.update()
        died |= observer.look()[0]

    assert died == set()


def test_a_worker_that_woke_up_is_watched_again(toy: ToyRun) -> None:
    """Slurm suspends and continues jobs."""
    crowd = Crowd.settled(toy, 8)
    for _ in range(2):
        crowd.dead.update(crowd.node(3))
        assert crowd.steps(6) == set(crowd.node(3))
        crowd.dead.clear()
        for _ in range(9):
            assert crowd.step() == []


def test_it_is_known_when_the_first_silent_node_counts_as_dead(toy: ToyRun) -> None:
    crowd = Crowd.settled(toy, 8)
    watches = [crowd.watches[name] for name in crowd.observers().values()]
    assert {watch.lease_left_s for watch in watches} == {float("inf")}
    crowd.dead.update(crowd.node(3))

    crowd.step()

    # Its other workers were looked at for the first time, and may have beaten just before.
    assert min(watch.lease_left_s for watch in watches) == LEASE_S / 2 - LOOK_S


def test_the_living_are_estimated_from_the_nodes_that_were_looked_at(toy: ToyRun) -> None:
    crowd = Crowd.settled(toy, 10)
    watch = crowd.watches[crowd.node(0)[0]]
    assert (watch.nodes, watch.living) == (10, 30)

    for name in crowd.node(5):
        crowd.workers[name].presence.update(state=FINISHED)
        crowd.dead.add(name)
    crowd.at_most = 10
    for _ in range(2):
        crowd.step()

    assert (watch.nodes, watch.living) == (9, 27)


class Taker:
    """A living worker on a node of its own, on a shared filesystem."""

    def __init__(self, toy: ToyRun, clock: ManualClock, name: str) -> None:
        host = name.partition("-")[0]
        self.toy, self.clock = toy, clock
        self.worker = toy.worker(name, host=host, node=1)
        liveness = Liveness(toy.paths, clock, host=host, boot="b", lease_s=LEASE_S)
        self.picker = Picker(toy.view(), liveness, clock, name, shared=True)
        self.control = ControlReader(toy.paths)
        self.pacing = Pacing(clock, local=False, workers=4096, lease_s=LEASE_S, seed=name)
        self.picker.fresh(NOTHING)

    def take(self) -> tuple[str, int] | None:
        found = self.picker.next(NOTHING, self.pacing)
        return None if found is None else (found.unit.name, found.generation)

    def hear(self) -> None:
        self.control.poll()
        self.picker.left.hear_of(self.control.free, 4096)


Lost = tuple[ToyRun, ManualClock, ToyWorker, ToyWorker]
Told = tuple[ToyRun, ToyWorker, Taker, Taker]


@pytest.fixture
def lost(fast_dir: Path) -> Lost:
    """A run of two units, of which two workers claimed one each; one has died since."""
    toy, clock = ToyRun(fast_dir / "r", 2, unit=1), ManualClock()
    living = toy.worker("n9-1-0", host="n9", node=1)
    assert living.claim(toy.unit_name(1))
    dead = toy.worker("n1-1-0", host="n1", node=1)
    assert dead.claim(toy.unit_name(0))
    dead.presence.update(claim=f"items/{toy.unit_name(0)}.1")
    return toy, clock, dead, living


def looked(taker: Taker, *living: ToyWorker) -> list[FreeUnit]:
    """What a worker finds while all but one node beat."""
    found: list[FreeUnit] = []
    for _ in range(8):
        for one in (taker.worker, *living):
            one.presence.update()
        for _ in range(int(LOOK_S)):
            taker.clock.advance(1.0)
            taker.picker.watch.moves()
        found += taker.picker.notice_deaths(8)
    return found


def test_i3_a_unit_without_a_line_is_found_by_the_last_heartbeat_of_its_owner(lost: Lost) -> None:
    toy, clock, dead, living = lost
    taker = Taker(toy, clock, "n2-1-0")

    (found,) = looked(taker, living)

    assert (found.unit, found.generation) == (toy.unit_name(0), 1)
    assert (found.owner.worker, found.owner.evidence) == (dead.name, "lease")
    with CountedCalls() as counted:
        assert taker.take() == (toy.unit_name(0), 2)
    assert set(counted.opened()) <= {f"{dead.name}.json", f"{dead.name}.jsonl", "head"}


@pytest.fixture
def told(lost: Lost) -> Told:
    """The run, the worker that died, a busy worker that found it, and an idle one that was told."""
    toy, clock, dead, living = lost
    toy.worker("n1-2-0", host="n1")
    finder, idle = Taker(toy, clock, "n2-1-0"), Taker(toy, clock, "n3-1-0")
    for free in looked(finder, idle.worker, living):
        give_free(toy.paths, free, finder.worker.name)
    idle.hear()
    clock.advance(20.0)
    return toy, dead, finder, idle


def test_i3_a_worker_of_another_node_takes_over_what_a_busy_one_found_and_knows_of_the_silence(
    told: Told,
) -> None:
    toy, dead, finder, idle = told

    found = idle.picker.next(NOTHING, idle.pacing)

    assert found is not None
    assert (found.unit.name, found.generation) == (toy.unit_name(0), 2)
    assert found.died is not None
    assert (found.died[0], found.died[1].explained) == (dead.name, SILENT_NODE)
    assert finder.take() is None


def test_i5_a_heartbeat_refutes_what_another_worker_found(told: Told) -> None:
    _, dead, finder, idle = told

    dead.presence.update()

    assert [idle.take(), finder.take()] == [None, None]


def test_i3_a_worker_whose_death_was_refuted_can_die_again(lost: Lost) -> None:
    toy, clock, dead, _ = lost
    idle = Taker(toy, clock, "n3-1-0")
    for number in range(2):
        beat = dead.presence.presence.heartbeat
        owner = DeathNotice(worker=dead.name, heartbeat=beat, explained="", evidence="lease")
        give_free(toy.paths, FreeUnit("items", toy.unit_name(0), 1, owner), "n2-1-0")
        idle.hear()
        if number == 0:
            dead.presence.update()
        clock.advance(20.0)
        taken = idle.take()
        assert taken == (None if number == 0 else (toy.unit_name(0), 2))


def test_i3_the_first_scan_takes_a_unit_of_which_only_the_death_of_its_owner_is_known(
    lost: Lost,
) -> None:
    toy, clock, dead, living = lost
    dead.presence.update(claim="")  # it claimed the unit after its last heartbeat
    finder, idle = Taker(toy, clock, "n2-1-0"), Taker(toy, clock, "n3-1-0")

    (found,) = looked(finder, idle.worker, living)
    give_free(toy.paths, found, finder.worker.name)
    assert idle.picker.takeover() is None  # its first look at the owner of the unit
    idle.hear()

    assert (found.owner.worker, found.unit) == (dead.name, "")
    taken = idle.picker.takeover()
    assert taken is not None
    assert (taken.unit.name, taken.generation) == (toy.unit_name(0), 2)


def test_of_many_idle_workers_not_all_try_at_once(lost: Lost) -> None:
    toy, clock, _, living = lost
    finder = Taker(toy, clock, "n2-1-0")
    for free in looked(finder, living):
        give_free(toy.paths, free, finder.worker.name)
    idle = [Taker(toy, clock, f"n{number}-1-0") for number in range(10, 30)]
    for one in idle:
        one.hear()

    due = []
    for _ in range(20):
        due.append(sum(one.picker.left.due for one in idle))
        clock.advance(1.0)

    assert finder.picker.left.due
    assert due[0] < 8
    assert due[-1] == 20
