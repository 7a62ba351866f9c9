"""What jobs find beside a directory: Slurm and ports as the test plays them, and templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.doctor import node
from hpc_toolkit.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """Configuration data as of 2026-01-01T00:00:00
ClusterName             = narwhal
SLURM_VERSION           = 22.05.8
PreemptMode             = OFF
KillWait                = 30 sec
"""
PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one directory in which programs are looked for, beside those of the system."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(path: Path, text: str = "exit 0", *programs: str) -> None:
    for name in programs or PROGRAMS:
        (path / name).write_text(f"#!/bin/sh\n{text}\n")
        (path / name).chmod(0o755)


def answering(path: Path, config: str = CONFIG) -> Finding:
    install(path)
    (path / "config").write_text(config)
    install(path, f'while read -r line; do echo "$line"; done <{path}/config', "scontrol")
    return node.check_slurm()


@pytest.mark.usefixtures("path")
def test_a_machine_without_slurm_may_do_without() -> None:
    found = node.check_slurm()

    assert (found.check, found.verdict) == ("slurm", Verdict.SKIPPED)


def test_a_slurm_that_answers_tells_its_version(path: Path) -> None:
    found = answering(path)

    assert (found.check, found.verdict) == ("slurm", Verdict.FINE)
    assert found.found.startswith("22.05.8 of cluster narwhal answered in ")


@pytest.mark.parametrize(
    ("old", "new", "means"),
    [
        ("= OFF", "= GANG,CANCEL", "does not start again"),
        ("KillWait", "PartitionName=low PreemptMode=CANCEL\nKillWait", "CANCEL (partition low): a"),
        ("= 30 sec", "= 9 sec", "than 9 s"),
    ],
)
def test_settings_that_cost_a_job_work_are_named(
    path: Path, old: str, new: str, means: str
) -> None:
    found = answering(path, CONFIG.replace(old, new))

    assert found.verdict is Verdict.SLOWER
    assert means in found.means


def test_a_controller_that_is_silent_is_unknown_and_says_why(path: Path) -> None:
    install(path)
    install(path, "echo 'Unable to contact slurm controller' >&2; exit 1", "scontrol")

    found = node.check_slurm()

    assert found.verdict is Verdict.UNKNOWN
    assert "Unable to contact slurm controller" in found.found


def test_a_slurm_that_is_not_set_up_is_none(path: Path) -> None:
    install(path)
    said = "fatal: Could not establish a configuration source"
    install(path, f"echo '{said}' >&2; exit 1", "scontrol")

    found = node.check_slurm()

    assert found.verdict is Verdict.SKIPPED


def test_a_slurm_of_which_a_part_is_missing_names_it(path: Path) -> None:
    install(path, "exit 0", "sbatch", "scontrol", "scancel")

    found = node.check_slurm()

    assert found.verdict is Verdict.UNKNOWN
    assert found.found == "srun, squeue cannot be found"


def test_a_script_renders_for_the_cluster_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTK_CLUSTER", "killarney")

    found = node.check_script()

    assert found.verdict is Verdict.FINE
    assert found.found == "work-queue renders for cluster killarney"


def test_a_cluster_that_cannot_be_loaded_is_a_fault_with_its_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPCTK_CLUSTER", "kilarney")

    found = node.check_script()

    assert found.verdict is Verdict.UNSAFE
    assert "kilarney" in found.found
    assert "killarney" in found.fix


def port(
    root: Path, name: str, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)"
) -> None:
    """Make the files of one port, as the kernel shows them in /sys/class/infiniband."""
    device, _, number = name.partition(":")
    path = root / device / "ports" / number
    path.mkdir(parents=True)
    for key, text in (("state", state), ("rate", rate), ("link_layer", "InfiniBand")):
        (path / key).write_text(f"{text}\n")


def ports(root: Path) -> Finding:
    return node.judge_ports(node.read_ports(root))


def test_a_node_without_ports_may_do_without(tmp_path: Path) -> None:
    found = ports(tmp_path / "infiniband")

    assert (found.check, found.verdict) == ("infiniband", Verdict.SKIPPED)


def test_ports_of_one_speed_are_fine_and_named_in_order(tmp_path: Path) -> None:
    for name in ("mlx5_10:1", "mlx5_9:1"):
        port(tmp_path, name)

    found = ports(tmp_path)

    assert found.verdict is Verdict.FINE
    assert found.found == "mlx5_9:1, mlx5_10:1: ACTIVE at 400 Gb/sec (4X NDR)"


def test_a_port_that_is_down_or_slower_than_its_neighbours_is_named(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0:1")
    port(tmp_path, "mlx5_1:1", rate="200 Gb/sec (2X NDR)")
    port(tmp_path, "mlx5_2:1", state="1: DOWN", rate="800 Gb/sec (8X NDR)")

    found = ports(tmp_path)

    assert found.verdict is Verdict.SLOWER
    assert "mlx5_2:1: DOWN" in found.found
    assert "mlx5_1:1 is slower than mlx5_0:1 (400 Gb/sec (4X NDR))" in found.means
    assert "mlx5_2:1 is not active" in found.means
    assert found.fix.endswith("NCCL_IB_HCA=^=mlx5_1:1,mlx5_2:1")


def test_roce_and_infiniband_ports_are_not_compared(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0:1")
    port(tmp_path, "mlx5_bond_0:1", rate="25 Gb/sec (1X EDR)")
    (tmp_path / "mlx5_bond_0/ports/1/link_layer").write_text("Ethernet\n")

    assert ports(tmp_path).verdict is Verdict.FINE


def test_ports_that_do_not_answer_are_unknown() -> None:
    found = node.judge_ports({"error": "no answer within 10 s"})

    assert found.verdict is Verdict.UNKNOWN
    assert found.found.endswith("no answer within 10 s")
