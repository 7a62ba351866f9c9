"""Launching: options, what srun says, what becomes of them, and what ends mean."""

from __future__ import annotations

import argparse
import io
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import hpc_toolkit
from hpc_toolkit.cli import load_commands
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.launch import launch as launching
from hpc_toolkit.training.launch.agent import Watch
from hpc_toolkit.training.launch.elastic import _patience_s
from hpc_toolkit.training.launch.options import all_options
from hpc_toolkit.training.launch.outcome import (
    SAVED,
    Outcome,
    RankFailure,
    exit_code,
    failure_error,
    last_lines,
    root_cause,
    saved,
)
from hpc_toolkit.training.launch.plan import (
    Plan,
    Request,
    Step,
    check_request,
    left_out,
    make_plan,
    task_plan,
)
from hpc_toolkit.training.launch.ranklogs import WholeLines, drop_if_torn, make_next
from hpc_toolkit.training.launch.rendezvous import FAREWELL_S, Ending
from tests.manualclock import ManualClock

SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


def namespace(**values: Any) -> Any:
    """What torchrun's parser makes of no options, with ``values``."""
    defaults = {
        "nnodes": "1:1",
        "node_rank": 0,
        "nproc_per_node": 2,
        "rdzv_id": "none",
        "log_dir": None,
        "logs_specs": None,
        "standalone": False,
        "master_addr": "127.0.0.1",
        "master_port": None,
    }
    return SimpleNamespace(**{**defaults, **values})


def plan_of(
    step: Step | None = None,
    run_dir: str | None = None,
    environ: dict[str, str] | None = None,
    **options: Any,
) -> Plan:
    request = Request(
        script="train.py", options=options, run_dir=Path(run_dir) if run_dir else None
    )
    return make_plan(request, namespace(**options), environ or {}, step=step, backend="gloo")


# Options


@pytest.mark.torch
def test_every_option_of_torchrun_is_an_option_of_launch() -> None:
    run = pytest.importorskip("torch.distributed.run")
    known = all_options()

    found = {
        action.dest: action
        for action in run.get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }

    assert set(found) == set(known)
    for name, action in found.items():
        option = known[name]
        assert {option.spelling, option.short or option.spelling} <= set(action.option_strings)
        assert bool(option.metavar) == (action.nargs != 0), name
        duration = name in ("monitor_interval", "shutdown_timeout")
        assert (option.metavar == "DURATION") == duration, name
        assert (option.metavar == "N") == (action.type is int and not duration), name
        assert action.type is not float or duration, name
        assert not isinstance(action, argparse._StoreFalseAction)


@pytest.mark.torch
def test_options_are_read_by_torchruns_own_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "0.5")
    options = {"nproc_per_node": "2", "module": True, "redirects": "3", "max_restarts": 4}

    found = launching._namespace(
        Request(script="pkg.train", arguments=("--lr", "1", "-m"), options=options)
    )

    assert (found.nproc_per_node, found.module, found.redirects) == ("2", True, "3")
    assert (found.max_restarts, found.monitor_interval) == (4, 0.5)
    assert (found.training_script, found.training_script_args) == ("pkg.train", ["--lr", "1", "-m"])


@pytest.mark.torch
def test_what_torch_would_meet_too_late_is_told_as_bad_input() -> None:
    pytest.importorskip("torch")
    for options, told in (
        ({"monitor_interval": -5.0}, "--monitor-interval: -5 s is not above 0 s"),
        ({"event_log_handler": "none"}, "torch has none called 'none'"),
        ({"numa_binding": "node"}, r"--numa-binding: torch sees fewer GPUs \(.\) than"),
    ):
        found = launching._namespace(Request(script="a", options=options))
        found.nproc_per_node = 99

        with pytest.raises(ConfigError, match=told):
            launching._configured(found, plan_of())


@pytest.mark.torch
def test_output_goes_to_files_and_here_unless_somebody_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")

    def where(**options: str) -> tuple[str, str]:
        found = launching._namespace(Request(script="a", options=options))
        return found.redirects, found.tee

    assert where() == ("0", "3")
    assert where(tee="0") == ("0", "0")
    assert where(redirects="3") == ("3", "0")
    assert where(logs_specs="mine") == ("0", "0")
    monkeypatch.setenv("PET_TEE", "1")
    assert where() == ("0", "1")


@pytest.mark.torch
def test_a_torch_without_a_part_that_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip("torch.distributed.run")
    old = SimpleNamespace(monitor_interval=0.1, event_log_handler="null")
    monkeypatch.setattr(run, "config_from_args", lambda _: (old, "a", []))

    with pytest.raises(ConfigError, match=r"newer torch.* has no .*shutdown_timeout"):
        launching._configured(namespace(redirects="0", tee="0"), plan_of())


@pytest.mark.torch
def test_a_node_waits_as_long_as_others_take_to_look() -> None:
    pytest.importorskip("torch")
    config: Any = SimpleNamespace(shutdown_timeout=30, monitor_interval=12.0)

    assert _patience_s(config, Outcome(0)) == FAREWELL_S + 12
    assert _patience_s(config, Outcome(SAVED)) == 30 + 12


def test_zero_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def launched(request: Request, *, replace: bool) -> Outcome:
        asked.append(request)
        return Outcome(0)

    monkeypatch.setattr(launching, "launch", launched)
    words = ["launch", "--max-restarts", "0", "--shutdown-timeout", "0", "--monitor-interval", "1s"]

    ended = CliRunner().invoke(load_commands("launch"), [*words, "train.py"])

    assert ended.exit_code == 0, ended.output
    assert asked[0].options == {"max_restarts": 0, "shutdown_timeout": 0, "monitor_interval": 1.0}


@pytest.mark.torch
def test_a_value_that_torchrun_refuses_is_told_as_bad_input() -> None:
    pytest.importorskip("torch")

    with pytest.raises(ConfigError, match="invalid int value: 'many'"):
        launching._namespace(Request(script="a", options={"max_restarts": "many"}))
    with pytest.raises(ConfigError, match=r"--nproc-per-node 0 starts no rank"):
        launching._ranks("0")
    with pytest.raises(ConfigError, match="--nproc-per-node some"):
        launching._ranks("some")


def test_what_cannot_start_is_refused_before_anything_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    good = Request(script=str(script))
    check_request(good)

    with pytest.raises(ConfigError, match=r"there is no script 'none\.py'"):
        check_request(Request(script="none.py"))
    with pytest.raises(ConfigError, match=r"there is no module 'no_such_package\.train'"):
        check_request(Request(script="no_such_package.train", options={"module": True}))
    with pytest.raises(ConfigError, match="there is no program 'no-such-program'"):
        check_request(Request(script="no-such-program", options={"no_python": True}))
    with pytest.raises(ConfigError, match="launch has no option 'nproc'"):
        check_request(replace(good, options={"nproc": 2}))
    with pytest.raises(ConfigError, match="'mpi' is neither nccl nor gloo"):
        check_request(replace(good, backend="mpi"))
    for timeout_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"--start-timeout: .* is outside 0 s to 366 days"):
            check_request(replace(good, start_timeout_s=timeout_s))
    for called, told in (
        (replace(good, start_timeout_s="3"), "start_timeout: '3' is not a number"),  # type: ignore[arg-type] # what is refused
        (replace(good, options={"module": "yes"}), "module: 'yes' is neither True nor False"),
        (replace(good, options={"nproc_per_node": [2]}), r"nproc_per_node: \[2\] is neither"),
    ):
        with pytest.raises(ConfigError, match=told):
            check_request(called)
    with pytest.raises(ConfigError, match="run_dir: 5 is not a path"):
        hpc_toolkit.launch(str(script), run_dir=5)  # type: ignore[arg-type] # as above
    with pytest.raises(ConfigError, match="there is no module ''"):
        check_request(Request(script="", options={"module": True}))


def test_a_script_whose_name_is_an_option_of_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-x.py").write_text("")

    with pytest.raises(ConfigError, match=r"'-x\.py' as an option") as caught:
        check_request(Request(script="-x.py"))

    assert caught.value.hint == "write ./-x.py"
    check_request(Request(script="./-x.py"))


def test_a_module_and_a_program_that_exist_are_accepted() -> None:
    check_request(Request(script="json.tool", options={"module": True}))
    check_request(Request(script="sh", options={"no_python": True}))


# What srun says


def test_a_step_is_read_from_sruns_variables() -> None:
    step = Step.from_environ({**SRUN, "SLURM_RESTART_COUNT": "3"})

    assert step is not None
    assert (step.task, step.node, step.local, step.tasks) == (1, 1, 0, (1, 1))
    assert step.name == "12.3.0"
    assert step.per_node


@pytest.mark.parametrize("step_id", [None, "", "batch", "extern"])
def test_outside_a_step_there_is_none(step_id: str | None) -> None:
    environ = {**SRUN, "SLURM_STEP_ID": step_id or ""}
    if step_id is None:
        del environ["SLURM_STEP_ID"]

    assert Step.from_environ(environ) is None


def test_an_uneven_step_has_the_ranks_of_each_node() -> None:
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_PROCID": "9"}

    step = Step.from_environ({**environ, "SLURM_NODEID": "2", "SLURM_LOCALID": "1"})

    assert step is not None
    assert step.tasks == (4, 4, 2)
    assert not step.per_node
    plan = task_plan(Request(script="a", run_dir=Path("R")), step, {}, backend="gloo")
    assert (plan.form, plan.nodes, plan.node_rank, plan.ranks) == ("task", 3, 2, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_PROCID": "x"},
        {"SLURM_NODEID": "2"},
        {"SLURM_LOCALID": "1"},
        {"SLURM_PROCID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": ""},
        {"SLURM_RESTART_COUNT": "x"},
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


def test_one_node_meets_nobody_and_has_a_name_of_its_own() -> None:
    plan = plan_of()

    assert (plan.meeting, plan.nodes, plan.port) == ("alone", 1, 0)
    assert plan.launch.startswith("local-")
    assert plan.log_dir is None


def test_nodes_meet_where_the_user_says() -> None:
    at = plan_of(nnodes="2", node_rank=1, master_addr="n1")
    here = plan_of(nnodes="2", master_port=1234)
    named = plan_of(None, "R", nnodes="2", rdzv_id="first/../..")
    torchs = plan_of(nnodes="2:4", rdzv_backend="c10d", rdzv_endpoint="n1:1")

    assert (at.meeting, at.host, at.port, at.node_rank) == ("address", "n1", 29500, 1)
    assert (here.meeting, here.host, here.port) == ("address", "127.0.0.1", 1234)
    assert (named.meeting, named.launch) == ("directory", "first_.._..")
    assert torchs.meeting == "torch"


def test_a_variable_of_torchrun_counts_as_given() -> None:
    request = Request(script="a")
    environ = {"PET_NNODES": "2", "PET_MASTER_ADDR": "n1"}

    plan = make_plan(
        request, namespace(nnodes="2", master_addr="n1"), environ, step=None, backend="gloo"
    )

    assert (plan.meeting, plan.host) == ("address", "n1")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"nnodes": "2"}, "2 nodes need a directory"),
        ({"nnodes": "2", "run_dir": "R"}, "need a name for this launch"),
        ({"nnodes": "two"}, "'two' is not a number of nodes"),
        ({"nnodes": "0"}, "'0' is not a number of nodes"),
        ({"nnodes": "4:2"}, "'4:2' is not a number of nodes"),
        ({"nnodes": "2:4"}, "only torch's c10d takes a range"),
        (
            {"nnodes": "2", "node_rank": 2, "master_addr": "n"},
            "--node-rank 2 is not one of the 2 nodes",
        ),
        ({"nnodes": "2", "standalone": True}, "--standalone is for one node"),
        ({"nnodes": "2", "master_port": 65536}, "65536 is not a valid port"),
        ({"master_port": 0}, "0 is not a valid port"),
        ({"rdzv_conf": "timeout=3"}, "--rdzv-conf says how torch's own"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan_of(**options)


def test_inside_a_step_slurm_says_where_this_is() -> None:
    step = Step.from_environ(SRUN)

    assert plan_of(step, "R", nnodes="2", node_rank=1).nodes == 2
    with pytest.raises(ConfigError, match="--nnodes is 3, and Slurm says 2"):
        plan_of(step, "R", nnodes="3")
    with pytest.raises(ConfigError, match="--node-rank is 0, and Slurm says 1"):
        plan_of(step, "R", node_rank=0)
    with pytest.raises(ConfigError, match="2 nodes need a directory"):
        plan_of(step)


def test_a_launch_on_one_node_of_several_is_told_unless_it_is_meant() -> None:
    job = {"SLURM_JOB_NUM_NODES": "2"}

    def told(environ: dict[str, str], **options: Any) -> str:
        request = Request(script="train.py", options=options, run_dir=Path("run"))
        step = Step.from_environ(environ)
        found = left_out(request, plan_of(step, "run", environ), environ)
        return f"{found.message}; {found.hint}" if found else ""

    assert told(job).startswith("this job has 2 nodes, and these ranks start on this one alone")
    # As in a shell of 'srun --pty'.
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert "with srun" in told({**SRUN, **alone, **job})
    assert not told({**SRUN, **job})
    assert not told(job, nnodes="1")
    assert not told({"SLURM_JOB_NUM_NODES": "1"})
    assert not told({})


def test_where_srun_started_every_rank_options_of_an_agent_are_refused() -> None:
    ranks = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    step = Step.from_environ(ranks)
    assert step is not None
    module = Request(script="a", options={"module": True}, run_dir=Path("R"))

    assert task_plan(module, step, {}, backend="gloo").ranks == 2
    with pytest.raises(ConfigError, match="--max-restarts, --tee: srun started each rank"):
        task_plan(
            replace(module, options={"max_restarts": 1, "tee": "3"}), step, {}, backend="gloo"
        )
    with pytest.raises(ConfigError, match="--nproc-per-node: srun started"):
        task_plan(module, step, {"PET_NPROC_PER_NODE": "2"}, backend="gloo")
    with pytest.raises(ConfigError, match="2 ranks need a directory"):
        task_plan(replace(module, run_dir=None), step, {}, backend="gloo")


def test_ranks_share_the_cpus_and_learn_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(9)))
    plan = plan_of(None, "R")

    found = launching.surroundings(plan, {"SLURM_JOB_END_TIME": "1790000000"})

    assert found == {
        "HPCTK_BACKEND": "gloo",
        "HPCTK_RUN_DIR": "R",
        "HPCTK_DEADLINE": "1790000000",
        "OMP_NUM_THREADS": "4",
    }
    alone = replace(plan, form="task", run_dir=None)
    assert launching.surroundings(alone, {})["OMP_NUM_THREADS"] == "9"
    kept = launching.surroundings(alone, {"OMP_NUM_THREADS": "3"})
    assert kept == {"HPCTK_BACKEND": "gloo"}


# What ends mean


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (7, 7), (75, 75), (-9, 137), (-15, 143)])
def test_the_exit_code_is_that_of_a_shell(code: int, expected: int) -> None:
    assert exit_code(code) == expected


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


def failure(rank: int, code: int, *, first: bool = True, said_at: float = 0) -> RankFailure:
    return RankFailure(rank=rank, code=code, first=first, said_at=said_at)


def test_the_cause_is_the_rank_that_a_signal_ended() -> None:
    followed = [failure(0, 1, said_at=1), failure(3, -9, said_at=2)]

    assert root_cause(followed).rank == 3
    assert root_cause([failure(0, -15, first=False), failure(1, 5)]).rank == 1
    assert root_cause([failure(0, 75), failure(1, 1)]).rank == 1
    assert root_cause([failure(0, -15, first=False)]).rank == 0


def test_the_cause_is_the_rank_whose_error_was_written_first() -> None:
    assert root_cause([failure(0, 1, said_at=20.5), failure(1, 1, said_at=20.25)]).rank == 1


def test_a_failure_names_rank_host_signal_and_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.restart-2.err"
    log.write_text("before\nTraceback (most recent call last):\n  x\nRuntimeError: y\n")

    killed = failure_error(failure(1, -9), host="n2", restarts=2, log=log)
    ended = failure_error(failure(0, 3), host="n2", restarts=1, log=None)

    first, *rest = killed.message.splitlines()
    assert first == f"rank 1 on n2 ended by SIGKILL, after 2 restarts; its log: {log}"
    assert rest == ["  Traceback (most recent call last):", "    x", "  RuntimeError: y"]
    assert "memory ran out" in killed.hint
    assert ended.message == "rank 0 on n2 ended with exit code 3, after 1 restart"
    assert ended.hint == ""


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("ModuleNotFoundError: No module named 'x'", "install it"),
        ("python: can't open file 'x'", "on every node"),
        ("RuntimeError: The server socket ... Address already in use", "leave the choice of ports"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "a smaller batch"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "--backend gloo"),
    ],
)
def test_a_common_failure_has_a_hint(said: str, hint: str, tmp_path: Path) -> None:
    log = tmp_path / "rank-0.restart-0.err"
    log.write_text(said)

    assert hint in failure_error(failure(0, 1), host="n", restarts=0, log=log).hint


def test_the_end_of_a_log_is_short_and_a_missing_one_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"{number}\n" for number in range(100_000)))

    assert last_lines(log)[-1] == "99999"
    assert len(last_lines(log)) == 12
    assert last_lines(tmp_path / "none") == []
    assert last_lines(tmp_path) == []


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    error = failure_error(failure(0, -99), host="n", restarts=0, log=None)

    assert error.message == "rank 0 on n ended by signal 99"


# What the ends of some mean for others


def test_ranks_that_saved_have_others_wait_for_a_while() -> None:
    clock = ManualClock()
    watch = Watch(30, clock.monotonic)

    assert watch.verdict({0: None, 1: None}) == "go"
    assert watch.verdict({0: 0, 1: None}) == "go"
    assert watch.verdict({0: 75, 1: None}) == "wait"
    clock.advance(29)
    assert watch.verdict({0: 75, 1: None}) == "wait"
    clock.advance(1)
    assert watch.verdict({0: 75, 1: None}) == "go"
    assert watch.verdict({0: 75, 1: 75}) == "go"


def test_a_rank_that_failed_has_the_others_stopped() -> None:
    watch = Watch(30, ManualClock().monotonic)

    assert watch.verdict({0: None, 1: -9}) == "stop"
    assert watch.ended_first == {1}
    assert Watch(30).verdict({0: 75, 1: 1, 2: None}) == "stop"
    # Those that ended by themselves meanwhile are told from those that are stopped now.
    assert watch.verdict({0: 1, 1: -9}) == "go"
    assert watch.ended_first == {0, 1}


def test_a_node_follows_one_that_failed_at_once_and_one_that_saved_later() -> None:
    clock = ManualClock()
    watch = Watch(30, clock.monotonic)
    failed, left = Ending(1, "n1", 1, "x"), Ending(1, "n1", 75, "saved")

    assert watch.follows(failed, running=True)
    assert not watch.follows(left, running=True)
    assert watch.follows(left, running=False)
    clock.advance(30)
    assert watch.follows(left, running=True)


# Output


def test_a_line_that_a_rank_writes_in_pieces_appears_whole() -> None:
    under = io.StringIO()
    lines = WholeLines(under)

    for text in ("[rank 0] step", "[rank 1] other\n", "[rank 0]  ", "note\n", "[rank 0] 7\n"):
        assert lines.write(text) == len(text)
    assert under.getvalue() == "[rank 1] other\nnote\n[rank 0] step 7\n"


def test_what_a_rank_wrote_last_appears_at_the_end() -> None:
    under = io.StringIO()
    lines = WholeLines(under)
    lines.write("[rank 3] half")

    lines.end()

    assert under.getvalue() == "[rank 3] half\n"


def test_a_forked_rank_finds_the_file_to_send_elsewhere() -> None:
    with open(os.devnull, "w", encoding="utf-8") as under:
        assert WholeLines(under).fileno() == under.fileno()


def test_a_second_launch_of_a_name_has_a_directory_of_its_own(tmp_path: Path) -> None:
    made = [make_next(tmp_path / "logs" / "12.0.0") for _ in range(3)]

    assert [path.name for path in made] == ["12.0.0", "12.0.0-2", "12.0.0-3"]
    assert all(path.is_dir() for path in made)


def test_a_place_in_which_nothing_can_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/proc/none: no directory can be made there"):
        make_next(Path("/proc/none/logs/12.0.0"))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="/file: no directory can be made there"):
        make_next(file / "12.0.0")


def test_a_recorded_error_that_a_full_disk_cut_is_not_read(tmp_path: Path) -> None:
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    torn.touch()
    whole.write_text("{}")

    for path in (torn, whole, tmp_path / "none"):
        drop_if_torn(str(path))

    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_signal_to_handle_must_have_a_name() -> None:
    from hpc_toolkit.training.launch.elastic import _signal

    assert _signal("SIGUSR2") == signal.SIGUSR2
    with pytest.raises(ConfigError, match="there is no signal 'SIGNONE'"):
        _signal("SIGNONE")
    with pytest.raises(ConfigError, match="no process can handle SIGKILL"):
        _signal("SIGKILL")
