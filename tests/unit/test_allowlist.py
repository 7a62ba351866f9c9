"""Names, paths and surroundings that a script could not use as asked are refused."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.allowlist import check_variable, setup_words
from hpc_toolkit.slurm.clusters.facts import Cluster, load_cluster
from hpc_toolkit.slurm.render.directives import complete, directives
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import OPTIONS, ScriptSpec
from hpc_toolkit.slurm.render.surroundings import Surroundings, surroundings

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


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "HOME", "PATH", "NCCL_DEBUG", "id", "python"])
def test_a_variable_of_the_users_is_accepted(name: str) -> None:
    check_variable(name, "1", "--env")


def test_an_assignment_is_no_setup_command() -> None:
    with pytest.raises(RenderError, match="--setup: 'run=/other'") as error:
        setup_words("run=/other", "--setup")

    assert "--env run=/other" in error.value.hint


@pytest.mark.parametrize("field", ["output", "run"])
def test_a_name_that_no_filesystem_takes_is_refused(field: str) -> None:
    with pytest.raises(RenderError, match="is not accepted"):
        OPTIONS[field].value.check(f"/scratch/{LONG}/x", "--x")
    OPTIONS[field].value.check(f"/scratch/{LONG[1:]}/x", "--x")


@pytest.mark.parametrize("value", [".", "..", "logs/..", "logs/.", "%", "logs/50%", "x%%%"])
def test_a_log_that_some_slurm_would_not_take_for_this_file_is_refused(value: str) -> None:
    with pytest.raises(RenderError, match="is not accepted"):
        OPTIONS["output"].value.check(value, "--output")


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        *(("%j/x.out", False), ("logs/%x/%j.out", False), ("a/%5A/b/x", False), ("%%%j/x", False)),
        *(("5%/%u/x", False), ("%5/%j/x", False)),
        *(("logs/%x-%j.out", True), ("a%%j/%j.out", True), ("50%/%j.out", True), ("/a/%N", True)),
    ],
)
def test_a_log_in_a_directory_that_only_slurm_can_name_is_refused(value: str, taken: bool) -> None:
    if taken:
        OPTIONS["output"].value.check(value, "--output")
        return
    with pytest.raises(RenderError, match="is not accepted"):
        OPTIONS["output"].value.check(value, "--output")


def around(site: Cluster = GENERIC, **fields: Any) -> Surroundings:
    full = complete(ScriptSpec(python="/opt/python", **fields), site)
    return surroundings(full, site, directives(full, site), "work-queue", None)


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
    named = around(site, conda="torch").preparation
    by_path = around(conda="/home/u/forge/envs/x").preparation

    assert [words for words, _ in named] == [
        ["source", "/opt/conda/etc/profile.d/conda.sh"],
        ["conda", "activate", "torch"],
    ]
    assert by_path[0][0] == ["source", "/home/u/forge/etc/profile.d/conda.sh"]
    assert by_path[1][0] == ["conda", "activate", "/home/u/forge/envs/x"]


@pytest.mark.parametrize("conda", ["torch", "/home/u/torch"])
def test_conda_without_a_base_is_refused(conda: str) -> None:
    with pytest.raises(RenderError, match="the path of conda is unknown") as caught:
        around(conda=conda)

    assert "clusters/generic.toml: conda_base" in caught.value.message


def test_a_container_without_a_runtime_is_refused() -> None:
    with pytest.raises(RenderError, match="container_runtime"):
        around(container="x.sif")


def test_binds_are_the_sites_and_the_users() -> None:
    site = replace(GENERIC, binds=("/scratch",), container_runtime="apptainer")
    inside = {"container": "x.sif", "container_python": "/c/python"}
    found = around(site, **inside, bind=("/a:/b:ro",), gpus_per_node=1).batch

    assert found[-4:] == (
        *("--apptainer=x.sif", "--bind=/scratch", "--bind=/a:/b:ro"),
        "--container-python=/c/python",
    )


def test_the_network_is_told_of_only_where_there_are_gpus() -> None:
    site = replace(GENERIC, env=(("A", "1"),), nccl=(("NCCL_SOCKET_IFNAME", "ib0"),))

    assert around(site).env == (("A", "1"),)
    assert around(site, gpus_per_node=2, env=(("B", "2"),)).env == (
        ("A", "1"),
        ("NCCL_SOCKET_IFNAME", "ib0"),
        ("B", "2"),
    )


@pytest.mark.parametrize(
    ("fields", "site", "gpus"),
    [
        ({"gpus_per_node": 4}, {}, 4),
        ({"gpus_per_node": 4}, {"gpu_request": "gpus-per-task"}, 1),
        ({"gpus_per_node": 4, "ntasks_per_node": 2}, {"gpu_request": "gpus-per-task"}, 2),
        ({}, {}, 0),
    ],
)
def test_a_node_is_asked_for_the_gpus_that_one_task_sees(
    fields: dict[str, Any], site: dict[str, Any], gpus: int
) -> None:
    found = [one for one in around(replace(GENERIC, **site), **fields).batch if "--gpus" in one]
    assert found == ([f"--gpus={gpus}"] if gpus else [])


@pytest.mark.parametrize(
    ("fields", "shrinks"),
    [
        ({"nodes": 2}, True),
        ({"nodes": 1}, False),
        ({"nodes": 2, "array": "0-3"}, False),
        ({"nodes": 2, "container": "x.sif", "container_python": "/p"}, False),
    ],
)
def test_nodes_are_given_back_where_the_script_can(
    fields: dict[str, Any], *, shrinks: bool
) -> None:
    site = replace(GENERIC, shrink_jobs=True, container_runtime="apptainer")

    fixed = replace(site, shrink_jobs=False)

    assert ("--shrink-every=1min" in around(site, **fields).batch) is shrinks
    assert "--shrink-every=1min" not in around(fixed, **fields).batch


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        ("command", {}, "the template command needs a program"),
        ("work-queue", {"command": ("x",)}, "the template work-queue cannot run 'x'"),
        ("array", {}, "the template array needs --array"),
    ],
)
def test_what_a_template_would_leave_out_is_refused(
    template: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RenderError, match=message) as caught:
        render_script(ScriptSpec(python="/opt/python", **fields), GENERIC, template)

    assert caught.value.hint


def test_a_template_changes_its_hash_with_those_that_it_extends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hpc_toolkit.slurm.render import script as render

    def header(template: str) -> str:
        spec = ScriptSpec(python="/opt/python", run="r", array="0" if template == "array" else None)
        lines = render_script(spec, GENERIC, template).splitlines()
        return next(line for line in lines if line.startswith("# hpctk-template"))

    before = {name: header(name) for name in ("work-queue", "campaign", "array")}
    source = render._source
    changed = {"base.sbatch.j2": "<#-- x --#>"}
    monkeypatch.setattr(render, "_source", lambda file: source(file) + changed.get(file, ""))

    assert all(header(name) != line for name, line in before.items())
