"""Jobs that train: what is asked of Slurm for them, and what is started on their nodes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import read_spec
from tests.scripttext import batch_program

GENERIC, LAB = (load_cluster(name) for name in ("generic", "lab"))
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
