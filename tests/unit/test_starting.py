"""What a worker tells the process from which its executors are forked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.rundir.layout import StageSpec, WorkloadSpec
from hpc_toolkit.worker import forkserver, starting

FUNCTION = WorkloadSpec(function="mine:run", path=("/a",), argv=("x", "y"), options={"n": 1})
SPECS = {
    "first": StageSpec(name="first", workload=FUNCTION, timeout_s=2.5, max_items_per_process=3),
    "second": StageSpec(name="second", workload=WorkloadSpec(command="echo {i}"), pipefail=True),
}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}
STEP |= {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}


def order(stage: str = "first") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(starting._order(SPECS, Path("log"), stage))
    return found


def test_an_order_keeps_the_stages() -> None:
    assert forkserver._stages_of(order()) == SPECS


def test_an_order_separates_what_is_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"CUDA_VISIBLE_DEVICES": "3", "SLURM_PROCID": "1", "PMI_RANK": "1"}
    for name, text in {**own, "LOCAL_RANK": "1", "RANK": "5", "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, text)

    found = order()

    assert found["own"] == {**own, "HPCTK_LOCAL_RANK": "1"}
    assert found["environ"].keys() & {*own, "LOCAL_RANK", "RANK", "SLURM_NTASKS"} == {
        "SLURM_NTASKS"
    }


@pytest.mark.parametrize("function", ["mine:run", "hpc_toolkit_mine:run"])
def test_only_a_function_of_the_user_is_imported_by_a_fork_server(function: str) -> None:
    def stage(**work: Any) -> StageSpec:
        return StageSpec(name="items", workload=WorkloadSpec(**work))

    assert starting.has_fork_server(stage(function=function))
    assert not starting.has_fork_server(stage(function="hpc_toolkit.worker.calls:Calls"))
    assert not starting.has_fork_server(stage(command="true"))


def test_ranks_of_other_steps_and_nodes_do_not_meet() -> None:
    others = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME")
    names = [starting.step_name(STEP), *(starting.step_name({**STEP, one: "9"}) for one in others)]

    assert len({*names}) == len(names)
    assert all(name.startswith("\0hpctk-") for name in names)
    assert starting.step_name({**STEP, "SLURM_STEP_TASKS_PER_NODE": "1"}) == ""
    assert starting.step_name({}) == ""


def test_the_second_rank_is_connected_to_the_first() -> None:
    import os

    name = f"\0hpctk-test-{os.getpid()}"
    listener, nobody = starting._meet(name)
    none, second = starting._meet(name)
    assert (nobody, none) == (None, None)
    assert listener is not None
    assert second is not None

    third, _ = listener.accept()
    assert forkserver.is_own(third)
    for one in (listener, second, third):
        one.close()

    again, _ = starting._meet(name)
    assert again is not None
    again.close()
