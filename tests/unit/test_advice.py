"""Settings that guides recommend and that harm: who warns of them, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpc_toolkit.cli import load_commands
from hpc_toolkit.doctor.advice import harmful
from hpc_toolkit.doctor.findings import Verdict
from hpc_toolkit.doctor.node import check_variables

HARMFUL = {
    "NCCL_P2P_LEVEL": "NVL",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET_GDR_LEVEL": "5",
    "NCCL_TIMEOUT": "1800",
    "NCCL_ASYNC_ERROR_HANDLING": "1",
    "NCCL_BLOCKING_WAIT": "1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_harmful_setting_has_a_reason_and_a_source() -> None:
    found = list(harmful(HARMFUL))

    assert [line.partition("=")[0] for line in found] == list(HARMFUL)
    assert all(line.endswith(".html)") and "; " in line for line in found)


def test_settings_that_a_site_needs_are_left_alone() -> None:
    fine = {"NCCL_IB_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS", "NCCL_NET_GDR_LEVEL": "PHB"}

    assert (
        list(harmful({**fine, "NCCL_SOCKET_IFNAME": "ib0", "TORCH_NCCL_BLOCKING_WAIT": "1"})) == []
    )


def test_render_warns_of_what_a_user_and_a_site_set() -> None:
    Path("site.toml").write_text('[nccl]\nNCCL_IB_DISABLE = "1"\n')
    words = ["render", "--cluster", "./site.toml", "--env", "NCCL_TIMEOUT=9", "-o", "-"]

    shown = CliRunner().invoke(load_commands("render"), words)

    assert shown.exit_code == 0
    warned = [line for line in shown.stderr.splitlines() if "NCCL" in line]
    assert [line.split(": ")[1] for line in warned] == ["NCCL_IB_DISABLE=1", "NCCL_TIMEOUT=9"]


def test_the_check_of_a_clusters_file_warns_and_accepts_it() -> None:
    Path("site.toml").write_text('[nccl]\nNCCL_P2P_LEVEL = "NVL"\n')

    shown = CliRunner().invoke(load_commands("cluster"), ["cluster", "validate", "./site.toml"])

    assert (shown.exit_code, shown.stdout) == (0, "./site.toml: ok\n")
    assert shown.stderr.startswith("warning: ./site.toml: NCCL_P2P_LEVEL=NVL: GPUs without NVLink")


def test_doctor_reports_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HARMFUL:
        monkeypatch.delenv(name, raising=False)
    assert check_variables() == []

    monkeypatch.setenv("NCCL_TIMEOUT", "1800")

    (found,) = check_variables()
    assert (found.verdict, found.found) == (Verdict.SLOWER, "NCCL_TIMEOUT=1800")
