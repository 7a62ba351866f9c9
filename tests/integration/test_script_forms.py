"""Every template with every kind of surroundings is good bash, as bash and shellcheck see it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script, template_names
from hpc_toolkit.slurm.render.spec import read_spec
from tests.scripttext import shellcheck

LAB = load_cluster("lab")
OF_TEMPLATE: dict[str, dict[str, Any]] = {
    "work-queue": {},
    "campaign": {},
    "array": {"array": "0-3", "array_offset": 4},
    "command": {"command": ("date", "it's", "x y")},
}
"""Templates that differ in every kind of surroundings."""
PROGRAM = {"command": ("it's/train.py", "x y")}
OF_COMMANDS: dict[str, dict[str, Any]] = {
    "train-cpu": {},
    "train-single-gpu": {},
    "train-multi-gpu": {"gpus_per_node": 4},
    "train-multi-node": {"gpus_per_node": 4, "nodes": 2},
}
"""Templates that are like 'command' around what they start."""
SURROUNDINGS: list[dict[str, Any]] = [
    {"job_name": "date"},  # which reads like a forgotten $(...)
    {"requeue": False},
    {"modules": ("cuda/12",), "conda": "/opt/c/envs/x", "env": (("A", "b $c"),)},
    {"venv": "/opt/it's", "setup": ("ulimit -c 0", "source /x/y"), "teardown": ("rm x", "false")},
    {"node_setup": ("mkdir -p /tmp/x", "cp 'a b' /tmp/x"), "gpus_per_node": 4},
    {"gpus_per_node": 4, "cpus_per_gpu": 4, "isolate_gpus": True},
]
STAGED: list[dict[str, Any]] = [
    {"stage": ("/data/it's", "x y"), "stage_dir": "/local/it's"},
    {"stage": ("/data/$x",), "teardown": ("rm x",), "launch": "task-per-gpu"},
]
INSIDE = {"container_python": "/c/it's/python"}
CONTAINERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"container_runtime": "apptainer"}, {"container": "im age.sif", **INSIDE}),
    ({"container_runtime": "pyxis"}, {"container": "nvcr.io#a:b", **INSIDE}),
    (
        {"container_runtime": "pyxis", "binds": ("/a b",)},
        {"container": "x", "bind": ("/c:/d:ro",), **INSIDE},
    ),
]


def forms() -> list[str]:
    found = []
    for template, around, (site, container) in product(OF_TEMPLATE, SURROUNDINGS, CONTAINERS):
        fields = {"nodes": 2, **OF_TEMPLATE[template], **around, **container}
        if template == "command":
            fields.pop("container_python", None)
        found.append(form(template, fields, site))
    for template, fields in OF_COMMANDS.items():
        found.append(form(template, {**PROGRAM, **fields, **SURROUNDINGS[3]}, {}))
    multi = {**PROGRAM, **OF_COMMANDS["train-multi-node"]}
    found += [form("train-multi-node", {**multi, **one}, site) for site, one in CONTAINERS]
    found += [form("train-multi-node", {**multi, **one}, {}) for one in STAGED]
    return found


def form(template: str, fields: dict[str, Any], site: dict[str, Any]) -> str:
    cluster = replace(LAB, login_shell=True, **site)
    return render_script(read_spec({"python": "/opt/python", **fields}), cluster, template)


@pytest.mark.slow
def test_every_form_of_a_script_is_clean(tmp_path: Path) -> None:
    assert set(template_names()) == {*OF_TEMPLATE, *OF_COMMANDS}
    paths = []
    for number, script in enumerate(forms()):
        path = tmp_path / f"{number}.sbatch"
        path.write_text(script, encoding="utf-8")
        paths.append(path)
    shellcheck(paths)
    parsed = [subprocess.run(["bash", "-n", path], check=False).returncode for path in paths]

    assert set(parsed) == {0}
    surrounded = len(OF_TEMPLATE) * len(SURROUNDINGS) * len(CONTAINERS)
    assert len(paths) == surrounded + len(OF_COMMANDS) + len(CONTAINERS) + len(STAGED)
