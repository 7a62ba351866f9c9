"""Launching: options, what srun says, what becomes of them, and what ends mean."""

from __future__ import annotations

import io
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from hpc_toolkit.cli import load_commands
from hpc_toolkit.cli.launch import PANELS
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import by_name
from hpc_toolkit.training.launch import agent, launch, launcher
from hpc_toolkit.training.launch.agent import watch
from hpc_toolkit.training.launch.meeting import Address
from hpc_toolkit.training.launch.outcome import (
    Outcome,
    RankFailure,
    failure_error,
    root_cause,
    saved,
    summary,
)
from hpc_toolkit.training.launch.plan import (
    _VALUES,
    INSTEAD,
    Plan,
    Request,
    Step,
    check_request,
    left_out,
    make_plan,
    task_plan,
)
from hpc_toolkit.training.launch.ranks import (
    Ranks,
    _File,
    _Terminal,
    cpus_near_gpu,
    make_next,
    streams_of,
)
from hpc_toolkit.training.launch.rendezvous import Ending, Place, Rounds
from tests.integration.realrun import wait_until
from tests.manualclock import ManualClock

SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


def plan_of(step: Step | None = None, run_dir: str | None = None, **options: Any) -> Plan:
    request = Request(
        script="train.py", options=options, run_dir=Path(run_dir) if run_dir else None
    )
    return make_plan(request, step=step, ranks=2, backend="gloo")


# Options


@pytest.mark.torch
def test_every_option_has_the_spellings_of_torchrun() -> None:
    run = pytest.importorskip("torch.distributed.run")
    torchruns = {
        action.dest: (*action.option_strings, action.nargs == 0)
        for action in run.get_args_parser()._actions
    }

    own = {"run_dir", "backend", "start_timeout", "monitor", "dry_run", "json"}
    newer = {"numa_binding", "shutdown_timeout"} - torchruns.keys()  # torch 2.9
    for name, option in by_name(PANELS).items():
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

    def launched(request: Request, *, replace: bool) -> Outcome:
        found.append(request)
        return Outcome(0)

    monkeypatch.setattr(launcher, "launch", launched)
    return found


def called(words: str) -> Result:
    return CliRunner().invoke(load_commands("launch"), ["launch", *words.split()])


@pytest.mark.parametrize("word", ["--nproc_per_node=8", "--nnodes", "--max-restarts=3"])
def test_an_option_of_the_launcher_after_the_script_is_refused(
    word: str, asked: list[Request]
) -> None:
    error = called(f"train.py --lr 1 {word}").exception
    called(f"train.py -- --lr 1 {word}")

    assert isinstance(error, ConfigError)
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

    called(words)
    torchrun = run.parse_args(words.split())

    assert [(one.script, one.arguments) for one in asked] == [
        (torchrun.training_script, tuple(torchrun.training_script_args))
    ]


@pytest.mark.torch
@pytest.mark.parametrize("gpus", [0, 4])
def test_the_number_of_ranks_can_be_that_of_the_cpus_or_gpus(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(5)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    assert [launcher.count_ranks(text) for text in ("3", "cpu", "auto")] == [3, 5, gpus or 5]
    if gpus:
        assert launcher.count_ranks("gpu") == gpus
    for text in ("0", "some", "-1", *([] if gpus else ["gpu"])):
        with pytest.raises(ConfigError, match=f"--nproc-per-node {text} starts no rank"):
            launcher.count_ranks(text)


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


def test_a_script_whose_name_is_an_option_of_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-x.py").write_text("")

    with pytest.raises(ConfigError, match=r"'-x\.py' as an option") as caught:
        check_request(Request(script="-x.py"))

    assert caught.value.hint == "write ./-x.py"
    check_request(Request(script="./-x.py"))


# What srun says


def test_a_step_is_read_from_sruns_variables_and_there_is_none_outside() -> None:
    step = Step.from_environ({**SRUN, "SLURM_RESTART_COUNT": "3"})

    assert step is not None
    assert (step.task, step.node, step.local, step.tasks) == (1, 1, 0, (1, 1))
    assert (step.name, step.per_node) == ("12.3.0", True)
    for outside in ({}, *({**SRUN, "SLURM_STEP_ID": one} for one in ("", "batch", "extern"))):
        assert Step.from_environ(outside) is None


def test_an_uneven_step_has_the_ranks_of_each_node() -> None:
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_PROCID": "9"}

    step = Step.from_environ({**environ, "SLURM_NODEID": "2", "SLURM_LOCALID": "1"})

    assert step is not None
    assert step.tasks == (4, 4, 2)
    assert not step.per_node
    plan = task_plan(Request(script="a", run_dir=Path("R")), step, backend="gloo")
    assert (plan.form, plan.nodes, plan.node_rank, plan.ranks) == ("task", 3, 2, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_PROCID": "x"},
        {"SLURM_NODEID": "2"},
        {"SLURM_LOCALID": "1"},
        {"SLURM_PROCID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": ""},
    ],
    ids=str,
)
def test_variables_that_contradict_each_other_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="SLURM_"):
        Step.from_environ({**SRUN, **wrong})


# What becomes of both


def test_a_step_with_a_task_a_node_meets_in_the_run_directory() -> None:
    plan = plan_of(Step.from_environ(SRUN), "R")

    assert (plan.form, plan.meeting, plan.launch) == ("agent", "directory", "12.0.0")
    assert (plan.nodes, plan.node_rank, plan.ranks) == (2, 1, 2)
    assert plan.log_dir == Path("R/logs/12.0.0")


def test_nodes_meet_where_the_user_says() -> None:
    at = plan_of(nnodes=2, node_rank=1, master_addr="n1")
    here = plan_of(nnodes=2, master_port=1234)
    named = plan_of(None, "R", nnodes=2, rdzv_id="first/../..")

    assert (at.meeting, at.host, at.port, at.node_rank) == ("address", "n1", 29500, 1)
    assert (here.meeting, here.host, here.port) == ("address", "127.0.0.1", 1234)
    assert (named.meeting, named.launch) == ("directory", "first_.._..")


def translated(run_dir: str | None = None, **options: Any) -> Plan:
    checked = check_request(Request(script=__file__, options=options)).options
    return plan_of(None, run_dir, **checked)


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


@pytest.mark.parametrize("name", INSTEAD)
def test_an_option_that_only_torchrun_has_is_refused_with_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match="no such option of torchrun") as caught:
        translated(**{name: "x"})
    assert re.match("write --|leave it out: ", caught.value.hint)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nnodes": 2}, "2 nodes need a shared directory"),
        ({"nnodes": 2, "run_dir": "R"}, "need an --rdzv-id"),
        (
            {"nnodes": 2, "node_rank": 2, "master_addr": "n"},
            "--node-rank 2 is not one of the 2 nodes",
        ),
        ({"nnodes": 2, "standalone": True}, "--standalone works on one node"),
        ({"nnodes": 2, "rdzv_endpoint": "n"}, "--rdzv-endpoint: 2 nodes need numbers"),
        (
            {"nnodes": 2, "rdzv_endpoint": "n", "master_addr": "n"},
            "--rdzv-endpoint and --master-addr exclude each other",
        ),
        ({"nnodes": "1:2"}, "--nnodes 1:2: the number of nodes cannot change here"),
        ({"local_ranks_filter": "0:1"}, "'0:1' is not a list of numbers from 0"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        translated(**options)


def test_output_goes_to_files_and_here_unless_somebody_says_where() -> None:
    def streams(local: int = 0, **options: Any) -> tuple[int, int]:
        plan = plan_of(**options)
        return streams_of(plan.tee, local), streams_of(plan.redirects, local)

    assert streams() == (3, 0)
    assert streams(tee="1") == (1, 0)
    assert streams(redirects="3") == (0, 3)
    by_rank = [streams(local, tee="0:3,11:2", redirects="1:1") for local in (0, 1, 11)]
    assert by_rank == [(3, 0), (0, 1), (2, 0)]
    assert plan_of(local_ranks_filter="0, 2").shown == (0, 2)


def test_inside_a_step_slurm_says_where_this_is() -> None:
    step = Step.from_environ(SRUN)

    assert plan_of(step, "R", nnodes=2, node_rank=1).nodes == 2
    with pytest.raises(ConfigError, match="--nnodes is 3, and Slurm says 2"):
        plan_of(step, "R", nnodes=3)
    with pytest.raises(ConfigError, match="--node-rank is 0, and Slurm says 1"):
        plan_of(step, "R", node_rank=0)
    with pytest.raises(ConfigError, match="2 nodes need a shared directory"):
        plan_of(step)


def test_a_launch_on_one_node_of_several_is_told_unless_it_is_meant() -> None:
    job = {"SLURM_JOB_NUM_NODES": "2"}

    def told(environ: dict[str, str], **options: Any) -> str:
        request = Request(script="train.py", options=options, run_dir=Path("run"))
        step = Step.from_environ(environ)
        return left_out(request, plan_of(step, "run"), environ)

    assert told(job).startswith("this job has 2 nodes, and these ranks start on this one alone")
    # As in a shell of 'srun --pty'.
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert "with srun" in told({**SRUN, **alone, **job})
    assert not told({**SRUN, **job})
    assert not told(job, nnodes=1)
    assert not told({"SLURM_JOB_NUM_NODES": "1"})
    assert not told({})


def test_where_srun_started_every_rank_options_of_an_agent_are_refused() -> None:
    ranks = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    step = Step.from_environ(ranks)
    assert step is not None
    module = Request(script="a", options={"module": True}, run_dir=Path("R"))

    assert task_plan(module, step, backend="gloo").ranks == 2
    with pytest.raises(
        ConfigError, match="--max-restarts, --tee: not available when srun starts each rank"
    ):
        task_plan(replace(module, options={"max_restarts": 1, "tee": "3"}), step, backend="gloo")
    with pytest.raises(ConfigError, match="2 ranks need a shared directory"):
        task_plan(replace(module, run_dir=None), step, backend="gloo")


@pytest.mark.torch
def test_where_srun_started_every_rank_python_has_nothing_to_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    for name, value in {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match="srun has started every rank here"):
        launch("sh", no_python=True, run_dir=tmp_path)


def test_ranks_share_the_cpus_and_learn_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(9)))
    plan = plan_of(None, "R")

    found = launcher.surroundings(plan, {"SLURM_JOB_END_TIME": "1790000000"})

    assert found == {
        "HPCTK_BACKEND": "gloo",
        "HPCTK_RUN_DIR": "R",
        "HPCTK_DEADLINE": "1790000000",
        "OMP_NUM_THREADS": "4",
    }
    alone = replace(plan, form="task", run_dir=None)
    assert launcher.surroundings(alone, {})["OMP_NUM_THREADS"] == "9"
    kept = launcher.surroundings(alone, {"OMP_NUM_THREADS": "3"})
    assert kept == {"HPCTK_BACKEND": "gloo"}


# What ends mean


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75], True),
        ([75, 0, 75], True),
        ([75, -15, -9], True),
        ([0, 0], False),
        ([-15], False),
        ([75, 1], False),
        ([75, -11], False),
        ([], False),
    ],
    ids=str,
)
def test_ranks_that_left_with_75_saved_their_state(codes: list[int], expected: bool) -> None:
    assert saved(codes) is expected


def failure(rank: int, code: int, *, log: Path | None = None) -> RankFailure:
    return RankFailure(rank=rank, code=code, log=log)


def test_the_cause_is_the_rank_that_a_signal_ended() -> None:
    assert root_cause([failure(0, 1), failure(3, -9)]).rank == 3
    assert root_cause([failure(0, 75), failure(1, 1)]).rank == 1


def test_the_cause_is_the_rank_whose_error_was_written_first(tmp_path: Path) -> None:
    logs = [tmp_path / "0", tmp_path / "1"]
    for log, at in zip(logs, (20.5, 20.25), strict=True):
        log.touch()
        os.utime(log, (at, at))

    assert root_cause([failure(rank, 1, log=log) for rank, log in enumerate(logs)]).rank == 1


def test_a_failure_names_rank_host_signal_and_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.restart-2.err"
    log.write_text("before\nTraceback (most recent call last):\n  x\nRuntimeError: y\n")

    killed = failure_error(failure(1, -9, log=log), host="n2", restarts=2)
    ended = failure_error(failure(0, 3), host="n2", restarts=1)
    unnamed = failure_error(failure(0, -99), host="n", restarts=0)

    first, *rest = killed.message.splitlines()
    assert first == f"rank 1 on n2 ended by SIGKILL, after 2 restarts; its log: {log}"
    assert rest == ["  Traceback (most recent call last):", "    x", "  RuntimeError: y"]
    assert "memory ran out" in killed.hint
    assert ended.message == "rank 0 on n2 ended with exit code 3, after 1 restart"
    assert ended.hint == ""
    assert unnamed.message == "rank 0 on n ended by signal 99"


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ('{"message": {"message": "m", "extraInfo": {"py_callstack": "a\\nE: x\\n"}}}', "E: x"),
        ('{"message": "E: text"}', "E: text"),
        ('{"message": null}', "E: of the log"),
        ('{"message": {}}', "E: of the log"),
        ('{"message": {"extraInfo": 7}}', "E: of the log"),
        ("[1]", "E: of the log"),
        ('{"mess', "E: of the log"),
        ("[" * 100_000, "E: of the log"),
        ("", "E: of the log"),
        (None, "E: of the log"),
    ],
)
def test_a_recorded_exception_describes_a_failure_and_else_the_log_does(
    recorded: str | None, told: str, tmp_path: Path
) -> None:
    log, error_file = tmp_path / "err", tmp_path / "error.json"
    log.write_text("E: of the log\n")
    if recorded is not None:
        error_file.write_text(recorded)

    error = failure_error(RankFailure(0, 1, log, error_file), host="n0", restarts=0)

    assert error.message.splitlines()[-1] == f"  {told}"


# What the ends of some mean for others


class Ended:
    """Ranks with given exit codes; those that run end by SIGTERM when they are told to."""

    def __init__(self, *codes: int | None) -> None:
        self.now = dict(enumerate(codes))

    def codes(self) -> dict[int, int | None]:
        return dict(self.now)

    def end(self) -> None:
        self.now = {local: -15 if code is None else code for local, code in self.now.items()}

    def failures(self, ended: list[int]) -> list[RankFailure]:
        return [failure(local, self.now[local] or 0) for local in ended]


class Round:
    """The only round of other nodes of which the test says how they are."""

    def __init__(
        self, number: int = 0, *, ending: Ending | None = None, wanted: bool = False
    ) -> None:
        self.number = number
        self._ending, self._wanted = ending, wanted

    def ended(self) -> Ending | None:
        return self._ending

    def finish(self) -> bool:
        return self._ending is None and not self._wanted

    def wanted(self) -> bool:
        return self._wanted


def watched(
    ranks: Ended, there: Round | None = None, *, max_restarts: int = 0, clock: ManualClock
) -> Outcome | None:
    return watch(
        cast("Ranks", ranks),
        cast("Rounds", there or Round()),
        max_restarts=max_restarts,
        patience_s=30,
        clock=clock.monotonic,
        sleep=clock.advance,
    )


def test_a_summary_has_the_exit_code_the_latest_checkpoint_and_the_next_command(
    tmp_path: Path,
) -> None:
    outcome, where = Outcome(0, ranks=2, restarts=1), tmp_path / "a run"
    (where / "checkpoints").mkdir(parents=True)
    for step in (9, 10):
        (where / f"checkpoints/step-{step:09}.pt").touch()

    line = summary(outcome, where)

    assert line == (
        f"exit code 0; 2 ranks, 1 restart; last checkpoint: step 10, {where}/checkpoints/"
        f"step-000000010.pt; next: hpctk status '{where}'"
    )
    assert summary(outcome, None).startswith("exit code 0; 2 ranks, 1 restart; with --run-dir DIR")
    assert "run the same command again" in summary(Outcome(75), where)
    failed = Outcome(75, ConfigError("no space"))
    assert summary(failed, where).startswith("exit code 75; 0 ranks, 0 restarts; last")
    (tmp_path / "checkpoints").touch()
    assert summary(outcome, tmp_path).endswith(f"1 restart; next: hpctk status {tmp_path}")


def test_ranks_that_saved_have_others_wait_for_a_while() -> None:
    clock = ManualClock()
    began, ranks = clock.monotonic(), Ended(75, None)

    assert watched(ranks, max_restarts=3, clock=clock) == Outcome(75)
    assert clock.monotonic() - began == pytest.approx(30, abs=0.2)
    assert ranks.now == {0: 75, 1: -15}
    assert watched(Ended(75, 0), clock=clock) == Outcome(75)


def test_a_rank_that_failed_has_the_others_stopped_at_once() -> None:
    clock = ManualClock()
    began, ranks = clock.monotonic(), Ended(None, -9, 75)

    assert watched(ranks, clock=clock) == Outcome(75)
    failed = watched(Ended(None, 7), Round(2), max_restarts=2, clock=clock)
    assert failed is not None
    assert failed.error is not None
    assert failed.code == 7
    assert re.match("rank 1 on .* with exit code 7, after 2 restarts", failed.error.message)
    assert clock.monotonic() == began


def test_a_node_follows_one_that_failed_at_once_and_one_that_saved_later() -> None:
    failed, left = (Round(ending=Ending(1, "n1", code, "x")) for code in (3, 75))
    clock = ManualClock()
    began = clock.monotonic()

    for ranks, there, code in ((Ended(None), failed, 3), (Ended(0), left, 75)):
        found = watched(ranks, there, clock=clock)
        assert found is not None
        assert found.error is not None
        assert (found.code, found.error.message) == (code, "node 1 (n1) has ended: x")
    assert clock.monotonic() == began
    running = Ended(None)
    found = watched(running, left, clock=clock)
    assert found is not None
    assert found.code == 75
    assert running.now == {0: -15}
    assert clock.monotonic() - began == pytest.approx(30, abs=0.2)


# Output


def test_lines_appear_complete_with_their_rank_and_the_rest_at_the_end(tmp_path: Path) -> None:
    shown, path = io.StringIO(), tmp_path / "out"
    path.touch()
    copied = _File(path, "[rank 0] ", shown)

    with path.open("ab", buffering=0) as file:
        for text, expected in ((b"step", ""), (b" 7\nno", "step 7"), (b"w\n\xff", "now")):
            file.write(text)
            copied.copy()
            assert shown.getvalue().endswith(f"{expected}\n" if expected else "")
    copied.copy(last=True)

    assert shown.getvalue() == "[rank 0] step 7\n[rank 0] now\n[rank 0] \ufffd\n"


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


def test_a_long_line_without_an_end_is_shown_and_forgotten(tmp_path: Path) -> None:
    shown, path = io.StringIO(), tmp_path / "out"
    path.write_bytes(b"x" * (3 << 20))
    copied = _File(path, "", shown)

    copied.copy()
    assert len(shown.getvalue()) == (1 << 20) + 1
    copied.copy(last=True)
    assert shown.getvalue().count("x") == 3 << 20


def test_a_launch_under_nohup_ignores_the_end_of_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with agent.signals(lambda _: None, last=False):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_launch_of_a_name_has_a_directory_of_its_own(tmp_path: Path) -> None:
    made = [make_next(tmp_path / "logs" / "12.0.0") for _ in range(3)]

    assert [path.name for path in made] == ["12.0.0", "12.0.0-2", "12.0.0-3"]
    assert all(path.is_dir() for path in made)
    (tmp_path / "file").touch()
    for place, named in ((Path("/proc/none/logs"), "/proc/none"), (tmp_path / "file", "/file")):
        with pytest.raises(ConfigError, match=f"{named}: cannot create a directory there"):
            make_next(place / "12.0.0")


@pytest.mark.torch
def test_a_rank_is_bound_to_the_cpus_of_its_gpus_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xCA, pci_device_id=0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(2, 16)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: gpu)
    (tmp_path / "bus/pci/devices/0000:ca:00.0").mkdir(parents=True)
    for number, cpus in ((0, "0-3"), (1, "4-7,12-15")):
        node = tmp_path / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")

    for number, expected in ((1, "4-7,12-15"), (-1, "2-3")):
        (tmp_path / "bus/pci/devices/0000:ca:00.0/numa_node").write_text(f"{number}\n")
        assert cpus_near_gpu(0, tmp_path) == expected
    with pytest.raises(ConfigError, match="--numa-binding: torch sees no GPU 1"):
        cpus_near_gpu(1, tmp_path)


def test_a_warning_right_after_the_start_ends_no_rank(tmp_path: Path) -> None:
    ranks = Ranks(plan_of(), tmp_path, Place(Address("n0", 1), 0, 2), restart=0)

    ranks.start(["true"], os.environ)
    ranks.warn(signal.SIGUSR1)
    wait_until(lambda: None not in ranks.codes().values(), "the ranks to end")
    ranks.end()

    assert ranks.codes() == {0: 0, 1: 0}
