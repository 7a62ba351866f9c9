"""Launching: options, what srun says, where nodes meet, and what ends mean."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.cli.training import PANELS
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.training.launch import launcher
from hpc_toolkit.training.launch.meeting import Address, find, publish
from hpc_toolkit.training.launch.plan import (
    _VALUES,
    INSTEAD,
    Plan,
    Request,
    Step,
    check_request,
    make_plan,
    task_plan,
)
from hpc_toolkit.training.launch.ranks import Ranks, _File, _Terminal
from hpc_toolkit.training.launch.rendezvous import Place, Rounds
from hpc_toolkit.training.progress import Outcome
from tests.integration.realrun import wait_until
from tests.manualclock import ManualClock
from tests.unit.jobcommands import call, refused

SRUN = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
SRUN |= {"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}


def plan_of(run_dir: str | None = None, **options: Any) -> Plan:
    directory = Path(run_dir) if run_dir else None
    request = Request(script="train.py", options=options, run_dir=directory)
    return make_plan(request, step=None, ranks=2, backend="gloo")


@pytest.mark.torch
def test_every_option_has_the_spellings_of_torchrun() -> None:
    run = pytest.importorskip("torch.distributed.run")
    torchruns = {
        action.dest: (*action.option_strings, action.nargs == 0)
        for action in run.get_args_parser()._actions
    }

    own = {"run_dir", "backend", "start_timeout", "monitor", "dry_run"}
    newer = {"numa_binding", "shutdown_timeout"} - torchruns.keys()  # torch 2.9
    for option in (one for group in PANELS.values() for one in group):
        name = option.name
        if name in own | newer:
            continue
        assert name in {*_VALUES, *INSTEAD}
        *spellings, is_flag = torchruns[name]
        assert {option.spelling, option.short or option.spelling} <= {*spellings}
        assert is_flag == (not option.metavar)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the command line asked of the launcher, which starts nothing."""
    found: list[Request] = []

    def launched(request: Request) -> Outcome:
        found.append(request)
        return Outcome(0)

    monkeypatch.setattr(launcher, "launch", launched)
    return found


@pytest.mark.parametrize("word", ["--nproc_per_node=8", "--nnodes", "--max-restarts=3"])
def test_an_option_of_the_launcher_after_the_script_is_refused(
    word: str, asked: list[Request]
) -> None:
    error = refused("launch", *f"train.py --lr 1 {word}".split())
    call("launch", *f"train.py -- --lr 1 {word}".split())

    assert error.message == f"{word} comes after the script, which would get it"
    assert error.hint.startswith(f"hpctk launch {word} ... train.py")
    assert [request.arguments for request in asked] == [("--lr", "1", word)]


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    [
        *("t.py -- --lr 1", "t.py --lr 1 -- x", "t.py -- --nnodes 2", "t.py a -- --nnodes 2"),
        *("t.py -- a -- b", "t.py -- --", "-- t.py --lr 1", "-m module -- x"),
        "--no-python program -- x",
    ],
)
def test_a_separator_behind_the_script_is_dropped_where_torchrun_drops_it(
    words: str, asked: list[Request]
) -> None:
    run = pytest.importorskip("torch.distributed.run")

    call("launch", *words.split())
    torchrun = run.parse_args(words.split())

    assert [(one.script, one.arguments) for one in asked] == [
        (torchrun.training_script, tuple(torchrun.training_script_args))
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"script": "none.py"}, r"script 'none\.py' not found"),
        ({"script": "no.train", "options": {"module": True}}, r"no module named 'no\.train'"),
        ({"script": "", "options": {"module": True}}, "no module named ''"),
        ({"script": "no-program", "options": {"no_python": True}}, "program 'no-program' not"),
        ({"options": {"nproc": 2}}, "launch: unknown option 'nproc'"),
        ({"backend": "mpi"}, "--backend: 'mpi' is not one of nccl, gloo"),
        *(
            ({"start_timeout_s": seconds}, r"--start-timeout: .* up to 366 days")
            for seconds in (0, -1, float("nan"), float("inf"))
        ),
        ({"start_timeout_s": "3"}, "--start-timeout: '3' is not a number"),
        ({"options": {"module": "yes"}}, "--module: 'yes' is not true or false"),
        ({"options": {"nproc_per_node": [2]}}, r"--nproc-per-node: \[2\] is not a text or"),
        ({"options": {"nnodes": True}}, "--nnodes: True is not a whole number"),
        ({"options": {"nnodes": 0}}, "0 is not a whole number from 1"),
        ({"options": {"max_restarts": -1}}, "-1 is not a whole number from 0"),
        ({"options": {"master_port": 65536}}, "65536 is not a port from 1 to 65535"),
        ({"options": {"numa_binding": "socket"}}, "'socket' is not node"),
        ({"options": {"tee": "4"}}, "'4' is not 0 for none, 1 for stdout"),
        ({"options": {"redirects": "0:3,1"}}, "'0:3,1' is not 0 for none"),
        ({"options": {"rdzv_backend": "etcd"}}, "'etcd' is not c10d or static"),
        ({"options": {"rdzv_endpoint": "n1:port"}}, "'n1:port' is not HOST or HOST:PORT"),
        ({"options": {"rdzv_endpoint": "n1:65536"}}, "65536 is not a port"),
    ],
    ids=str,
)
def test_what_cannot_start_is_refused_before_anything_does(
    changes: dict[str, Any], told: str
) -> None:
    good = Request(script=__file__)
    check_request(good)

    with pytest.raises(ConfigError, match=told):
        check_request(replace(good, **changes))


def test_a_step_is_read_from_sruns_variables_and_there_is_none_outside() -> None:
    step = Step.from_environ({**SRUN, "SLURM_RESTART_COUNT": "3"})
    tasks = {"SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_PROCID": "9"}
    uneven = Step.from_environ({**SRUN, **tasks, "SLURM_NODEID": "2", "SLURM_LOCALID": "1"})

    assert step is not None
    assert (step.task, step.node, step.local, step.tasks) == (1, 1, 0, (1, 1))
    assert (step.name, step.per_node) == ("12.3.0", True)
    for outside in ({}, *({**SRUN, "SLURM_STEP_ID": one} for one in ("", "batch", "extern"))):
        assert Step.from_environ(outside) is None
    assert uneven is not None
    assert (uneven.tasks, uneven.per_node) == ((4, 4, 2), False)
    plan = task_plan(Request(script="a", run_dir=Path("R")), uneven, backend="gloo")
    assert (plan.form, plan.nodes, plan.node_rank, plan.ranks) == ("task", 3, 2, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PROCID", "x"), ("NODEID", "2"), ("LOCALID", "1"), ("PROCID", "2")),
        ("STEP_TASKS_PER_NODE", ""),
    ],
)
def test_variables_that_contradict_each_other_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_"):
        Step.from_environ({**SRUN, f"SLURM_{name}": value})


def translated(**options: Any) -> Plan:
    return plan_of(**check_request(Request(script=__file__, options=options)).options)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"rdzv_endpoint": "n1", "node_rank": 1}, ("address", "n1", 29500)),
        ({"rdzv_endpoint": "n1:29400", "node_rank": 0}, ("address", "n1", 29400)),
        ({"rdzv_endpoint": "[fd::1]:7", "node_rank": 0}, ("address", "fd::1", 7)),
        ({"rdzv_endpoint": "localhost:0", "nnodes": "1"}, ("alone", "", 0)),
        ({"rdzv_endpoint": "n1:29400", "nnodes": "1:1"}, ("alone", "n1", 29400)),
    ],
)
def test_an_endpoint_of_torchrun_is_the_address_of_node_0(
    options: dict[str, Any], found: tuple[str, str, int]
) -> None:
    plan = translated(**{"nnodes": "2", "rdzv_backend": "c10d", **options})

    assert (plan.meeting, plan.host, plan.port) == found


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nnodes": 2}, "2 nodes need a shared directory"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "n"}, "2 is not one of the 2 nodes"),
        ({"nnodes": 2, "standalone": True}, "--standalone works on one node"),
        ({"nnodes": 2, "rdzv_endpoint": "n"}, "--rdzv-endpoint: 2 nodes need numbers"),
        ({"rdzv_endpoint": "n", "master_addr": "n"}, "--rdzv-endpoint and --master-addr exclude"),
        ({"nnodes": "1:2"}, "--nnodes 1:2: the number of nodes cannot change here"),
        ({"local_ranks_filter": "0:1"}, "'0:1' is not a list of numbers from 0"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        translated(**options)
    with pytest.raises(ConfigError, match="need an --rdzv-id"):
        plan_of("R", nnodes=2)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # As tqdm writes: the carriage return comes first.
        ([(0, "\r 1%\r 2%"), (0, "\r 3%\n")], "[0]  1%\r[0]  2%\r[0]  3%\n"),
        ([(0, " 1%\r 2%\r"), (0, " 3%\r")], "[0]  1%\r[0]  2%\r[0]  3%\r\n"),
        ([(0, "a\r\nb\r"), (0, "\nc\n\n")], "[0] a\r\n[0] b\r\n[0] c\n[0] \n"),
        ([(0, " 1%\r 2%\r"), (1, "x\n")], "[0]  1%\r[1] x\n[0]  2%\r\n"),
    ],
)
@pytest.mark.parametrize("tty", [False, True])
def test_text_up_to_a_carriage_return_appears_so_that_a_bar_moves(
    written: list[tuple[int, str]], expected: str, *, tty: bool, tmp_path: Path
) -> None:
    class Shown(io.StringIO):
        def isatty(self) -> bool:
            return tty

    shown = Shown(newline="")
    files = []
    for rank in range(2):
        (tmp_path / str(rank)).touch()
        files.append(_File(tmp_path / str(rank), f"[{rank}] ", shown))
    # What a bar of another rank left behind is erased.
    expected = expected.replace("[", "\x1b[K[") if tty else expected

    for rank, text in written:
        with (tmp_path / str(rank)).open("a", newline="") as file:
            file.write(text)
        files[rank].copy()
        assert shown.getvalue()
        assert expected.startswith(shown.getvalue())
    for copied in files:
        copied.copy(last=True)

    assert shown.getvalue() == expected


def test_a_closed_stream_stops_no_other_and_characters_it_lacks_are_replaced(
    tmp_path: Path,
) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    path, raw = tmp_path / "out", io.BytesIO()
    path.write_bytes("für\n".encode())
    terminal = _Terminal()
    terminal.follow(path, "", Gone())
    terminal.follow(path, "[rank 0] ", io.TextIOWrapper(raw, encoding="ascii"))

    terminal.start()
    terminal.end()

    assert raw.getvalue() == b"[rank 0] f?r\n"


def test_a_warning_right_after_the_start_ends_no_rank(tmp_path: Path) -> None:
    ranks = Ranks(plan_of(), tmp_path, Place(Address("n0", 1), 0, 2), restart=0)

    ranks.start(["true"], os.environ)
    ranks.warn(signal.SIGUSR1)
    wait_until(lambda: None not in ranks.codes().values(), "the ranks to end")
    ranks.end()

    assert ranks.codes() == {0: 0, 1: 0}


class SharedStore:
    """Stands in for torch's store: a dictionary that fails once it is gone."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        self._ask()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._ask()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._ask()
        return all(key in self.values for key in keys)

    def _ask(self) -> None:
        self.asked += 1
        if self.gone:
            message = "Connection was likely closed"
            raise RuntimeError(message)


class Ports:
    """Opens stores for ranks on ports that nobody had."""

    def __init__(self) -> None:
        self.opened = 0

    def __call__(self) -> tuple[Address, Callable[[], object]]:
        self.opened += 1
        return Address("n0", 40000 + self.opened), lambda: None


def rounds_of(
    store: SharedStore,
    node: int,
    nodes: int,
    clock: ManualClock,
    ports: Ports | None = None,
    *,
    passing: bool = False,
) -> Rounds:
    """One node's part; with ``passing`` time passes while it waits for others, who never come."""
    of: dict[str, Any] = {"form": "agent", "launch": "12.0.0", "meeting": "directory"}
    of |= {"nodes": nodes, "node_rank": node, "ranks": node + 1, "backend": "gloo"}
    plan = Plan(**of, start_timeout_s=60)
    return Rounds(
        plan=plan,
        store=store,
        open_store=ports or Ports(),
        host=f"n{node}",
        clock=clock.monotonic,
        sleep=clock.advance if passing else lambda _seconds: time.sleep(0.001),
    )


def together(*parts: Rounds) -> list[Place]:
    """What each node gets from joining the next round at once."""
    found: dict[int, Place] = {}

    def join(number: int, part: Rounds) -> None:
        found[number] = part.join()

    threads = [threading.Thread(target=join, args=pair) for pair in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(parts))]


@pytest.mark.parametrize("waiting", [False, True])
def test_a_node_in_the_place_of_a_lost_one_is_in_the_next_round_with_the_others(
    waiting: bool,
) -> None:
    store, clock, ports = SharedStore(), ManualClock(), Ports()
    first, second = (rounds_of(store, node, 2, clock, ports) for node in range(2))
    together(first, second)
    together(first, second)
    waits = threading.Thread(target=first.join, daemon=True)
    if waiting:
        # Its ranks failed with those of the lost node.
        waits.start()
        while "round/2/node/0" not in store.values:
            time.sleep(0.001)

    place = rounds_of(store, 1, 2, clock, ports)
    comes = threading.Thread(target=place.join, daemon=True)
    comes.start()
    while "round/2/node/1" not in store.values:
        assert comes.is_alive(), place.number
        time.sleep(0.001)
    clock.advance(1)
    if not waiting:
        assert first.wanted()
        waits.start()
    waits.join()
    comes.join()

    assert first.number == place.number == 2


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    store, clock = SharedStore(), ManualClock()

    with pytest.raises(RunError, match="node 1, 2 of 3 did not come within 1 min 00 s"):
        rounds_of(store, 0, 3, clock, passing=True).join()
    with pytest.raises(RunError, match="node 0 of 2 did not come within"):
        rounds_of(SharedStore(), 1, 2, clock, passing=True).join()
    # The address of an earlier start is not taken for this one.
    place = tmp_path / "rendezvous"
    publish(place / "12.0.0", Address("n0", 1))
    with pytest.raises(RunError, match=r"did not publish its address as .*12\.1\.0"):
        find(place / "12.1.0", timeout_s=30, monotonic=clock.monotonic, sleep=clock.advance)


def test_node_0_holds_the_store_until_those_that_came_have_left() -> None:
    store, clock = SharedStore(), ManualClock()
    first, second = (rounds_of(store, node, 2, clock) for node in range(2))
    together(first, second)
    first.sleep = clock.advance
    started = clock.monotonic()

    first.leave(5)
    waited = clock.monotonic() - started
    second.leave(5)
    first.leave(5)

    assert waited >= 5
    assert clock.monotonic() - started == waited
    # Nobody waits for a node that never came.
    rounds_of(SharedStore(), 0, 2, clock, passing=True).leave(5)
    assert clock.monotonic() - started == waited
