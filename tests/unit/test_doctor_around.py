"""What jobs find beside a directory: Slurm, as programs of the test play it, and the templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.doctor.node import slurm
from hpc_toolkit.slurm.render import script

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """Configuration data as of 2026-01-01T00:00:00
ClusterName             = narwhal
JobRequeue              = 1
KillWait                = 30 sec
PreemptMode             = OFF
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


def answering(path: Path, config: str = CONFIG) -> dict[str, Finding]:
    install(path)
    (path / "config").write_text(config)
    install(path, f'while read -r line; do echo "$line"; done <{path}/config', "scontrol")
    return {one.check: one for one in slurm.check_slurm()}


@pytest.mark.usefixtures("path")
def test_a_machine_without_slurm_may_do_without() -> None:
    (found,) = slurm.check_slurm()

    assert (found.check, found.verdict) == ("slurm", Verdict.SKIPPED)


def test_a_slurm_that_answers_tells_its_version_and_settings(path: Path) -> None:
    found = answering(path)

    assert {one.verdict for one in found.values()} == {Verdict.FINE}
    assert found["slurm"].found.startswith("22.05.8 of cluster narwhal answered in ")
    assert "KillWait=30 s" in found["requeue"].found


@pytest.mark.parametrize(
    ("setting", "check", "words"),
    [
        (("PreemptMode             = OFF", "PreemptMode = GANG,CANCEL"), "requeue", "preempted"),
        (("= 30 sec", "= 10 sec"), "requeue", "longer than 10 s is begun again"),
    ],
)
def test_a_setting_that_costs_work_says_what_it_costs(
    path: Path, setting: tuple[str, str], check: str, words: str
) -> None:
    found = answering(path, CONFIG.replace(*setting))

    slower = [one for one in found.values() if one.verdict is not Verdict.FINE]
    assert [(one.check, one.verdict) for one in slower] == [(check, Verdict.SLOWER)]
    assert words in slower[0].means
    assert slower[0].fix


def test_a_controller_that_is_silent_is_unknown_and_says_why(path: Path) -> None:
    install(path)
    install(path, "echo 'Unable to contact slurm controller' >&2; exit 1", "scontrol")

    (found,) = slurm.check_slurm()

    assert found.verdict is Verdict.UNKNOWN
    assert "Unable to contact slurm controller" in found.found


def test_a_slurm_that_is_not_set_up_is_none(path: Path) -> None:
    install(path)
    install(path, f"echo 'fatal: {slurm._NOT_SET_UP}' >&2; exit 1", "scontrol")

    (found,) = slurm.check_slurm()

    assert found.verdict is Verdict.SKIPPED


def test_a_slurm_of_which_a_part_is_missing_names_it(path: Path) -> None:
    install(path, "exit 0", "sbatch", "scontrol", "scancel")

    (found,) = slurm.check_slurm()

    assert found.verdict is Verdict.UNKNOWN
    assert found.found == "srun, squeue cannot be found"


def test_a_script_renders_for_the_cluster_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTK_CLUSTER", "killarney")

    found = slurm.check_script()

    assert found.verdict is Verdict.FINE
    assert found.found == "work-queue renders for cluster killarney, and bash reads it"


def test_a_cluster_that_cannot_be_loaded_is_a_fault_with_its_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPCTK_CLUSTER", "kilarney")

    found = slurm.check_script()

    assert found.verdict is Verdict.UNSAFE
    assert "kilarney" in found.found
    assert "killarney" in found.fix


def test_a_script_that_bash_does_not_read_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTK_CLUSTER", "generic")
    monkeypatch.setattr(script, "render_script", lambda *_: "#!/bin/bash\nif true\n")

    found = slurm.check_script()

    assert found.verdict is Verdict.UNSAFE
    assert found.found.startswith("bash refuses work-queue for generic: ")
    assert "line" in found.found
