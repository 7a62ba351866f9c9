"""The manifests in docs/how-to/manifests; ``python -m tests.manifestexamples`` writes them."""

from __future__ import annotations

from pathlib import Path

from hpc_toolkit.engines.kubernetes import ManifestSpec, render_manifest

EXAMPLES = Path(__file__).parents[1] / "docs" / "how-to" / "manifests"
IMAGE = "registry.example.org/group/hpctk:1.2"
REQUESTS = {
    "queue.yaml": ManifestSpec(
        kind="kubernetes-queue",
        image=IMAGE,
        job_name="bench",
        nodes=4,
        gpus_per_node=2,
        cpus=16,
        mem="64G",
        pvc=("shared",),
        run="runs/bench",
    ),
    "ddp.yaml": ManifestSpec(
        kind="kubernetes-ddp",
        image=IMAGE,
        job_name="train",
        nodes=2,
        gpus_per_node=4,
        cpus=32,
        mem="200G",
        shm="16G",
        pvc=("shared", "corpus:/corpus"),
        run="runs/train",
        env_from_secret=("HF_TOKEN=hub:token",),
        command=("examples/train_ddp.py", "--lr", "1e-3"),
    ),
}


def rendered() -> dict[str, str]:
    """Return the text of every example, by name."""
    return {name: render_manifest(spec) for name, spec in REQUESTS.items()}


if __name__ == "__main__":
    EXAMPLES.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (EXAMPLES / name).write_text(text, encoding="ascii")
