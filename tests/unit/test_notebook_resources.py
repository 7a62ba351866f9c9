"""Resources of workers' jobs, and the jobs of an executor. No Slurm is asked."""

from __future__ import annotations

import math
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import Executor, notebook
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.notebook.resources import LOCAL, Resources
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.spec import ScriptSpec, option
from hpc_toolkit.slurm.render.values import PASSED
from tests.fakesbatch import KeptJobs
from tests.fakeslurm import Programs, pending_line
from tests.unit.test_futures import answer

SITE = load_cluster("lab")


@pytest.fixture(autouse=True)
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeptJobs:
    return KeptJobs(tmp_path, monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", [{"x": 4}], workload="math:sqrt")


def test_every_resource_is_a_word_of_a_script() -> None:
    passed = {name.replace("-", "_") for name in PASSED}

    assert set(Resources.__annotations__) <= {field.name for field in fields(ScriptSpec)} | passed


HOSTILE = ["a\n#SBATCH --evil=1", "a\r#SBATCH --evil=1", "a\x00b", "a\x1b[2J", "a\u2028b"]
TEXTS = sorted(
    set(Resources.__annotations__)
    - {"nodes", "ntasks_per_node", "gpus_per_node", "cpus_per_task", "max_restarts"}
    - {"exclusive", "requeue", "modules", "setup", "env"}
    - {"bind", "node_setup", "teardown", "sbatch"}
)


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_control_character_is_refused_in_every_word(value: str, run: Run) -> None:
    for word in TEXTS:
        resources: Any = {word: value}
        where = "--sbatch" if word.replace("_", "-") in PASSED else option(word)
        with pytest.raises(HpcToolkitError, match=where):
            notebook.preview(run, cluster=SITE, **resources)


@pytest.mark.parametrize(
    "resources",
    [
        {"modules": ["cuda\n#SBATCH --evil=1"]},
        {"setup": ["true\n#SBATCH --evil=1"]},
        {"setup": ["echo $(touch evil)"]},
        {"env": {"A": "b\n#SBATCH --evil=1"}},
        {"env": {"A; touch evil": "b"}},
    ],
    ids=str,
)
def test_what_surrounds_the_step_is_refused_as_in_a_script(resources: Any, run: Run) -> None:
    with pytest.raises(HpcToolkitError, match=r"--(module|setup|env)"):
        notebook.preview(run, cluster=SITE, **resources)


@pytest.mark.parametrize(
    ("resources", "match", "hint"),
    [
        ({"slurm_partition": "gpu"}, "slurm_partition: unknown resource", "mean 'partition'"),
        ({"gpus_per_nod": 4}, "gpus_per_nod: unknown resource", "did you mean 'gpus_per_node'"),
        ({"signal": "B:USR1@60"}, "signal: unknown resource", "known: "),
        ({"time": True}, "--time: True is not accepted", ""),
        ({"mem": 480}, "--mem: 480 is not accepted", ""),
        ({"modules": "cuda"}, "modules: 'cuda' is not a list", ""),
        ({"env": ["A=1"]}, r"env: \['A=1'\] is not a dict", ""),
        ({"nodes": "2"}, "--nodes: '2'", ""),
        ({"gpus_per_node": 5}, "--gpus-per-node: 5 is more than lab has", ""),
        ({"time": "4-00:00:00"}, "--time", ""),
    ],
    ids=str,
)
def test_a_resource_that_no_job_could_have_is_refused(
    resources: Any, match: str, hint: str, run: Run
) -> None:
    with pytest.raises(HpcToolkitError, match=match) as error:
        notebook.preview(run, cluster=SITE, **resources)
    assert hint in error.value.hint


def test_this_machine_is_one_node(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"nodes: .*this machine is one node"):
        notebook.preview(run, cluster=LOCAL, nodes=2)


def test_the_variable_names_the_cluster_where_none_is_given(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_CLUSTER", LOCAL)

    assert "hpctk work" in notebook.preview(run, gpus_per_node=2)


def test_an_executor_sends_each_request_once(
    tmp_path: Path, sbatch: KeptJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started() -> Executor:
        return Executor(tmp_path / "calls")

    request: Any = {"cluster": SITE, "nodes": 2, "gpus_per_node": 4}
    first = started()
    with pytest.raises(HpcToolkitError, match="--gpus-per-node: 5 is more than lab has"):
        first.slurm(cluster=SITE, gpus_per_node=5)
    jobs = first.slurm(**request)
    assert [job.job for job in jobs.jobs] == ["100"]
    (script,) = sbatch.options()
    assert (script["nodes"], script["ntasks-per-node"]) == ("2", "4")
    calls = first.map(math.sqrt, [4, 9])
    answer(tmp_path / "calls", 4, value=2.0)
    assert next(calls) == 2.0
    first.shutdown(cancel_futures=True)

    programs = Programs(tmp_path, monkeypatch)
    programs.answer("sbatch", "101")
    programs.answer("scancel", "")
    programs.answer("squeue", pending_line("100"))
    again = started()
    assert [job.job for job in again.slurm(**request).jobs] == ["100"]
    programs.answer("squeue", "\n".join(map(pending_line, ("100", "101"))))
    assert [job.job for job in again.slurm(**request, again=True).jobs] == ["100", "101"]
    assert len(programs.calls("sbatch")) == 1
    future = again.submit(math.sqrt, 9)
    answer(tmp_path / "calls", 9, value=3.0)
    assert future.result() == 3.0
    again.shutdown()
    assert programs.calls("scancel") == ["100 101"]

    programs.answer("squeue", "")
    third = started()
    jobs = third.slurm(**request)
    assert third.submit(math.sqrt, 4).result() == 2.0
    assert jobs.jobs == []  # nothing to do
    third.submit(math.sqrt, 16)
    assert [job.job for job in jobs.jobs] == ["101"]
    third.shutdown(cancel_futures=True)


def test_jobs_that_ended_while_calls_are_left_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpc_toolkit.notebook.calljobs._LOOK_S", 0.0)
    executor = Executor(tmp_path / "calls")
    executor.slurm(cluster=SITE, nodes=1)
    Programs(tmp_path, monkeypatch).answer("squeue", pending_line("100", State="TIMEOUT"))
    future = executor.submit(math.sqrt, 4)

    while "its jobs have ended (100 TIMEOUT)" not in (said := capsys.readouterr().err):
        time.sleep(0.05)

    assert "the same call of slurm() sends another" in said
    executor.shutdown(cancel_futures=True)
    assert future.done()
