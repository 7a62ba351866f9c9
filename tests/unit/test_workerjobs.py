"""Jobs of an executor: their requests, and what is sent. No Slurm is asked."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import Executor
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.spec import DEFAULTS, FIELDS, ScriptSpec, option
from hpc_toolkit.slurm.render.values import PASSED
from hpc_toolkit.workerjobs import Resources, request
from hpc_toolkit.workerjobs import _requested as requested
from tests.fakeslurm import Programs, pending_line
from tests.unit.test_futures import answer

SITE = load_cluster("lab")


@pytest.fixture(autouse=True)
def programs(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    # The checkout may be in a directory from which hpctk refuses to submit.
    monkeypatch.chdir(tmp_path)
    programs.add("sbatch", 'for script do :; done; cat "$script" > "$0.script"; echo 100')
    return programs


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
            request(run, None, SITE, resources)


@pytest.mark.parametrize(
    ("n", "resources", "match", "hint"),
    [
        (None, {"modules": ["cuda\n#SBATCH --evil=1"]}, "--module", ""),
        (None, {"setup": ["true\n#SBATCH --evil=1"]}, "--setup", ""),
        (None, {"setup": ["echo $(touch evil)"]}, "--setup", ""),
        (None, {"env": {"A": "b\n#SBATCH --evil=1"}}, "--env", ""),
        (None, {"env": {"A; touch evil": "b"}}, "--env", ""),
        (None, {"slurm_partition": "gpu"}, "slurm_partition: unknown", "mean 'partition'"),
        (None, {"gpus_per_nod": 4}, "gpus_per_nod: unknown", "did you mean 'gpus_per_node'"),
        (None, {"signal": "B:USR1@60"}, "signal: unknown resource", "known: "),
        (None, {"time": True}, "--time: True is not accepted", ""),
        (None, {"mem": 480}, "--mem: 480 is not accepted", ""),
        (None, {"modules": "cuda"}, "modules: 'cuda' is not a list", ""),
        (None, {"env": ["A=1"]}, r"env: \['A=1'\] is not a dict", ""),
        (None, {"gpus_per_node": 5}, "--gpus-per-node: 5 is more than lab has", ""),
        (None, {"time": "4-00:00:00"}, "--time", ""),
        (6, {"gpus_per_node": 4}, "n: 6 workers are not 1 node x 4 ranks", ""),
        (8, {"nodes": 1, "ntasks_per_node": 4}, "n: 8 workers are not 1 node x 4 ranks", ""),
        (0, {}, "n: 0 is not a number", ""),
        (True, {}, "n: True is not a number", ""),
        (2, {"nodes": "2"}, "--nodes: '2'", ""),
        (None, {"sbatch": ["constraint=a"], "constraint": "b"}, "constraint is given twice", ""),
        (None, {"sbatch": [4]}, "--sbatch: '4' is not accepted", "long option"),
    ],
    ids=str,
)
def test_a_request_that_no_job_could_have_is_refused(
    n: Any, resources: Any, match: str, hint: str, run: Run
) -> None:
    with pytest.raises(HpcToolkitError, match=match) as error:
        request(run, n, SITE, resources)
    assert hint in error.value.hint


OTHERS = {
    **dict.fromkeys(FIELDS, "2"),
    "oversubscribe": "",
    "open-mode": "append",
    "error": "err.log",
    "gpu-bind": "none",
    "signal": "B:USR1@90",
    "kill-on-invalid-dep": "no",
}


@pytest.mark.parametrize(
    "name", [name for name in FIELDS if name.replace("-", "_") not in Resources.__annotations__]
)
def test_every_option_without_an_argument_of_its_own_is_written_in_sbatch(name: str) -> None:
    """Also one that was passed on before it got a row in the table of options."""
    word, value = name.replace("-", "_"), OTHERS[name]
    passed = f"{name}={value}" if value else name
    spec = requested({"sbatch": [passed, "gpu-freq=low"], "gpus_per_node": 2})
    assert getattr(spec, word) not in {None, DEFAULTS[word]}
    assert spec.sbatch == ("gpu-freq=low",)


def test_an_executor_sends_each_request_once(tmp_path: Path, programs: Programs) -> None:
    def started() -> Executor:
        return Executor(tmp_path / "calls")

    asked: Any = {"cluster": SITE, "nodes": 2, "gpus_per_node": 4}
    first = started()
    with pytest.raises(HpcToolkitError, match="--gpus-per-node: 5 is more than lab has"):
        first.slurm(cluster=SITE, gpus_per_node=5)
    jobs = first.slurm(**asked)
    assert [job.job for job in jobs] == ["100"]
    script = options((programs.root / "sbatch.script").read_text())
    assert (script["nodes"], script["ntasks-per-node"]) == ("2", "4")
    calls = first.map(math.sqrt, [4, 9])
    answer(tmp_path / "calls", 4, value=2.0)
    assert next(calls) == 2.0
    first.shutdown(cancel_futures=True)

    programs.answer("sbatch", "101")
    programs.answer("scancel", "")
    programs.answer("squeue", pending_line("100"))
    again = started()
    assert [job.job for job in again.slurm(**asked)] == ["100"]
    programs.answer("squeue", "\n".join(map(pending_line, ("100", "101"))))
    assert [job.job for job in again.slurm(**asked, again=True)] == ["100", "101"]
    assert len(programs.calls("sbatch")) == 1
    future = again.submit(math.sqrt, 9)
    answer(tmp_path / "calls", 9, value=3.0)
    assert future.result() == 3.0
    again.shutdown()
    assert programs.calls("scancel") == ["100 101"]

    programs.answer("squeue", "")
    third = started()
    jobs = third.slurm(**asked)
    assert third.submit(math.sqrt, 4).result() == 2.0
    assert jobs == []  # nothing to do
    third.submit(math.sqrt, 16)
    assert [job.job for job in jobs] == ["101"]
    third.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("n", "resources", "shape"),
    [
        (8, {"gpus_per_node": 4}, (2, 4)),
        (3, {}, (1, 3)),
        (6, {"nodes": 3}, (3, 2)),
        (6, {"ntasks_per_node": 2}, (3, 2)),
        (4, {"gpus_per_node": 4, "ntasks_per_node": 2}, (2, 2)),
    ],
)
def test_workers_are_ranks_of_one_job(
    n: int, resources: Any, shape: tuple[int, int], run: Run
) -> None:
    found = options(request(run, n, SITE, resources).text)
    assert (int(found["nodes"]), int(found["ntasks-per-node"])) == shape


def options(text: str) -> dict[str, str]:
    """Return the directives of a script, by name; assert that each occurs once."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE)
    assert len(found) == len(re.findall("^#SBATCH", text, re.MULTILINE))
    assert len(dict(found)) == len(found)
    return {name: shlex.split(value)[0] if value else "" for name, value in found}
