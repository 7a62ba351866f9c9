"""sbatch takes every directive that is rendered, and reads in it what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.file import read_header
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import read_spec
from tests.hostile import ODD_BUT_FINE
from tests.slurm.reallab import LabUnderTest

EXAMPLES = sorted((Path(__file__).parents[2] / "slurm" / "examples").glob("*.sbatch"))
# The first names partitions, licenses and features of another site, and options of newer versions;
# the others ask for more CPUs than a node of the lab has.
ELSEWHERE = {"every-option", "train-trees", "packed"}
SITE = load_cluster("lab")


def of_the_lab(path: Path) -> bool:
    header = read_header(path.read_text(encoding="utf-8"), path.name)
    return header.cluster in ("lab", "generic") and path.stem not in ELSEWHERE


def script(
    directory: Path, template: str = "work-queue", *, hold: bool = True, **fields: Any
) -> Path:
    """A rendered script; unless ``hold`` is False, its job is never started."""
    passed = (*fields.pop("sbatch", ()), *(["hold"] if hold else []))
    spec = read_spec({"python": "/opt/python", "run": "x", "sbatch": passed, **fields})
    path = directory / "x.sbatch"
    path.write_text(render_script(spec, SITE, template), encoding="utf-8")
    return path


def told(lab: LabUnderTest, job: str) -> str:
    """What scontrol shows of a job; before 23.11 it writes gres/gpu as gres:gpu."""
    return lab.scontrol("show", "job", job).replace("=gres:gpu", "=gres/gpu")


OF_THE_LAB = [path for path in EXAMPLES if of_the_lab(path)]


def test_examples_of_every_template_are_accepted(lab: LabUnderTest) -> None:
    for path in OF_THE_LAB:
        # An unknown job id is not a fault of the script.
        tried = lab.run("sbatch", "--dependency=singleton", "--test-only", path)
        assert "to start at" in tried.stderr, path

    headers = [read_header(path.read_text(encoding="utf-8"), "") for path in OF_THE_LAB]

    assert {header.template for header in headers} >= {"work-queue", "array", "campaign"}


def test_slurm_reads_what_was_asked_for(lab: LabUnderTest, tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        (
            {"account": "physics", "partition": "main,urgent", "exclude": "n[1,3-4]", "mem": "0"},
            ("Account=physics", "Partition=main,urgent", "ExcNodeList=n[1,3-4]", "MinMemoryNode=0"),
        ),
        (
            {"nodelist": "n[1-2]", "nodes": 2, "time": "1-12", "time_min": "90", "error": "e-%j"},
            ("ReqNodeList=n[1-2]", "NumNodes=2", "TimeLimit=1-12:00:00", "TimeMin=01:30:00"),
        ),
        ({"nodelist": "n[1-2,4],n[5]", "nodes": 4}, ("ReqNodeList=n[1-2,4-5]", "NumNodes=4")),
        ({"job_name": "a b/c:d=e,f", "signal": "B:SIGUSR1@120"}, ("JobName=a b/c:d=e,f",)),
        ({"nodes": 3, "ntasks": 8}, ("NumNodes=3", "NumTasks=8")),
        ({"nodes": 2, "ntasks": 8}, ("NumTasks=8", "NtasksPerN:B:S:C=4:0:*:*")),
        ({"nodes": 2, "gpus_per_node": 4}, ("TresPerNode=gres/gpu:l40s:4", "NumTasks=8")),
        ({"gpus_per_node": 2, "ntasks_per_gpu": 2}, ("NumTasks=4", "TresPerNode=gres/gpu:l40s:2")),
        ({"gpus_per_node": 2, "isolate_gpus": True}, ("NumTasks=2", "TresPerNode=gres/gpu:l40s:2")),
        ({"gpus_per_node": 2, "gpu_bind": "map_gpu:0,1"}, ()),
        ({"gpus_per_node": 2, "gpu_bind": "verbose,mask_gpu:0x1,2"}, ()),
        (
            {"gpus_per_node": 2, "cpus_per_gpu": 4, "mem_per_gpu": "8G"},
            ("CpusPerTres=gres/gpu:4", "MemPerTres=gres/gpu:8192"),
        ),
        ({"mem": "8192", "exclusive": True}, ("MinMemoryNode=8G", "OverSubscribe=NO")),
        ({"mem_per_cpu": "2G", "oversubscribe": True}, ("MinMemoryCPU=2G", "OverSubscribe=YES")),
        ({"exclusive": "user"}, ("=USER ",)),
        ({"dependency": "singleton"}, ("Dependency=singleton", "InvalidDependent=Yes")),
        (
            {"dependency": "singleton", "kill_on_invalid_dep": False},
            ("InvalidDependent=No",),
        ),
        ({"dependency": "after:1+5,afterany:1:2_*"}, ("Dependency=after:1+5", "afterany:2_*")),
        ({"requeue": False}, ("Requeue=0", "Priority=0", "JobHeldUser")),
        ({"requeue": True}, ("Requeue=1",)),
        (
            {"sbatch": ("comment=a b", "contiguous", "begin=2035-01-31T18:00", "nice=-5")},
            ("Comment=a b", "Contiguous=1", "EligibleTime=2035-01-31T18:00:00", "Nice=-5"),
        ),
        ({"array": "1,3,5-9:2%2"}, ("ArrayTaskId=1,3,5,7,9%2",)),
    )
    for fields, expected in cases:
        template = "array" if "array" in fields else "work-queue"
        path = script(tmp_path, template, **{"time": "10", **fields})
        shown = told(lab, lab.sbatch(path, cwd=tmp_path))
        assert [text for text in expected if text not in shown] == [], (fields, shown)


def test_a_dependency_on_either_of_two_jobs_is_read(lab: LabUnderTest, tmp_path: Path) -> None:
    """Slurm refuses ``afterok`` of a job that it does not know, since 23.02."""
    first, second = (lab.sbatch(script(tmp_path), cwd=tmp_path) for _ in range(2))
    either = script(tmp_path, dependency=f"afterok:{first}?afternotok:{second}")

    shown = told(lab, lab.sbatch(either, cwd=tmp_path))

    assert f"afterok:{first}(unfulfilled)?afternotok:{second}(unfulfilled)" in shown


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"gpus_per_node": 4}, {"0,1,2,3"}),
        ({"gpus_per_node": 4, "isolate_gpus": True}, {"0", "1", "2", "3"}),
        pytest.param(
            {"gpus_per_node": 4, "ntasks_per_node": 2, "isolate_gpus": True},
            {"0,1", "2,3"},
            marks=pytest.mark.soak,
        ),
        ({"gpus_per_node": 2, "ntasks_per_gpu": 2, "cpus_per_task": 3}, {"0", "1"}),
    ],
    ids=["shared", "isolated", "in pairs", "two ranks on each"],
)
def test_ranks_see_the_gpus_that_were_asked_for(
    fields: dict[str, Any], seen: set[str], lab: LabUnderTest, tmp_path: Path
) -> None:
    path = script(tmp_path, nodes=2, mem="1G", hold=False, output="%j.out", **fields)
    text = path.read_text(encoding="utf-8")
    step = (
        "srun --cpus-per-task=$SLURM_CPUS_PER_TASK"
        " sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'\n"
    )
    path.write_text(text.partition("\n\n")[0] + f"\n\n{step}", encoding="utf-8")

    job = lab.sbatch(path, cwd=tmp_path)
    lab.wait_for(job)

    lines = (tmp_path / f"{job}.out").read_text(encoding="utf-8").splitlines()
    ranks = fields.get("ntasks_per_node") or fields["gpus_per_node"] * fields.get(
        "ntasks_per_gpu", 1
    )
    assert sorted(lines) == sorted(
        f"{node} {gpus}"
        for node in ("n1", "n2")
        for gpus in seen
        for _ in range(ranks // len(seen))
    )


@pytest.mark.parametrize(
    "where",
    [
        "chdir",
        pytest.param("output", marks=pytest.mark.soak),
        pytest.param("directory of submission", marks=pytest.mark.soak),
    ],
)
def test_a_job_runs_in_an_odd_directory_and_logs_there(
    where: str, lab: LabUnderTest, tmp_path: Path
) -> None:
    # All at once: each is a few seconds of waiting otherwise.
    jobs = {}
    for name in ODD_BUT_FINE:
        home = tmp_path / name
        (home / "logs").mkdir(parents=True)
        escaped = str(home).replace("%", "%%")
        given: dict[str, Any] = {
            "chdir": {"chdir": str(home), "output": "logs/%x-%j"},
            "output": {"output": f"{escaped}/logs/%x-%j"},
        }.get(where, {"output": "logs/%x-%j"})
        try:
            path = script(tmp_path, job_name="n", hold=False, mem="100M", **given)
        except HpcToolkitError:
            assert where == "chdir"
            assert name == "50% done"
            continue
        head = path.read_text(encoding="utf-8").partition("\n\n")[0]
        path.write_text(f"{head}\n\npwd\n", encoding="utf-8")
        cwd = home if where == "directory of submission" else tmp_path
        jobs[lab.sbatch(path, cwd=cwd)] = home

    for job, home in jobs.items():
        lab.wait_for(job)
        log = home / "logs" / f"n-{job}"
        there = tmp_path if where == "output" else home
        assert log.read_text(encoding="utf-8") == f"{there}\n"
    assert not list(tmp_path.rglob("canary"))


def test_a_directory_that_slurm_would_fill_in_is_why_forbidden_exists(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    home = tmp_path / "a%jb"
    (home / "logs").mkdir(parents=True)
    path = script(tmp_path, hold=False, mem="100M", output="logs/%j")

    record = lab.wait_for(lab.sbatch(path, cwd=home))

    assert record.state == "FAILED"
    assert not list((home / "logs").iterdir())
