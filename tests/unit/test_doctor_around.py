"""What jobs find beside a directory: Slurm as the test plays it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.doctor import node
from hpc_toolkit.doctor.findings import Verdict

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """Configuration data as of 2026-01-01T00:00:00
ClusterName             = narwhal
SLURM_VERSION           = 22.05.8
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


@pytest.mark.usefixtures("path")
def test_a_machine_without_slurm_may_do_without() -> None:
    found = node.check_slurm()

    assert (found.check, found.verdict) == ("slurm", Verdict.SKIPPED)


def test_a_slurm_that_answers_tells_its_version(path: Path) -> None:
    install(path)
    (path / "config").write_text(CONFIG)
    install(path, f'while read -r line; do echo "$line"; done <{path}/config', "scontrol")

    found = node.check_slurm()

    assert (found.check, found.verdict) == ("slurm", Verdict.FINE)
    assert found.found.startswith("22.05.8 of cluster narwhal answered in ")


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
