"""Values that a script could not use as asked are refused; sbatch's small languages are read."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster
from hpc_toolkit.slurm.render import check_variable, kinds, setup_words
from hpc_toolkit.slurm.render.directives import complete, directives
from hpc_toolkit.slurm.render.script import surroundings
from hpc_toolkit.slurm.render.spec import OPTIONS, ScriptSpec
from hpc_toolkit.slurm.render.values import MAX_INDEX, check_dependency, parse_array

LONG = "x" * 256
GENERIC = load_cluster("generic")


def test_every_variable_that_a_fresh_bash_has_of_its_own_is_refused() -> None:
    listed = subprocess.run(
        ["env", "-i", "bash", "--norc", "-c", "compgen -v"],
        capture_output=True,
        text=True,
        check=True,
    )
    free = {"PATH", "TERM", "HOSTNAME", "HOSTTYPE", "MACHTYPE", "OSTYPE", "SHELL"}
    # The last three: set later by bash or the script.
    for name in (set(listed.stdout.split()) - free) | {"FUNCNAME", "COMP_WORDBREAKS", "hpctk_run"}:
        with pytest.raises(RenderError, match="--env: "):
            check_variable(name, "1", "--env")
    for name in ("OMP_NUM_THREADS", "HOME", "PATH", "NCCL_DEBUG", "id", "python"):
        check_variable(name, "1", "--env")


def test_an_assignment_is_no_setup_command() -> None:
    with pytest.raises(RenderError, match="--setup: 'run=/other'") as error:
        setup_words("run=/other", "--setup")

    assert "--env run=/other" in error.value.hint


@pytest.mark.parametrize(
    ("field", "values", "taken"),
    [
        # A name that no filesystem takes.
        *((field, [f"/scratch/{LONG}/x"], False) for field in ("output", "run")),
        *((field, [f"/scratch/{LONG[1:]}/x"], True) for field in ("output", "run")),
        # A log that some Slurm would not take for this file, or in a directory that it alone names.
        ("output", [".", "..", "logs/..", "logs/.", "%", "logs/50%", "x%%%"], False),
        ("output", ["%j/x.out", "logs/%x/%j.out", "a/%5A/b/x", "%%%j/x", "5%/%u/x"], False),
        ("output", ["%5/%j/x"], False),
        ("output", ["logs/%x-%j.out", "a%%j/%j.out", "50%/%j.out", "/a/%N"], True),
    ],
)
def test_a_path_that_no_filesystem_or_no_slurm_takes_is_refused(
    field: str, values: list[str], taken: bool
) -> None:
    for value in values:
        with nullcontext() if taken else pytest.raises(RenderError, match="is not accepted"):
            OPTIONS[field].value.check(value, "--x")


def around(site: Cluster = GENERIC, **fields: Any) -> dict[str, Any]:
    full = complete(ScriptSpec(python="/opt/python", **fields), site)
    started = kinds.started(full, "work-queue", site)
    return surroundings(full, site, directives(full, site), "work-queue", started)


@pytest.mark.parametrize(
    "fields",
    [
        {"conda": "torch-2.5"},
        {"conda": "/home/é ö/miniforge3/envs/x"},
        {"venv": "/scratch/it's mine/$venv"},
        {"container": "images/a b.sif"},
        {"container": "docker://nvcr.io/nvidia/pytorch:24.01-py3"},
        {"container": "nvcr.io#nvidia/pytorch:24.01-py3"},
        {"container": "x", "bind": ("/a", "/a b:/c", "/a:/b:ro")},
        {"node_setup": ("tar xf '/data/a b.tar' -C /tmp",)},
        {"teardown": ("rm -r /tmp/x",)},
        {"command": ("python", "-c", "print('$(x)')", "", "--flag")},
    ],
)
def test_ordinary_odd_values_are_accepted(fields: dict[str, Any]) -> None:
    ScriptSpec(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[({"conda": value}, "--conda: ") for value in ("a\nb", "", "-x", "a b", "/opt/a:b")],
        *[
            ({"venv": value}, "--venv: ")
            for value in ("a\nb", "~/venv", "/opt/a:b", "/" + 5000 * "x")
        ],
        *[({"container": value}, "--container: ") for value in ("a\nb", "", "-x")],
        *[
            ({"container": "x", "bind": (value,)}, "--bind: ")
            for value in ("a\nb", "a", "/a,/b", "/a:b", "/a:/b:rx")
        ],
        *[({"node_setup": (value,)}, "--node-setup: ") for value in ("a\nb", "a; b", "$HOME/x")],
        *[({"teardown": (value,)}, "--teardown: ") for value in ("a | b", "`x`")],
        *[({"command": (value,)}, "the program after --: ") for value in ("a\nb", "", "-x")],
        ({"command": ("x", "a\nb")}, "the program after --: "),
        ({"command": ("x", 40000 * "x")}, "the program after --: "),
        ({"command": ("x", *(5 * [30000 * "x"]))}, "longer than 131072 characters"),
        ({"conda": "x", "venv": "/x"}, "--conda and --venv exclude each other"),
        ({"bind": ("/a",)}, "--bind needs --container"),
    ],
)
def test_a_value_that_could_be_misread_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RenderError, match=message) as caught:
        ScriptSpec(**fields)

    assert caught.value.hint


def test_conda_is_sourced_from_the_sites_base_or_from_that_of_the_path() -> None:
    site = replace(GENERIC, conda_base="/opt/conda/")
    named = around(site, conda="torch")["preparation"]
    by_path = around(conda="/home/u/forge/envs/x")["preparation"]

    assert [words for words, _ in named] == [
        ["source", "/opt/conda/etc/profile.d/conda.sh"],
        ["conda", "activate", "torch"],
    ]
    assert by_path[0][0] == ["source", "/home/u/forge/etc/profile.d/conda.sh"]
    assert by_path[1][0] == ["conda", "activate", "/home/u/forge/envs/x"]


@pytest.mark.parametrize(
    ("text", "written", "highest"),
    [
        ("0", "0", 0),
        ("0-99%8", "0-99%8", 99),
        ("1,3,5-9:2", "1,3,5-9:2", 9),
        ("007,012-013", "7,12-13", 13),
        ("5,1", "5,1", 5),
        (f"{MAX_INDEX}", f"{MAX_INDEX}", MAX_INDEX),
    ],
)
def test_an_array_is_written_without_leading_zeros(text: str, written: str, highest: int) -> None:
    found = parse_array(text, "--array")

    assert (found.text, found.highest) == (written, highest)


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "0-9:0", "0-9%0", "0-9%", "1,,2", "0 - 9", "0-9%1%1", "\u0661"]
)
def test_an_array_that_sbatch_refuses_is_refused(text: str) -> None:
    with pytest.raises(RenderError, match=r"--array: .* is not accepted") as caught:
        parse_array(text, "--array")

    assert "0-99" in caught.value.hint
    with pytest.raises(RenderError, match="index 4000001 is too high"):
        parse_array(f"0-{MAX_INDEX + 1}", "--array")


@pytest.mark.parametrize(
    ("texts", "accepted"),
    [
        (["afterok:1", "afterok:1:2", "afterany:1_3", "afterany:1_*", "after:1"], True),
        (["after:1+5:2+10", "singleton", "singleton,afterok:2", "afterburstbuffer:4"], True),
        (["afternotok:1?aftercorr:2"], True),
        (["", "1", "afterok", "afterok:", "afterok:a", "afterok:0", "afterok:1+5"], False),
        (["after:1+", "bogus:1", "afterok:1,", "singleton:1", "afterok:1 ", "AFTEROK:1"], False),
        (["afterok:1,afterany:2?after:3"], False),
    ],
)
def test_a_dependency_that_sbatch_refuses_or_guesses_is_refused(
    texts: list[str], accepted: bool
) -> None:
    for text in texts:
        refused = pytest.raises(RenderError, match=r"--dependency: .* is not accepted")
        with nullcontext() if accepted else refused:
            check_dependency(text, "--dependency")
