"""The committed examples are what the templates render, byte for byte, and good bash."""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.file import origin
from hpc_toolkit.slurm.render.kinds import PLAIN
from hpc_toolkit.slurm.render.script import render_script, template_names
from hpc_toolkit.slurm.render.spec import OPTIONS, PROGRAMS, ScriptSpec, option, read_spec
from tests.scripttext import shellcheck

EXAMPLES = Path(__file__).parents[2] / "slurm" / "examples"


def _load() -> ModuleType:
    specification = importlib.util.spec_from_file_location("examples", EXAMPLES / "render.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


RENDERED: dict[str, str] = _load().rendered()


@pytest.mark.parametrize("name", RENDERED)
def test_example_equals_its_rendering(name: str) -> None:
    committed = (EXAMPLES / name).read_bytes().decode()

    lines = (committed.splitlines(), RENDERED[name].splitlines())
    difference = "\n".join(difflib.unified_diff(*lines, lineterm=""))
    assert committed == RENDERED[name], f"{difference}\nIf this is intended: make golden"
    assert origin(committed) == "rendered"
    assert {path.name for path in EXAMPLES.glob("*.sbatch")} == RENDERED.keys()


def test_the_length_that_the_readme_gives_is_that_of_the_examples() -> None:
    readme = (EXAMPLES.parents[1] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"of (\d+) to (\d+) lines\s+that you can read and edit", readme)
    lines = {name: len(text.splitlines()) for name, text in RENDERED.items()}
    del lines["every-option.sbatch"]  # nobody needs all options at once

    assert found is not None
    assert int(found[1]) <= min(lines.values()) < max(lines.values()) <= int(found[2])
    assert "Edit freely" in RENDERED["eight-nodes.sbatch"]


def test_examples_are_clean_for_shellcheck() -> None:
    shellcheck(EXAMPLES / name for name in RENDERED)


def test_examples_show_every_option_and_every_template() -> None:
    examples = _load().EXAMPLES.values()

    shown = {name for _, _, request in examples for name in request}
    assert {field.name for field in fields(ScriptSpec)} - shown == {"job_name"}
    assert {template for _, template, _ in examples} == set(template_names())


def test_every_template_refuses_the_options_that_it_does_not_use() -> None:
    values = {name: one for _, _, given in _load().EXAMPLES.values() for name, one in given.items()}
    reasons = set()
    for name, row in OPTIONS.items():
        needed = row.needs.partition(" ")[0]
        given = {one: values[one] for one in (name, needed) if one in values}
        unused = set(template_names()) - set(row.templates)
        without_hpctk = [] if row.plain else [one for one in row.templates if one in PLAIN]
        for template in (*unused, *without_hpctk):
            program = {"command": ("train.py",)} if template in PROGRAMS else {}
            plain = {"plain": True} if template in without_hpctk else {"python": "/p/python"}
            spec = read_spec({**program, **plain, **given})
            with pytest.raises(RenderError, match=f"^({option(name)}|{option(needed)}): ") as no:
                render_script(spec, load_cluster("generic"), template)
            reasons.add(no.value.message.partition(": ")[2].replace(template, "TEMPLATE"))

    assert reasons == {"not used by the template TEMPLATE", "not supported by plain scripts"}
