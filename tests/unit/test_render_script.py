"""The rendered text: pure, signed, and without a value that no filter has seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render import script as render_module
from hpc_toolkit.slurm.render.file import origin
from hpc_toolkit.slurm.render.script import render_script, template_names
from hpc_toolkit.slurm.render.spec import ScriptSpec, read_spec
from hpc_toolkit.system.processes import WARNING_NAME

PYTHON = "/opt/python"
GENERIC = load_cluster("generic")


def spec(**given_fields: Any) -> ScriptSpec:
    return read_spec({"python": PYTHON, **given_fields})


@pytest.mark.parametrize("name", ["base", "training", "../base", "", "a\nb"])
def test_only_complete_templates_can_be_rendered(name: str) -> None:
    with pytest.raises(RenderError, match="unknown template"):
        render_script(spec(), GENERIC, name)


def test_facts_that_nobody_verified_are_named_in_the_header() -> None:
    script = render_script(spec(account="aip-x"), load_cluster("killarney"))

    assert "(facts not verified)" in script
    assert "(facts not verified)" not in render_script(spec(), GENERIC)


def test_a_cluster_given_by_path_is_in_the_command_and_not_in_the_hash() -> None:
    here, there = (replace(GENERIC, argument=f"/{place}/generic.toml") for place in ("a", "b"))

    first, second = (render_script(spec(), site) for site in (here, there))

    def facts(script: str) -> str:
        return next(line for line in script.splitlines() if line.startswith("# hpctk-cluster"))

    assert "--cluster /a/generic.toml" in first
    assert facts(first) == facts(second)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text, "rendered"),
        (lambda text: text.replace("--nodes=1", "--nodes=2"), "edited"),
        (lambda text: text + "\n", "edited"),
        (lambda text: text.replace("#   hpctk render", "#   render"), "edited"),
        (lambda text: text + text[text.index("# hpctk-body") :].splitlines()[0] + "\n", "edited"),
        (lambda _: "#!/bin/bash\necho mine\n", "foreign"),
        (lambda _: "", "foreign"),
    ],
)
def test_origin_tells_an_edited_script_from_a_rendered_one(change: Any, expected: str) -> None:
    assert origin(change(render_script(spec(), GENERIC))) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ value }}", "written into the script without a filter"),
        ("{{ value ~ 'x' }}", "written into the script without a filter"),
        ("{{ true }}", "written into the script without a filter"),
        ("{{ value|text }}", "would not stay on one line"),
        ("{{ ('name', value)|directive }}", "--name: .* cannot be part of an sbatch directive"),
    ],
)
def test_a_template_cannot_write_a_value_unmarked(template: str, message: str) -> None:
    environment = render_module._environment()

    with pytest.raises(RenderError, match=message):
        environment.from_string(template).render(value="a\n#SBATCH --evil")


@pytest.mark.parametrize("name", ["base", *template_names()])
def test_template_is_short_and_does_no_arithmetic(name: str) -> None:
    source = render_module._source(f"{name}.sbatch.j2")

    assert len(source.splitlines()) <= 52
    assert not [
        value
        for _, kind, value in render_module._environment().lex(source)
        if kind == "operator" and value in {"+", "-", "*", "/", "//", "**"}
    ]


def test_a_script_traps_the_warning_that_it_requests() -> None:
    script = render_script(spec(setup=("true",)), GENERIC)

    assert f"#SBATCH --signal=B:{WARNING_NAME}@" in script
    assert f"trap 'export HPCTK_WARNED=1' {WARNING_NAME}\n" in script
    assert f"trap '' {WARNING_NAME} " in script
