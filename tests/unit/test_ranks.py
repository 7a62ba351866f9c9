"""What a process knows of its job under Slurm, PBS, LSF, Grid Engine and Flux."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.cli.working import unused
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.system.gpus import rank_environment
from hpc_toolkit.system.ranks import RankInfo, job_end, job_hosts, of_slurm, other_hosts, step_nodes
from hpc_toolkit.training.distributed.group import DistributedInfo
from hpc_toolkit.training.launch.plan import Request, Step, left_out, make_plan

OMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}
JSM = {f"JSM_NAMESPACE_{n}": v for n, v in zip(("RANK", "LOCAL_RANK", "SIZE"), "518", strict=True)}
PBS = {"PBS_JOBID": "1234.pbs01.site", "PBS_JOBNAME": "eval", "ENVIRONMENT": "PBS_BATCH"}
LSF = {"LSB_JOBID": "77", "LSB_JOBINDEX": "0", "LSB_JOBNAME": "eval"}
SGE = {"JOB_ID": "9", "JOB_NAME": "eval", "SGE_TASK_ID": "undefined"}
FLUX = {"FLUX_JOB_ID": "\u0192abc"}
FLUX_TASK = {"FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8"}


@pytest.mark.parametrize(
    ("environ", "job", "ranked"),
    [
        (PBS, "pbs:1234", False),
        ({**PBS, **OMPI}, "pbs:1234", True),
        ({**PBS, **PMI}, "pbs:1234", True),
        ({**PBS, "PBS_JOBID": "1234[7].pbs01"}, "pbs:1234[7]", False),
        ({**LSF, **JSM}, "lsf:77", True),
        ({**LSF, "LSB_JOBINDEX": "3", **OMPI}, "lsf:77[3]", True),
        (SGE, "sge:9", False),
        ({**SGE, "SGE_TASK_ID": "4", **PMI}, "sge:9[4]", True),
        (FLUX, "flux:\u0192abc", False),
        ({**FLUX, **FLUX_TASK}, "flux:\u0192abc", True),
        # Of two, the inner one.
        ({**PBS, **OMPI, **FLUX, **FLUX_TASK, "FLUX_TASK_RANK": "5"}, "flux:\u0192abc", True),
        # No job of theirs: a variable of this name, MPI without a scheduler, Slurm.
        ({"JOB_ID": "9"}, None, False),
        (OMPI, None, False),
        ({**PBS, **OMPI, "SLURM_JOB_ID": "17"}, "17", False),
    ],
)
def test_a_process_knows_its_job_and_its_rank(
    environ: dict[str, str], job: str | None, ranked: bool
) -> None:
    found = RankInfo.from_environ(environ)

    assert (found.job_id, found.in_step) == (job, ranked)
    assert (found.rank, found.local_rank, found.world_size) == ((5, 1, 8) if ranked else (0, 0, 1))
    # Slurm is never asked about such a job, and a training has its own launcher.
    assert of_slurm(found.job_id) is (job == "17")
    assert not DistributedInfo.from_environ(environ).launched


def test_hosts_are_listed_once_and_a_batch_script_is_told_how_to_use_them(tmp_path: Path) -> None:
    nodes, hosts = tmp_path / "nodes", tmp_path / "hosts"
    nodes.write_text("n1\nn1\nn2\n", encoding="utf-8")
    hosts.write_text("n1 4 all.q@n1 UNDEFINED\nn2 4 all.q@n2 UNDEFINED\n", encoding="utf-8")
    for environ in (
        {**PBS, "PBS_NODEFILE": str(nodes)},
        {**LSF, "LSB_MCPU_HOSTS": "n1 4 n2 2 "},
        {**SGE, "PE_HOSTFILE": str(hosts)},
    ):
        assert job_hosts(environ) == ["n1", "n2"]
        said = unused(None, environ)
        assert said.startswith("this job has 2 hosts; "), said
        assert "mpiexec hpctk work" in said
    for environ in ({}, PBS, {**PBS, "PBS_NODEFILE": "/gone"}, {**LSF, "LSB_MCPU_HOSTS": ""}):
        assert job_hosts(environ) == []


# A batch script has no FLUX_JOB_ID (flux-environment(7), "Initial program environment").
BATCH = {"FLUX_URI": "local:///tmp/flux-abc/local-0"}


@pytest.mark.parametrize(
    ("environ", "prints", "count"),
    [
        # As flux-hostlist(1) prints them: an expanded list in one line, nothing if it is empty.
        (FLUX, "n1 n2 n3\n", 3),
        (BATCH, "n1 n2 n3\n", 3),
        ({**FLUX, **BATCH}, "n7\n", 1),
        (FLUX, "n1 n1\n", 1),
        (FLUX, "", 0),
        ({**BATCH, "SLURM_JOB_ID": "1"}, "n1 n2\n", 0),
        ({}, "n1 n2\n", 0),
    ],
)
def test_flux_is_asked_for_the_hosts_and_a_start_on_one_of_several_is_told(
    environ: dict[str, str],
    prints: str,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert other_hosts(environ)[0] == 0
    _program(tmp_path / "bin", "flux hostlist --expand local", prints)

    assert other_hosts(environ)[0] == count
    plan = make_plan(Request(script="a.py"), step=None, ranks=2, backend="gloo")
    for said in (unused(None, environ), left_out(Request(script="a.py"), plan, environ)):
        assert ("flux run" in said and f"this job has {count} " in said) is (count > 1), said
    alone = Request(script="a.py", options={"nnodes": 1})
    assert left_out(alone, plan, environ) == ""


def test_a_task_of_flux_starts_the_ranks_of_its_node() -> None:
    task = {**FLUX, "FLUX_JOB_SIZE": "3", "FLUX_JOB_NNODES": "3", "FLUX_TASK_RANK": "2"}
    step = Step.from_environ(task)
    request = Request(script="a.py", run_dir=Path("R"))
    plan = make_plan(request, step=step, ranks=2, backend="gloo")

    assert (plan.form, plan.meeting, plan.nodes, plan.node_rank) == ("agent", "directory", 3, 2)
    assert plan.launch == "flux__abc"
    for outside in (FLUX, BATCH, {}, PBS | PMI):
        assert Step.from_environ(outside) is None
    for wrong, said in (
        ({"FLUX_JOB_SIZE": "6"}, "6 tasks on 3 nodes"),
        ({"FLUX_TASK_RANK": "3"}, "3 tasks on 3 nodes"),
        ({"FLUX_JOB_NNODES": ""}, "FLUX_JOB_NNODES=''"),
    ):
        with pytest.raises(ConfigError, match=said):
            Step.from_environ({**task, **wrong})


def test_ranks_of_a_node_share_its_gpus() -> None:
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}

    assert rank_environment({**PBS, **OMPI, **gpus}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert rank_environment({**LSF, **PMI, **gpus}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert rank_environment({**PBS, **gpus}) == {}


QSTAT = "qstat -f 1234.pbs01.site"
# In the form that the manuals of these schedulers show.
OPENPBS = """Job Id: 1234.pbs01
    Job_Name = eval
    resources_used.walltime = 00:10:00
    job_state = R
    Resource_List.ncpus = 8
    Resource_List.walltime = 01:00:00
    {stime}
"""
TORQUE = """Job Id: 1234.pbs01
    Resource_List.walltime = 01:00:00
    resources_used.walltime = 00:10:00
    Walltime.Remaining = 3000
"""
GRID_ENGINE = """==============================================================
job_number:                 9
hard resource_list:         h_rt=3600,h_vmem=2G
"""


@pytest.mark.parametrize(
    ("environ", "command", "prints", "left_s"),
    [
        (PBS, QSTAT, OPENPBS.format(stime=""), 3000),
        (PBS, QSTAT, OPENPBS.format(stime="stime = %a %b %d %H:%M:%S %Y"), 3000),
        (PBS, QSTAT, TORQUE, 3000),
        (PBS, QSTAT, "qstat: Unknown Job Id 1234.pbs01.site", None),
        ({**PBS, "PBS_WALLTIME": "3600", "PBS_NODEFILE": "FILE"}, "", "", 3000),
        (LSF, "bjobs -noheader -o time_left 77", "0:50 L\n", 3000),
        (LSF, "bjobs -noheader -o time_left 77", "0:50 E\n", None),
        (LSF, "bjobs -noheader -o time_left 77", "-\n", None),
        ({**LSF, "LSB_JOBINDEX": "3"}, "bjobs -noheader -o time_left 77[3]", "0:50 L\n", 3000),
        ({**SGE, "PE_HOSTFILE": "FILE"}, "qstat -j 9", GRID_ENGINE, 3000),
        ({**SGE, "SGE_JOB_SPOOL_DIR": "DIR"}, "", "", 3000),
        (SGE, "qstat -j 9", GRID_ENGINE, None),  # when it began is unknown
        (FLUX, "flux job timeleft \u0192abc", "3000\n", 3000),
        (FLUX, "flux job timeleft \u0192abc", "", None),
        ({}, "", "", None),
        ({**PBS, "SLURM_JOB_ID": "1"}, "", "", None),
    ],
)
def test_the_end_of_a_job_is_found_and_missing_programs_are_no_failure(
    environ: dict[str, str],
    command: str,
    prints: str,
    left_s: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = time.time() - 600
    for name in ("file", "config"):
        (tmp_path / name).write_text("h_rt=3600\nh_cpu=INFINITY\n", encoding="utf-8")
        os.utime(tmp_path / name, (started, started))
    if "stime" in prints:
        prints = time.strftime(prints, time.localtime(started))
    places = {"FILE": str(tmp_path / "file"), "DIR": str(tmp_path)}
    environ = {name: places.get(text, text) for name, text in environ.items()}
    # Not even a shell is on this PATH.
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    without = job_end(environ)
    if command:
        assert without is None
        _program(tmp_path / "bin", command, prints)

    end = job_end(environ)

    assert (end is None) is (left_s is None)
    if end is not None and left_s is not None:
        assert end == pytest.approx(time.time() + left_s, abs=5)


def _program(directory: Path, command: str, prints: str) -> None:
    """A program that answers one command line, and fails for any other."""
    name, _, words = command.partition(" ")
    directory.mkdir()
    path = directory / name
    path.write_text(
        f"#!/bin/sh\n[ \"$*\" = '{words}' ] || exit 1\nread -r _ && exit 1\n"
        f"while IFS= read -r line; do echo \"$line\"; done <<'END'\n{prints}END\n",
        encoding="utf-8",
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("broken", ["exit 3", "kill -9 $$", "echo garbage", "printf '\\377'"])
@pytest.mark.parametrize("environ", [PBS, LSF, SGE, FLUX])
def test_a_command_that_fails_leaves_the_end_unknown(
    broken: str, environ: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qstat", "bjobs", "flux"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{broken}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert job_end(environ) is None


STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "work-queue",
    "SLURM_CLUSTER_NAME": "site",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
}


@pytest.mark.parametrize("letter", ["x", "\u00e4", "\N{ROCKET}"])
def test_a_workers_file_keeps_its_length_whatever_its_job_is_called(letter: str) -> None:
    rank = RankInfo.from_environ({**STEP, "SLURM_JOB_NAME": 500 * letter})
    presence = Presence(
        worker="gpu-node-0123-1234567-abcdef",
        host="gpu-node-0123.cluster.university.example.org",
        boot=36 * "0",
        pid=1234567,
        ticks=123456789,
        pool=[1234567, 123456789, 4026531836],
        rank=4095,
        job="12345678_9999",
        cluster="killarney",
        job_name=rank.job_name,
        started=1795263151.901,
        at=1795263151.901,
    )

    assert rank.job_name.startswith(30 * letter)
    assert len(presence.encode()) == 1024


def test_a_restarted_job_counts_its_restarts_and_an_element_of_an_array_has_its_own_name() -> None:
    """The last element's SLURM_JOB_ID is that of the array, whose state is another thing."""
    element = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}

    found = RankInfo.from_environ({**STEP, **element})

    assert (found.job_id, found.restart) == ("17_3", 2)


def test_workers_of_a_rank_have_numbers_of_their_own() -> None:
    ranks = [RankInfo(rank=one, local_rank=one % 2, world_size=4, in_step=True) for one in range(4)]

    found = [rank.one_of(3, slot) for rank in ranks for slot in range(3)]

    assert [one.rank for one in found] == [*range(12)]
    assert [one.local_rank for one in found] == [0, 1, 2, 3, 4, 5] * 2
    assert {one.world_size for one in found} == {12}


JOB = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        ({}, 1),
        (JOB, 2),  # the batch script
        ({**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 2),
        ({**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, 1),
        # The shell of salloc on a node is a step of Slurm's own.
        ({**JOB, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, 2),
    ],
)
def test_only_one_process_of_a_job_has_all_its_nodes(environ: dict[str, str], nodes: int) -> None:
    assert step_nodes(environ) == nodes
