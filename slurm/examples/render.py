"""Render the example scripts beside this file: python slurm/examples/render.py (or: make golden).

They are never edited by hand. A test compares each of them with its rendering byte for byte,
so that a change of a template shows as a change of scripts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import read_spec

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster

PYTHON = "/opt/hpc_toolkit/bin/python"

EXAMPLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eight-nodes": ("generic", "work-queue", {"nodes": 8, "gpus_per_node": 4}),
    "cpu-only": (
        "generic",
        "work-queue",
        {"nodes": 4, "ntasks_per_node": 16, "cpus_per_task": 2, "mem": "120G", "time": "12:00:00"},
    ),
    "packed": (
        "generic",
        "work-queue",
        {"nodes": 4, "cpus_per_task": 64, "workers_per_task": 57, "mem": "120G"},
    ),
    "one-rank": (
        "generic",
        "work-queue",
        {"nodes": 2, "ntasks_per_node": 8, "one_rank": True, "time": "4h", "account": "physics"},
    ),
    "lab": ("lab", "work-queue", {"nodes": 8, "gpus_per_node": 4, "run": "runs/demo"}),
    "killarney": (
        "killarney",
        "work-queue",
        {"nodes": 8, "gpus_per_node": 4, "account": "aip-example", "run": "runs/pythia"},
    ),
    "one-gpu": (
        "killarney",
        "work-queue",
        {"gpus_per_node": 1, "account": "aip-example", "time": "0:20:00"},
    ),
    "campaign": (
        "lab",
        "campaign",
        {"nodes": 2, "gpus_per_node": 4, "run": "runs/pythia", "time": "2:00:00"},
    ),
    "array": (
        "lab",
        "array",
        {
            "array": "0-99:3,200%8",
            "array_offset": 1000,
            "gpus_per_node": 1,
            "time": "10",
            "run": "runs/pythia",
            "dependency": "afterok:17:18,singleton",
            "kill_on_invalid_dep": False,
        },
    ),
    "training": (
        "site.toml",
        "command",
        {
            "nodes": 2,
            "gpus_per_node": 4,
            "ntasks_per_node": 1,
            "cpus_per_gpu": 8,
            "mem_per_gpu": "65536M",
            "gpu_type": "a100",
            "exclusive": "user",
            "time": "12:00:00",
            "venv": "/opt/training",
            "command": ("python", "train.py", "--name", "it's"),
        },
    ),
    "train-one-gpu": (
        "killarney",
        "train-single-gpu",
        {"account": "aip-example", "stage": ("/project/corpus",), "command": ("train.py",)},
    ),
    "train-one-node": (
        "lab",
        "train-multi-gpu",
        {"gpus_per_node": 4, "rank_restarts": 1, "command": ("train.py", "--lr", "0.1")},
    ),
    "train-nodes": (
        "site.toml",
        "train-multi-node",
        {
            "nodes": 2,
            "gpus_per_node": 4,
            "time": "12:00:00",
            "run_dir": "runs/pythia",
            "numa_binding": "node",
            "venv": "/opt/training",
            "stage": ("/project/it's a corpus", "/project/tokens.bin"),
            "stage_dir": "/local",
            "command": ("train.py", "--name", "it's"),
        },
    ),
    "train-ranks": (
        "lab",
        "train-multi-node",
        {
            "nodes": 2,
            "launch": "task-per-gpu",
            "nproc_per_node": 8,
            "backend": "gloo",
            "cpu_bind": "verbose,cores",
            "mem_bind": "local",
            "distribution": "block:cyclic",
            "stage_env": True,
            "stage_dir": "/local",
            "command": ("train.py",),
        },
    ),
    "plain-nodes": (
        "site.toml",
        "train-multi-node",
        {
            "nodes": 2,
            "gpus_per_node": 4,
            "time": "12:00:00",
            "venv": "/opt/training",
            "plain": True,
            "python": None,
            "command": ("train.py", "--name", "it's"),
        },
    ),
    "train-trees": (
        "generic",
        "train-cpu",
        {"hint": "nomultithread", "command": ("trees.py", "--depth", "6")},
    ),
    "shared-gpus": (
        "lab",
        "work-queue",
        {"nodes": 2, "gpus_per_node": 2, "ntasks_per_gpu": 2, "run": "runs/small"},
    ),
    "own-gpus": (
        "killarney",
        "work-queue",
        {
            "account": "aip-example",
            "nodes": 2,
            "gpus_per_node": 4,
            "isolate_gpus": True,
            "gres": "nvme:1",
            "oversubscribe": True,
            "stage_env": True,
            "run": "runs/small",
        },
    ),
    "uneven": (
        "lab",
        "work-queue",
        {
            "nodes": 3,
            "ntasks": 8,
            "mem": "0",
            "run": "runs/small",
            "conda": "/opt/conda/envs/analysis",
        },
    ),
    "container": (
        "site.toml",
        "work-queue",
        {
            "gpus_per_node": 4,
            "gpu_bind": "single:1",
            "container": "/images/tools v2.sif",
            "container_python": "/opt/conda/bin/python",
            "bind": ("/data", "/scratch:/work:ro"),
            "run": "/scratch/runs/pythia",
        },
    ),
    "program-in-container": (
        "site.toml",
        "command",
        {
            "gpus_per_node": 4,
            "container": "/images/tools v2.sif",
            "bind": ("/data",),
            "command": ("python", "/data/train.py"),
        },
    ),
    **{
        f"plain-{runtime}": (
            f"{runtime}.toml",
            "train-multi-node" if runtime == "podman-hpc" else "command",
            {
                "gpus_per_node": 4,
                "gpu_type": gpu_type,
                "plain": True,
                "python": None,
                "container": image,
                "bind": ("/scratch:/work:ro",),
                "command": ("train.py", "--name", "it's"),
            },
        )
        for runtime, image, gpu_type in (
            ("apptainer", "/images/tools v2.sif", None),
            ("singularity", "docker://rocm/pytorch", "mi250x"),
            ("pyxis", "nvcr.io#nvidia/pytorch:25.01-py3", None),
            ("enroot", "/images/tools v2.sqsh", None),
            ("shifter", "docker:nvidia/pytorch:25.01", None),
            ("podman-hpc", "nvcr.io/nvidia/pytorch:25.01-py3", None),
        )
    },
    "container-of-amd": (
        "singularity.toml",
        "work-queue",
        {
            "gpus_per_node": 4,
            "gpu_type": "mi250x",
            "container": "docker://rocm/pytorch",
            "container_python": "/opt/conda/bin/python",
            "run": "runs/pythia",
        },
    ),
    "every-option": (
        "generic",
        "work-queue",
        {
            "account": "physics",
            "partition": "gpu,gpu-long",
            "qos": "normal",
            "reservation": "course",
            "constraint": "[rack1|rack2]&l40s",
            "nodelist": "n[1-4]",
            "exclude": "n[7,9-12]",
            "nodes": 2,
            "ntasks_per_node": 8,
            "gpus_per_node": 4,
            "cpus_per_task": 6,
            "mem_per_cpu": "16384M",
            "exclusive": True,
            "time": "1-12",
            "time_min": "90",
            "signal": "B:USR1@600",
            "requeue": False,
            "max_restarts": 3,
            "idle_exit": "5min",
            "lease": "1min 30s",
            "workers_per_task": 3,
            "output": 'logs/it\'s "mine" #1/%x-%j.out',
            "error": "logs/errors/%x-%j.err",
            "open_mode": "truncate",
            "chdir": "/scratch/it's mine/é $HOME",
            "sbatch": (
                'comment=layers of two models ("second" try), 50% #3 \\o/',
                "begin=2030-01-31T18:00",
                "mail-type=END,TIME_LIMIT_80",
                "nice=-5",
                "hold",
                "contiguous",
                "acctg-freq=task=30",
            ),
            "run": "/scratch/it's mine/runs/pythia",
            "modules": ("cuda/12.4", "python/3.11"),
            "setup": ("ulimit -c 0", "source '/opt/site settings/env.sh'"),
            "node_setup": ("mkdir -p /tmp/cache",),
            "teardown": ("rm -rf /tmp/cache",),
            "env": (("HF_HUB_OFFLINE", "1"), ("GREETING", "it's $5 & more")),
        },
    ),
}
"""Cluster, template and request of every example; its name is the job's and the file's."""


def load(name: str) -> Cluster:
    if not name.endswith(".toml"):
        return load_cluster(name)
    # Scripts name it as seen from the top of the repository, on every machine.
    here = Path(__file__).parent
    return replace(load_cluster(str(here / name)), argument=f"slurm/examples/{name}")


def rendered() -> dict[str, str]:
    """The text of every example by file name."""
    return {
        f"{name}.sbatch": render_script(
            read_spec({"job_name": name, "python": PYTHON, **request}), load(cluster), template
        )
        for name, (cluster, template, request) in EXAMPLES.items()
    }


def main() -> None:
    """Write the examples, and remove scripts that are none any more."""
    here = Path(__file__).parent
    scripts = rendered()
    for path in here.glob("*.sbatch"):
        if path.name not in scripts:
            path.unlink()
    for name, script in scripts.items():
        (here / name).write_text(script, encoding="utf-8")


if __name__ == "__main__":
    main()
