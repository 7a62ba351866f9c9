"""Names and paths that a script could not use as asked are refused before it is submitted."""

from __future__ import annotations

import subprocess

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_environment, check_text, check_variable, setup_words

LONG = "x" * 256


@pytest.mark.parametrize(
    "name",
    [
        *("BASH_VERSINFO", "BASHPID", "GROUPS", "RANDOM", "SECONDS", "_", "LINENO", "PWD", "SHLVL"),
        *("EPOCHSECONDS", "FUNCNAME", "PIPESTATUS", "OPTIND", "COMP_WORDBREAKS", "hpctk_run"),
    ],
)
def test_a_variable_of_bash_or_of_the_script_is_refused(name: str) -> None:
    with pytest.raises(RenderError, match="--env: "):
        check_variable(name, "1", "--env")


def test_every_variable_that_a_fresh_bash_has_of_its_own_is_refused() -> None:
    listed = subprocess.run(
        ["env", "-i", "bash", "--norc", "-c", "compgen -v"],
        capture_output=True,
        text=True,
        check=True,
    )
    free = {"PATH", "TERM", "HOSTNAME", "HOSTTYPE", "MACHTYPE", "OSTYPE", "SHELL"}
    for name in set(listed.stdout.split()) - free:
        with pytest.raises(RenderError, match="--env: "):
            check_variable(name, "1", "--env")


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "HOME", "PATH", "NCCL_DEBUG", "id", "python"])
def test_a_variable_of_the_users_is_accepted(name: str) -> None:
    check_variable(name, "1", "--env")


def test_an_assignment_is_no_setup_command() -> None:
    with pytest.raises(RenderError, match="--setup: 'run=/other'") as error:
        setup_words("run=/other", "--setup")

    assert "--env run=/other" in error.value.hint


@pytest.mark.parametrize("field", ["output", "error", "chdir", "run", "python"])
def test_a_name_that_no_filesystem_takes_is_refused(field: str) -> None:
    with pytest.raises(RenderError, match="is not accepted"):
        check_text(f"/scratch/{LONG}/x", field, "--x")
    check_text(f"/scratch/{LONG[1:]}/x", field, "--x")


@pytest.mark.parametrize("value", [".", "..", "logs/..", "logs/.", "%", "logs/50%", "x%%%"])
def test_a_log_that_some_slurm_would_not_take_for_this_file_is_refused(value: str) -> None:
    with pytest.raises(RenderError, match="is not accepted"):
        check_text(value, "output", "--output")


@pytest.mark.parametrize("given", [{"venv": "/opt/a:b"}, {"conda": "/opt/a:b"}])
def test_a_directory_of_programs_with_a_colon_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(RenderError, match="is not accepted"):
        check_environment(**given)  # type: ignore[arg-type]
