"""Render the example scripts beside this file: python slurm/examples/render.py (or: make golden).

They are never edited by hand. A test compares each of them with its rendering byte for byte,
so that a change of a template shows as a change of scripts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_toolkit.clusters import load_cluster
from hpc_toolkit.render import render_script
from hpc_toolkit.scriptspec import ScriptSpec

PYTHON = "/opt/hpc_toolkit/bin/python"

EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "eight-nodes": ("generic", {"nodes": 8, "gpus_per_node": 4}),
    "cpu-only": (
        "generic",
        {"nodes": 4, "ntasks_per_node": 16, "cpus_per_task": 2, "mem": "120G", "time": "12:00:00"},
    ),
    "lab": ("lab", {"nodes": 8, "gpus_per_node": 4, "run": "runs/demo"}),
    "killarney": (
        "killarney",
        {"nodes": 8, "gpus_per_node": 4, "account": "aip-example", "run": "runs/pythia"},
    ),
    "one-gpu": ("killarney", {"gpus_per_node": 1, "account": "aip-example", "time": "0:20:00"}),
    "every-option": (
        "generic",
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
            "mem_per_gpu": "96G",
            "exclusive": True,
            "time": "1-12",
            "signal": "B:USR1@600",
            "requeue": False,
            "max_restarts": 3,
            "output": "logs/my jobs/%x-%j.out",
            "comment": "layers of two models (second try)",
            "mail_type": "END,FAIL",
            "mail_user": "someone@example.org",
            "run": "/scratch/it's mine/runs/pythia",
            "modules": ("cuda/12.4", "python/3.11"),
            "setup": ("ulimit -c 0", "source '/opt/site settings/env.sh'"),
            "env": (("HF_HUB_OFFLINE", "1"), ("GREETING", "it's $5 & more")),
        },
    ),
}
"""The cluster and the request of every example; its name is the job's and the file's."""


def rendered() -> dict[str, str]:
    """The text of every example by file name."""
    return {
        f"{name}.sbatch": render_script(
            ScriptSpec(job_name=name, python=PYTHON, **request), load_cluster(cluster)
        )
        for name, (cluster, request) in EXAMPLES.items()
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
