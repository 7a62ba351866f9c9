"""'hpctk render kubernetes-...': what is asked is in the manifest, and servers take it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from hpc_toolkit.cli import render as render_command
from hpc_toolkit.cli.help import Commands
from hpc_toolkit.engines.kubernetes import (
    Kind,
    ManifestSpec,
    render_manifest,
)
from hpc_toolkit.errors import HpcToolkitError
from tests.manifestexamples import EXAMPLES, REQUESTS, rendered
from tests.manifestrules import check, read

if TYPE_CHECKING:
    pass

IMAGE = "reg.io/a/b:1"
NEEDED: dict[Kind, dict[str, Any]] = {
    "kubernetes-queue": {"pvc": ("shared",), "run": "runs/x"},
    "kubernetes-ddp": {"command": ("train.py",)},
    "kubernetes-scaling": {},
}


def spec(kind: Kind = "kubernetes-ddp", **given: Any) -> ManifestSpec:
    return ManifestSpec(**{"kind": kind, "image": IMAGE, **NEEDED[kind], **given})


def call(*arguments: str) -> Result:
    app = Commands(help="")
    render_command.register(app)
    return CliRunner().invoke(app, ["render", *arguments])


@pytest.mark.parametrize("name", REQUESTS)
def test_examples_are_taken_by_all_versions_and_fit_together(name: str) -> None:
    check(read((EXAMPLES / name).read_text(encoding="ascii")))


def test_committed_examples_are_what_is_rendered() -> None:
    committed = {path.name: path.read_text(encoding="ascii") for path in EXAMPLES.iterdir()}

    assert committed == rendered(), "python -m tests.manifestexamples writes them anew"


LONG = f"{'a' * 60}.{'b' * 60}/c"
OPTIONS: list[tuple[Kind, dict[str, Any], str]] = [
    ("kubernetes-ddp", {"cpus": 32, "gpus_per_node": 4}, 'OMP_NUM_THREADS\n          value: "8"'),
    ("kubernetes-ddp", {"cpus": 2, "gpus_per_node": 4}, 'OMP_NUM_THREADS\n          value: "1"'),
    ("kubernetes-queue", {"cpus": 16, "workers": 5}, 'OMP_NUM_THREADS\n          value: "3"'),
    ("kubernetes-ddp", {"mem": "1536M", "shm": "1G"}, 'memory: "1536Mi"'),
    ("kubernetes-ddp", {"shm": "16G"}, 'sizeLimit: "16Gi"'),
    ("kubernetes-ddp", {"gpus_per_node": 1, "gpu_resource": "amd.com/gpu"}, 'amd.com/gpu: "1"'),
    ("kubernetes-ddp", {"user": "7:8"}, "runAsUser: 7\n        runAsGroup: 8\n"),
    ("kubernetes-ddp", {"user": "7"}, "runAsUser: 7\n        runAsGroup: 7\n"),
    ("kubernetes-ddp", {"pvc": ("p", "q:/big")}, "name: data-2\n          mountPath: /big\n"),
    ("kubernetes-ddp", {"pvc": ("p", "q:/big"), "run": "/big/t"}, "- /big/t\n"),
    ("kubernetes-ddp", {"env_from_secret": ("A=s:k",)}, "secretKeyRef:\n              name: s"),
    # A key of this length needs a question mark.
    ("kubernetes-ddp", {"node_selector": (f"{LONG}=d",)}, f"        ? {LONG}\n        : d\n"),
    ("kubernetes-ddp", {"time": "1-0"}, "activeDeadlineSeconds: 86400"),
    ("kubernetes-queue", {"shm": "1G"}, 'sizeLimit: "1Gi"'),
    ("kubernetes-queue", {"workers": 5}, '"--workers"\n        - "5"'),
    ("kubernetes-queue", {"max_restarts": 4}, "backoffLimitPerIndex: 4"),
    ("kubernetes-queue", {"gpus_per_node": 4}, '"--workers"\n        - "4"'),
    ("kubernetes-scaling", {"node_counts": (1, 8), "gpus_per_node": 2}, '"2,16"'),
    ("kubernetes-scaling", {"node_counts": (1, 8)}, "completions: 8\n"),
    ("kubernetes-scaling", {"pvc": ("p",), "run": "s"}, '"-o"\n        - /data/s\n'),
]


@pytest.mark.parametrize(("kind", "given", "expected"), OPTIONS)
def test_an_option_has_its_effect_and_no_server_refuses_it(
    kind: Kind, given: dict[str, Any], expected: str
) -> None:
    without = render_manifest(spec(kind))

    text = render_manifest(spec(kind, **given))

    assert expected in text
    assert expected not in without
    check(read(text), ("1.37",))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": "A b"}, "--image"),
    ({"job_name": "a_b"}, "--job-name"),
    ({"job_name": "x" * 62}, "--job-name"),
    ({"job_name": "x" * 61, "nodes": 11}, "has more than 60 characters"),
    ({"namespace": "a.b"}, "--namespace"),
    ({"nodes": 0}, "--nodes"),
    ({"gpus_per_node": -1}, "--gpus-per-node"),
    ({"mem": "lots"}, "--mem"),
    ({"mem": "2G"}, "2048 MiB are not less than"),
    ({"pvc": ("p:data",)}, "--pvc"),
    ({"pvc": ("p:/",)}, "--pvc"),
    ({"pvc": ("p://x",)}, "--pvc"),
    ({"pvc": ("p:/dev/shm",)}, "--pvc"),
    ({"pvc": ("p:/a/../dev",)}, "--pvc"),
    ({"run": "x"}, "no volume is given"),
    ({"pvc": ("p",), "run": "../x"}, "is not below /data"),
    ({"pvc": ("p",), "run": "/elsewhere/x"}, "is not below /data"),
    ({"pvc": ("p",), "run": "/data"}, "is not below /data"),
    ({"pvc": ("p:/a", "p:/b")}, "'p' is given twice"),
    ({"pvc": ("p:/a", "q:/a/")}, "'/a' is given twice"),
    ({"pvc": ("p:/a:ro",)}, "--pvc"),
    ({"user": "0"}, "--user"),
    ({"env": (("MASTER_ADDR", "x"),)}, "--env"),
    ({"env": (("A B", "x"),)}, "--env"),
    ({"env": (("A", "x\ny"),)}, "--env A"),
    ({"env": (("A", "x"),), "env_from_secret": ("A=s:k",)}, "given twice"),
    ({"env": (("HF_TOKEN", "x"),)}, "looks like a secret"),
    ({"env_from_secret": ("A",)}, "--env-from-secret"),
    ({"env_from_secret": ("A=S:k",)}, "--env-from-secret"),
    ({"node_selector": ("a",)}, "--node-selector"),
    ({"node_selector": ("a=b", "a=c")}, "given twice"),
    ({"toleration": ("a:Never",)}, "--toleration"),
    ({"image_pull_secret": ("A",)}, "--image-pull-secret"),
    ({"image_pull_secret": ("a." * 126 + "aa",)}, "--image-pull-secret"),
    ({"node_selector": ("a." * 126 + "aa/b=c",)}, "--node-selector"),
    ({"node_selector": ("a/" + "b" * 64 + "=c",)}, "--node-selector"),
    ({"time": "90"}, "--time"),
    ({"max_restarts": 3}, "not used by"),
    ({"command": ()}, "needs a training script"),
    ({"command": ("--lr",)}, "is not a training script"),
    ({"command": ("train.py", "a\nb")}, "the script's arguments"),
    ({"command": ("x" * 32000,) * 5}, "too long"),
    ({"workers": 2}, "not used by"),
    ({"node_counts": (1, 2)}, "not used by"),
    ({"kind": "kubernetes-x"}, "unknown manifest"),
    ({"kind": "kubernetes-queue", "command": ("x",)}, "not used by"),
    ({"kind": "kubernetes-queue", "command": ()}, "no volume is given"),
    ({"kind": "kubernetes-queue", "command": (), "pvc": ("p",)}, "needs a run"),
    ({"kind": "kubernetes-scaling", "nodes": 2}, "not used by"),
    ({"kind": "kubernetes-scaling", "node_counts": (2, 2)}, "given twice"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_a_value_that_no_cluster_takes_is_refused_with_what_to_write(
    given: dict[str, Any], message: str
) -> None:
    values = {"kind": "kubernetes-ddp", "image": IMAGE, "command": ("train.py",), **given}

    with pytest.raises(HpcToolkitError) as caught:
        ManifestSpec(**values)

    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", REQUESTS)
def test_the_first_lines_say_how_to_render_it_again(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="ascii")
    argv = shlex.split(text.splitlines()[2].removeprefix("#"))
    end = argv.index("--") if "--" in argv else len(argv)

    result = call(*argv[2:end], "-o", "-", *argv[end:])

    assert result.stdout == text


# --- what there is already ---
