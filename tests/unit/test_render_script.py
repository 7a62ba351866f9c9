"""The rendered text: pure, signed, no value that no filter has seen; jobs that train."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render import script as render_module
from hpc_toolkit.slurm.render.file import origin
from hpc_toolkit.slurm.render.script import render_script, template_names
from hpc_toolkit.slurm.render.spec import ScriptSpec, read_spec
from hpc_toolkit.system.processes import WARNING_NAME, WARNING_NAMES
from tests.scripttext import batch_program

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
    assert f"trap 'export HPCTK_WARNED=1' {WARNING_NAMES}\n" in script
    assert f"trap '' {WARNING_NAMES} " in script


LAB = load_cluster("lab")
SCRIPT = ("train.py", "--lr", "1")
TWO_NODES: dict[str, Any] = {"nodes": 2, "gpus_per_node": 4}


def script(template: str = "train-multi-node", cluster: Any = LAB, **fields: Any) -> str:
    given = {"python": "/p/python", "command": SCRIPT, "job_name": "job", **fields}
    return render_script(read_spec(given), cluster, template)


@pytest.mark.parametrize(
    ("template", "words", "match"),
    [
        ("command", ("-m", "train"), "cannot start the module train"),
        ("train-cpu", ("-m",), "'-m' is not accepted"),
        ("train-cpu", ("-c", "train"), "'-c' is not accepted"),
    ],
)
def test_what_starts_no_training_is_refused(
    template: str, words: tuple[str, ...], match: str
) -> None:
    with pytest.raises(RenderError, match=match):
        script(template, command=words)


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        ({"gpus_per_node": 4}, "nccl"),
        ({"gpus_per_node": 4, "backend": "gloo"}, "gloo"),
        ({}, "gloo"),
    ],
)
def test_gpus_are_joined_by_nccl_and_cpus_by_gloo(fields: dict[str, Any], backend: str) -> None:
    text = script(cluster=GENERIC, nodes=2, **fields)

    assert f"--backend={backend} " in shlex.join(batch_program(text))


@pytest.mark.parametrize("path", ["/", "a/..", ".users", "-x"])
def test_only_what_has_a_name_can_be_staged(path: str) -> None:
    with pytest.raises(RenderError, match="--stage: "):
        script(stage=(path,))


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        ("train-cpu", {"command": ()}, "the template train-cpu needs a training script"),
        ("train-cpu", {"nodes": 2}, "--nodes: the template train-cpu runs on one node"),
        ("train-single-gpu", {"gpus_per_node": 2}, "--gpus-per-node: train-single-gpu uses one"),
        ("train-multi-gpu", {}, "the template train-multi-gpu needs --gpus-per-node"),
        ("train-multi-node", {"backend": "nccl"}, "--backend: nccl needs GPUs"),
        (
            "train-multi-node",
            {"gpus_per_node": 2, "nproc_per_node": 4},
            "--nproc-per-node: nccl cannot join 4 ranks on 2 GPUs",
        ),
        (
            "train-multi-node",
            {"launch": "task-per-gpu", "rank_restarts": 1},
            "--rank-restarts: with --launch task-per-gpu",
        ),
        (
            "train-multi-node",
            {"command": ("train.py", "--lr", "1", "--nproc_per_node=8")},
            "--nproc_per_node=8 comes after the script, which would get it",
        ),
        (
            "train-multi-node",
            {"command": ("python3.11", "train.py")},
            "starts the script itself, without 'python3.11'",
        ),
        ("train-multi-node", {"numa_binding": "node"}, "--numa-binding: a node's GPUs (0)"),
        (
            "train-multi-node",
            {"launch": "task-per-gpu", "gpus_per_node": 2, "numa_binding": "node"},
            "--numa-binding: with --launch task-per-gpu, srun binds the ranks",
        ),
        ("train-multi-node", {"stage_dir": "/x"}, "--stage-dir needs --stage"),
        (
            "train-multi-node",
            {"cpu_bind": "cores", "hint": "multithread"},
            "--cpu-bind and --hint exclude each other",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    template: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RenderError) as caught:
        script(template, GENERIC, **fields)

    assert caught.value.message.startswith(message) or message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("template", "fields", "starts"),
    [
        ("command", {}, "srun --kill-on-bad-exit=1 --cpus-per-task=$SLURM_CPUS_PER_TASK run"),
        ("train-cpu", {}, "srun --kill-on-bad-exit=1 --cpus-per-task=$SLURM_CPUS_PER_TASK"),
        ("train-single-gpu", {}, "srun "),
        ("train-multi-gpu", {"gpus_per_node": 4}, "srun "),
        ("train-multi-node", TWO_NODES, "srun "),
    ],
)
def test_a_plain_script_has_nothing_of_hpctk(
    template: str, fields: dict[str, Any], starts: str
) -> None:
    command = ("run", "--lr", "1") if template == "command" else SCRIPT
    text = script(template, plain=True, python=None, command=command, **fields)

    lines = text.splitlines()
    assert len(lines) <= 40
    assert not [line for line in lines if "hpctk" in line and not line.startswith("#")]
    assert not [line for line in lines if "hpc_toolkit" in line]
    assert "#SBATCH --signal" not in text, "nothing would handle it"
    (step,) = [at for at, line in enumerate(lines) if line.startswith("srun ")]
    words = shlex.split("\n".join(lines[step:]))
    assert shlex.join(words).replace("'", "").startswith(starts)
    assert words[-len(command) - 1 :] == [*command, "$@"]
    assert ("torchrun" in words) == (template in ("train-multi-gpu", "train-multi-node"))
    assert ("--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT" in words) == (fields is TWO_NODES)
