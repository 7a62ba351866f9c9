"""Every template on a real Slurm: what starts again, with which exit code, and what is around it.

Two nodes with two ranks each are enough. The warning is sent by hand where Slurm would send it near
the time limit; test_scenarios.py waits for a limit.
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import Site

pytestmark = [pytest.mark.slow]


# --- work-queue ---


@pytest.mark.newslurm
def test_a_job_that_was_warned_starts_again_and_then_ends_with_0(site: Site) -> None:
    site.init_held(24)
    job = site.submit()
    site.wait_for_held(4)

    site.warn_and_release(job)
    ended = site.end_of(job)

    assert ended == ("COMPLETED", 0, 1)
    assert site.said(job).count("requeueing") == 1
    assert site.finished()["done"] == 24


def test_a_cancelled_job_stays_cancelled(site: Site) -> None:
    site.init(400, 0.5)
    job = site.submit(teardown=("touch torn-down",))
    site.wait_for_workers(4)

    site.lab.run("scancel", job)
    ended = site.end_of(job)
    wait_until(lambda: "step ended" in site.said(job), "the end of the script")

    assert ended == ("CANCELLED", 75, 0)
    assert "requeueing" not in site.said(job)
    wait_until((site.cwd / "torn-down").exists, "the teardown")
    assert site.lab.state(job) == "CANCELLED"


def start_with_checks_held(site: Site, **fields: Any) -> tuple[str, str]:
    """A job of two nodes that checks them once the file "lost" exists, and its second node."""
    begin = "touch begun; until [[ -e lost ]]; do sleep 0.1; done"
    (site.cwd / "begin.sh").write_text(begin)
    script = site.script(setup=("source begin.sh",), ntasks_per_node=1, **fields)
    text = script.read_text()
    assert " batch work " in text
    script.write_text(text.replace(" batch work ", " batch work --check-within=5s "))
    job = site.lab.sbatch(script, cwd=site.cwd)
    wait_until((site.cwd / "begun").exists, "the setup")
    return job, site.hosts_of(job)[1]


def at_each_start(site: Site, code: str) -> tuple[tuple[str, str]]:
    """Variables with which every Python of the job runs ``code`` first."""
    place = site.cwd / "first'"
    place.mkdir()
    (place / "sitecustomize.py").write_text(code)
    return (("PYTHONPATH", str(place)),)


@pytest.mark.parametrize(
    "down", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["silent", "down"]
)
def test_a_node_that_is_lost_while_the_job_starts_is_left_out_of_the_next_start(
    site: Site, *, down: bool
) -> None:
    site.init(4, 0.1)
    site.lab.configure(KillWait=5)
    # Slower than srun, which gives up a node that does not answer after 11 s and KillWait.
    slow = "'SLURM_STEP_ID' in os.environ and os.environ.get('SLURM_RESTART_COUNT', '0') == '0'"
    env = at_each_start(site, f"import os, time\nif {slow}:\n    time.sleep(30)\n")
    job, lost = start_with_checks_held(site, env=env)

    site.lab.lab.crash(lost, daemon_only=not down)
    (site.cwd / "lost").touch()
    site.wait_for_text(job, "a node was lost before the preflight was complete")
    if not down:
        site.lab.scontrol("update", f"NodeName={lost}", "State=DOWN", "Reason=silent")
    ended = site.end_of(job)

    assert ended == ("COMPLETED", 0, 1), site.said(job)
    assert lost not in site.hosts()
    assert site.finished()["done"] == 4


@pytest.mark.newslurm
def test_a_job_whose_node_came_back_without_it_starts_again(site: Site) -> None:
    site.init(4, 0.1)
    job, lost = start_with_checks_held(site)

    site.lab.scontrol("update", f"NodeName={lost}", "State=DOWN", "Reason=lost")
    site.lab.scontrol("update", f"NodeName={lost}", "State=RESUME")
    (site.cwd / "lost").touch()

    assert site.end_of(job) == ("COMPLETED", 0, 1), site.said(job)
    assert site.finished()["done"] == 4


@pytest.mark.newslurm
def test_a_cancelled_job_that_has_lost_a_node_is_torn_down(site: Site) -> None:
    site.lab.configure(KillWait=16)
    site.init(400, 0.5)
    job = site.submit(teardown=("touch torn-down",))
    site.wait_for_workers(4)

    site.lab.lab.crash(site.hosts_of(job)[1])
    site.lab.run("scancel", job)

    wait_until(
        (site.cwd / "torn-down").exists, lambda: f"the teardown:\n{site.said(job)}", limit_s=40
    )
    assert "requeueing" not in site.said(job)


def test_a_node_that_lacks_a_gpu_is_named_and_the_other_works(site: Site) -> None:
    site.init(4, 0.1)
    lacks = "os.environ.get('SLURMD_NODENAME') == 'n2'"
    see = "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1,2'"
    env = at_each_start(site, f"import os\nif {lacks}:\n    {see}\n")

    job = site.submit(gpus_per_node=4, ntasks_per_node=4, nodelist="n[1-2]", env=env)
    ended = site.end_of(job)

    assert ended == ("COMPLETED", 0, 0), site.said(job)
    assert "n2: only 3 of 4 GPUs are there" in site.said(job)
    assert "left out: 1 of 2 nodes" in site.said(job)
    assert site.hosts() == ["n1"] * 4


OTHER_GPUS: list[dict[str, Any]] = [
    {"gpus_per_node": 4, "ntasks_per_node": 2, "isolate_gpus": True},
    {"gpus_per_node": 4, "ntasks_per_node": 4, "cpus_per_gpu": 2},
    {"gpus_per_node": 4, "site": {"gpu_request": "gres", "gpu_type": "l40s"}},
    {"gpus_per_node": 4, "ntasks_per_node": 4, "site": {"gpu_request": "gpus-per-task"}},
    {"ntasks": 3, "ntasks_per_node": None},
]


@pytest.mark.parametrize(
    "fields",
    [
        {"gpus_per_node": 2, "ntasks_per_gpu": 2, "ntasks_per_node": None},
        *(pytest.param(one, marks=pytest.mark.soak) for one in OTHER_GPUS),
    ],
    ids=" ".join,
)
def test_every_way_to_ask_for_gpus_passes_the_checks_of_the_nodes(
    site: Site, fields: dict[str, Any]
) -> None:
    site.init(4, 0.05)

    job = site.submit(**fields)
    ended = site.end_of(job)

    assert ended[:2] == ("COMPLETED", 0), site.said(job)
    assert site.finished()["done"] == 4


# --- array ---


def test_elements_of_an_array_join_one_run_and_start_again_alone(site: Site) -> None:
    site.init(60, 0.5)
    job = site.submit("array", array="0-3", nodes=1, ntasks_per_node=1, output="%A_%a.out")
    site.wait_for_workers(4)
    # The last element has the number of the whole array.
    last = next(one for one in site.lab.records(job) if one.raw == job)

    site.warn(f"{job}_3")
    wait_until(
        lambda: {one.state for one in site.lab.records(job)} == {"COMPLETED"}, "all elements"
    )

    assert last.id == f"{job}_3"
    restarts = {one.id: one.restarts for one in site.lab.records(job)}
    assert restarts == {f"{job}_{index}": int(index == 3) for index in range(4)}
    assert {path.name for path in site.cwd.glob("*.out")} == {f"{job}_{i}.out" for i in range(4)}
    assert site.finished()["done"] == 60


# --- command ---


def test_a_program_gets_its_words_its_place_and_the_arrays_index(site: Site) -> None:
    words = ["it's", "$(touch canary)", "a b"]
    show = 'printf "<%s>" "$@" "$SLURM_PROCID" "$HPCTK_ARRAY_INDEX"; echo'
    command = ("bash", "-c", show, "_", *words)

    job = site.submit("command", command=command, array="5", array_offset=1000, ntasks_per_node=1)
    ended = site.end_of(job)

    assert ended[:2] == ("COMPLETED", 0)
    for rank in range(2):
        assert f"{rank}: <it's><$(touch canary)><a b><{rank}><1005>" in site.said(job)
    assert not (site.cwd / "canary").exists()


def test_a_program_that_asks_for_it_starts_again(site: Site) -> None:
    program = ("bash", "-c", "(( ${SLURM_RESTART_COUNT:-0} )) || exit 75; echo second")
    jobs = [site.submit("command", command=program, nodes=1) for _ in range(4)]

    ends = {site.end_of(job) for job in jobs}

    # Several at once, since ending and requeueing could be a race.
    assert ends == {("COMPLETED", 0, 1)}


def test_a_program_that_another_end_cuts_short_has_not_succeeded(site: Site) -> None:
    words = ("bash", "-c", "echo up; sleep 300")
    job = site.submit("command", command=words, nodes=1, ntasks_per_node=1)
    # srun puts the rank before it; what the script says of its command has the word too.
    wait_until(lambda: "0: up" in site.said(job), "the rank")

    site.lab.run("scancel", "--signal=TERM", job)

    assert site.end_of(job) == ("FAILED", 1, 0)
    assert "cut short (SIGTERM)" in site.said(job)


@contextmanager
def grace(site: Site, seconds: int) -> Iterator[None]:
    """Let preempted jobs go on for some time after SIGTERM."""
    site.lab.scontrol("update", "PartitionName=main", f"GraceTime={seconds}")
    try:
        yield
    finally:
        site.lab.scontrol("update", "PartitionName=main", "GraceTime=0")


def preempted(site: Site, job: str) -> bool:
    show = ("squeue", "--noheader", "--Format=PreemptTime", "--jobs", job)
    return site.lab.run(*show).stdout[:1].isdigit()


@pytest.mark.long
@pytest.mark.newslurm
def test_jobs_that_are_preempted_with_grace_start_again_once(site: Site) -> None:
    site.init(12, 4.0)
    # Slurm signals every process by itself: sleep may be gone before its shell is.
    waits = "echo begin; (( ${SLURM_RESTART_COUNT:-0} )) || sleep 300 && echo end"
    ends = "trap : TERM; echo begin; until [[ -e go ]]; do sleep 0.1; done; echo end"
    (site.cwd / "train.py").write_text(
        "import os, signal, sys, time\n"
        "print('begin', flush=True)\n"
        "if os.environ.get('SLURM_RESTART_COUNT', '0') == '0':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "    time.sleep(300)\n"
        "print('end', flush=True)\n"
    )
    with grace(site, 120):
        jobs = {
            "command": site.submit("command", command=("bash", "-c", waits),
                                   nodelist="n[1-2]", ntasks_per_node=1),
            "ending": site.submit("command", command=("bash", "-c", ends),
                                  nodes=1, nodelist="n3", ntasks_per_node=1),
            "train-cpu": site.submit("train-cpu", command=("train.py",), nodes=1, nodelist="n4",
                                     ntasks_per_node=None, cpus_per_task=1),
            "work-queue": site.submit(nodelist="n[5-6]"),
        }  # fmt: skip
        for name, ranks in {"command": 2, "ending": 1, "train-cpu": 1}.items():
            site.wait_for_text(jobs[name], ": begin", times=ranks)
        wait_until(lambda: len(site.hosts()) == 4, "the workers")
        site.lab.preempt()
        wait_until(lambda: preempted(site, jobs["ending"]), "the preemption")
        (site.cwd / "go").touch()
        ended = {name: site.end_of(job) for name, job in jobs.items()}

    said = {name: site.said(job) for name, job in jobs.items()}
    again = ("command", "train-cpu", "work-queue")
    assert {name: ended[name] for name in again} == dict.fromkeys(again, ("COMPLETED", 0, 1)), said
    assert said["command"].count(": begin") == 4, said["command"]
    assert said["command"].count(": end") == 2
    assert (said["train-cpu"].count(": begin"), said["train-cpu"].count(": end")) == (2, 1)
    assert site.finished()["done"] == 12
    # From 24.05 on Slurm calls a job PREEMPTED that ends within its grace, but its code is still 0.
    assert ended["ending"][1:] == (0, 0), said["ending"]
    assert (said["ending"].count(": begin"), said["ending"].count(": end")) == (1, 1)


@pytest.mark.long
@pytest.mark.newslurm
def test_a_program_that_outlives_its_grace_starts_again_once(site: Site) -> None:
    program = (
        "echo begin; trap : TERM; until (( SLURM_RESTART_COUNT )); do sleep 0.1; done; echo end"
    )
    site.lab.configure(KillWait=1)
    with grace(site, 1):
        job = site.submit("command", command=("bash", "-c", program), nodes=1, ntasks_per_node=1,
                          exclusive=True)  # fmt: skip
        site.wait_for_text(job, "0: begin")
        site.lab.preempt()
        ended = site.end_of(job, limit_s=100)

    assert ended[1:] == (0, 1), site.said(job)
    assert (site.said(job).count("0: begin"), site.said(job).count("0: end")) == (2, 1)


def test_the_warning_reaches_a_program_that_asked_for_it(site: Site) -> None:
    program = ("bash", "-c", "trap 'echo saved; exit 0' USR1; echo up; while :; do sleep 0.1; done")
    job = site.submit("command", command=program, signal="B:USR1@60")
    wait_until(lambda: site.said(job).count("up") == 4, "all ranks")

    site.warn(job)
    ended = site.end_of(job)

    assert ended[:2] == ("COMPLETED", 0)
    assert site.said(job).count("saved") == 4


# --- modules, conda, setup and teardown ---

# Reads a variable that nobody set, and fails in the middle, as such functions do.
UNCLEAN = 'echo "$NOBODY_SET_THIS" > /dev/null; false; grep -q nothing /dev/null'
LMOD = Path("/etc/profile.d/lmod.sh")


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def show(*names: str) -> tuple[str, ...]:
    """A program that prints variables."""
    words = " ".join(f"{name}=${{{name}-unset}}" for name in names)
    return ("bash", "-c", f'echo "{words}"')


def run(site: Site, /, *names: str, **fields: Any) -> str:
    """What one rank sees of these variables."""
    fields = {"nodes": 1, "ntasks_per_node": 1, **fields}
    job = site.submit("command", command=show(*names), **fields)
    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    return site.said(job)


def test_modules_and_conda_that_survive_no_strict_shell_are_loaded(site: Site) -> None:
    base = site.cwd / "conda base"
    activate = f'conda() {{ {UNCLEAN}; [[ $1 == activate ]] && export CONDA_GIVEN="$2"; }}'
    program(base / "etc/profile.d/conda.sh", f"{UNCLEAN}\n{activate}\n:")
    sourced = program(site.cwd / "my env.sh", f"{UNCLEAN}\nexport SOURCED=yes")
    load = f'() {{ {UNCLEAN}; export LOADED="$2"; }}'

    said = run(
        site,
        *("LOADED", "CONDA_GIVEN", "SOURCED", "GREETING"),
        shell={"BASH_FUNC_module%%": load},
        modules=("cuda/12.4",),
        conda=f"{base}/envs/torch",
        setup=(f"source {shlex.quote(str(sourced))}",),
        env=(("GREETING", "it's $5"),),
        site={"conda_base": str(base)},
    )

    assert f"LOADED=cuda/12.4 CONDA_GIVEN={base}/envs/torch SOURCED=yes GREETING=it's $5" in said


@pytest.mark.skipif(not LMOD.exists(), reason="needs Lmod, which /etc/profile.d sets up")
def test_a_login_shell_has_the_sites_modules_also_without_any_environment(site: Site) -> None:
    modules = site.cwd / "modules"
    program(modules / "tools/2.0.lua", 'setenv("TOOLS", "two")')
    used = program(site.cwd / "use.sh", f"module use {shlex.quote(str(modules))}")

    job = site.submit(
        "command",
        "--export=NONE",
        command=show("TOOLS"),
        setup=(f"source {shlex.quote(str(used))}", "module load tools"),
        site={"login_shell": True},
    )

    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    assert site.said(job).count("TOOLS=two") == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"modules": ("cuda/12.4",)},
            "error: cannot load module cuda/12.4",
            marks=pytest.mark.soak,
        ),
        ({"conda": "/nowhere/envs/x"}, "error: no conda in /nowhere"),
        ({"setup": ("source /nowhere.sh",)}, "error: setup failed: source /nowhere.sh"),
        ({"node_setup": ("ls /nowhere",)}, "error: the setup of a node failed: see above"),
    ],
)
def test_what_cannot_be_prepared_ends_the_job_and_is_torn_down(
    site: Site, fields: dict[str, Any], message: str
) -> None:
    job = site.submit("command", command=("true",), teardown=("touch torn-down",), **fields)

    assert site.end_of(job) == ("FAILED", 1, 0)
    assert message in site.said(job)
    assert (site.cwd / "torn-down").exists()


def test_setup_runs_once_a_node_and_teardown_after_a_rank_failed_and_ended_its_step(
    site: Site,
) -> None:
    # The node's name is in the file's, so two runs on one node would fail.
    program(site.cwd / "once.sh", '#!/bin/bash\nmkdir "ready-$SLURMD_NODENAME"')
    job = site.submit(
        "command",
        command=("bash", "-c", "(( SLURM_PROCID != 1 )) && sleep 300; exit 4"),
        node_setup=("true", "./once.sh"),
        teardown=("false", "cp -r ready-n1 kept", "exit 9"),
        nodelist="n[1-2]",
    )

    assert site.end_of(job) == ("FAILED", 4, 0)
    assert {path.name for path in site.cwd.glob("ready-*")} == {"ready-n1", "ready-n2"}
    assert (site.cwd / "kept").is_dir()
    assert "teardown failed: false" in site.said(job)


def test_teardown_comes_before_the_next_start(site: Site) -> None:
    program(site.cwd / "again.sh", '#!/bin/bash\nmkdir made && exit "${1:-75}"')
    job = site.submit("command", command=("./again.sh",), teardown=("rmdir made",), nodes=1,
                      ntasks_per_node=1, max_restarts=1)  # fmt: skip

    assert site.end_of(job) == ("FAILED", 75, 1), site.said(job)
    assert site.said(job).count("the step ended with code 75") == 2
