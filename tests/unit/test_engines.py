"""Manifests of 'hpctk render kubernetes-...', which servers take, and ranks as Ray actors."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.engines.kubernetes import KINDS, ONLY_OF, Kind, ManifestSpec, render_manifest
from hpc_toolkit.engines.raydriver import RaySettings
from hpc_toolkit.engines.rayrank import Order, check_room, room
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.slurm.render.file import origin
from tests.hostile import HOSTILE
from tests.manifestexamples import EXAMPLES, rendered_again
from tests.manifestrules import check, expanded, objects_of, read

IMAGE = "reg.io/a/b:1"
NEEDED: dict[Kind, dict[str, Any]] = {
    "kubernetes-queue": {"pvc": ("shared",), "run": "runs/x"},
    "kubernetes-ddp": {"command": ("train.py",)},
}


def spec(kind: Kind = "kubernetes-ddp", **given: Any) -> ManifestSpec:
    return ManifestSpec(**{"kind": kind, "image": IMAGE, **NEEDED[kind], **given})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_committed_examples_are_what_is_rendered_and_taken_by_all_versions(path: Path) -> None:
    text = path.read_text(encoding="ascii")
    check(read(text))

    assert rendered_again(path) == text, "python -m tests.manifestexamples writes them anew"
    assert [one.stem for one in EXAMPLES] == [kind.rpartition("-")[2] for kind in sorted(KINDS)]


LONG = f"{'a' * 60}.{'b' * 60}/c"
OPTIONS: list[tuple[Kind, dict[str, Any], str]] = [
    ("kubernetes-ddp", {"cpus": 2, "gpus_per_node": 4}, 'OMP_NUM_THREADS\n          value: "1"'),
    ("kubernetes-queue", {"cpus": 16, "workers": 5}, 'OMP_NUM_THREADS\n          value: "3"'),
    ("kubernetes-ddp", {"mem": "1536M", "shm": "1G"}, 'memory: "1536Mi"'),
    ("kubernetes-ddp", {"gpus_per_node": 1, "gpu_resource": "amd.com/gpu"}, 'amd.com/gpu: "1"'),
    ("kubernetes-ddp", {"user": "7:8"}, "runAsUser: 7\n        runAsGroup: 8\n"),
    ("kubernetes-ddp", {"user": "7"}, "runAsUser: 7\n        runAsGroup: 7\n"),
    ("kubernetes-ddp", {"pvc": ("p", "q:/big"), "run": "/big/t"}, "- /big/t\n"),
    # A key of this length needs a question mark.
    ("kubernetes-ddp", {"node_selector": (f"{LONG}=d",)}, f"        ? {LONG}\n        : d\n"),
    ("kubernetes-ddp", {"time": "1-0"}, "activeDeadlineSeconds: 86400"),
    ("kubernetes-queue", {"shm": "1G"}, 'sizeLimit: "1Gi"'),
    ("kubernetes-queue", {"workers": 5}, '"--workers"\n        - "5"'),
    ("kubernetes-queue", {"max_restarts": 4}, "backoffLimitPerIndex: 4"),
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
    *(({"job_name": one}, "--job-name") for one in ("a_b", "x" * 62)),
    ({"job_name": "x" * 61, "nodes": 11}, "has more than 60 characters"),
    *(({"namespace": "a.b"}, "--namespace"), ({"nodes": 0}, "--nodes"), ({"mem": "lots"}, "--mem")),
    ({"gpus_per_node": -1}, "--gpus-per-node"),
    ({"mem": "2G"}, "2048 MiB are not less than"),
    *(
        ({"pvc": (f"p:{path}",)}, "--pvc")
        for path in ("data", "/", "//x", "/dev/shm", "/a/../dev", "/a:ro")
    ),
    *(({"run": "x"}, "no volume is given"), ({"user": "0"}, "--user"), ({"time": "90"}, "--time")),
    *(
        ({"pvc": ("p",), "run": run}, "not below /data")
        for run in ("../x", "/elsewhere/x", "/data")
    ),
    ({"pvc": ("p:/a", "p:/b")}, "'p' is given twice"),
    ({"pvc": ("p:/a", "q:/a/")}, "'/a' is given twice"),
    *(({"env": ((name, "x"),)}, "--env") for name in ("MASTER_ADDR", "A B")),
    ({"env": (("A", "x\ny"),)}, "--env A"),
    ({"env": (("A", "x"),), "env_from_secret": ("A=s:k",)}, "given twice"),
    ({"env": (("HF_TOKEN", "x"),)}, "looks like a secret"),
    *(({"env_from_secret": (one,)}, "--env-from-secret") for one in ("A", "A=S:k")),
    *(
        ({"node_selector": (one,)}, "--node-selector")
        for one in ("a", "a." * 126 + "aa/b=c", "a/" + "b" * 64 + "=c")
    ),
    ({"node_selector": ("a=b", "a=c")}, "given twice"),
    ({"toleration": ("a:Never",)}, "--toleration"),
    *(({"image_pull_secret": (one,)}, "--image-pull-secret") for one in ("A", "a." * 126 + "aa")),
    *(({"max_restarts": 3}, "not used by"), ({"workers": 2}, "not used by")),
    ({"command": ()}, "needs a training script"),
    ({"command": ("--lr",)}, "is not a training script"),
    ({"command": ("train.py", "a\nb")}, "the script's arguments"),
    ({"command": ("x" * 32000,) * 5}, "too long"),
    ({"kind": "kubernetes-x"}, "unknown manifest"),
    ({"kind": "kubernetes-queue", "command": ("x",)}, "not used by"),
    ({"kind": "kubernetes-queue", "command": ()}, "no volume is given"),
    ({"kind": "kubernetes-queue", "command": (), "pvc": ("p",)}, "needs a run"),
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


def fields_of(kind: str) -> list[str]:
    return [field.name for field in fields(ManifestSpec) if re.fullmatch(kind, str(field.type))]


def kind_of(field: str) -> Kind:
    return ONLY_OF.get(field, ("kubernetes-ddp",))[0]


def request_of(kind: Kind, **asked: Any) -> ManifestSpec:
    return spec(kind, **{"pvc": ("shared",), **asked})


def read_as_meant(request: ManifestSpec, *versions: str) -> None:
    text = render_manifest(request)

    objects = read(text)
    check(objects, versions)
    assert text.isascii()
    assert origin(text) == "rendered"
    for one in objects:
        if one["kind"] == "Job":
            gets_what_was_asked(request, one["spec"]["template"]["spec"])


def gets_what_was_asked(request: ManifestSpec, pod: dict[str, Any]) -> None:
    """What a pod gets, and its program's words and variables, are those of the request."""
    (container,) = pod["containers"]
    assert container["image"] == request.image
    assert [f"{key}={value}" for key, value in pod.get("nodeSelector", {}).items()] == list(
        request.node_selector
    )
    assert list(map(taint, pod.get("tolerations", []))) == list(request.toleration)
    secrets = [one["name"] for one in pod.get("imagePullSecrets", [])]
    assert secrets == list(request.image_pull_secret)
    volumes = zip(pod.get("volumes", []), container.get("volumeMounts", []), strict=True)
    claims = [
        (volume["persistentVolumeClaim"]["claimName"], mount["mountPath"])
        for volume, mount in volumes
        if volume["name"] != "shm"
    ]
    assert claims == request.volumes
    variables: dict[str, str] = {}
    for one in container["env"]:
        # A later value may name an earlier variable.
        variables[one["name"]] = expanded(one.get("value", "?"), variables)
    assert dict(request.env).items() <= variables.items()
    words = [expanded(word, variables) for word in container["args"]]
    if request.command:
        assert words[-len(request.command) :] == list(request.command)
    if request.directory is not None:
        assert request.directory in words


def taint(toleration: dict[str, str]) -> str:
    """A toleration as the option of hpctk writes it."""
    assert toleration["operator"] == ("Equal" if "value" in toleration else "Exists")
    marks = {"key": "", "value": "=", "effect": ":"}
    return "".join(mark + toleration[key] for key, mark in marks.items() if key in toleration)


# What YAML, and Kubernetes where it expands variables, take for something else than text.
ODD = (
    *("y", "No", "1e3", "0o17", "0x1f", "1_000", "~", "null", ".inf", "1:30", "=", "a: b", "- a"),
    *("$(A)", "$$(A)", "$", "$$", "---", "...", "#x", "%x", "&a", "*a", "+.5E1", "x_0:"),
)


@pytest.mark.parametrize("field", fields_of(r"str( \| None)?"))
def test_a_hostile_text_is_refused_or_stays_one_value(field: str) -> None:
    kind = kind_of(field)
    fine = {"time": "1:00:00", "user": "7", "gpu_resource": "a.b/c", "mem": "64G", "shm": "1G"}
    fields_and_values = count(objects_of(request_of(kind, **{field: fine.get(field, "x")})))
    for text in (*HOSTILE, *ODD):
        if (error := refusal(kind, **{field: text})) is not None:
            assert error.hint, text
            continue
        request = request_of(kind, **{field: text})
        read_as_meant(request, *(["1.37"] if text in ODD else []))
        assert count(objects_of(request)) == fields_and_values


def count(data: Any) -> int:
    """How many keys and values there are."""
    if isinstance(data, dict):
        return sum(1 + count(value) for value in data.values())
    return sum(map(count, data)) if isinstance(data, list) else 1


@pytest.mark.parametrize("field", fields_of(r"tuple\[str.*"))
def test_a_hostile_part_of_a_list_is_refused_or_stays_one_value(field: str) -> None:
    first = ("train.py",) if field == "command" else ()
    for text in (*HOSTILE, *ODD):
        accepted = first
        for value in (text, f"a={text}", f"{text}=a", f"A={text}:k", f"A=s:{text}", f"p:/{text}"):
            if refusal(kind_of(field), **{field: (*first, value)}) is None:
                accepted = (*accepted, value)
            if field != "command" and accepted:
                read_as_meant(request_of(kind_of(field), **{field: accepted[-1:]}))
        if field == "command":
            read_as_meant(request_of(kind_of(field), command=accepted), "1.37")


def refusal(kind: Kind, **asked: Any) -> HpcToolkitError | None:
    """The error that a request meets, which says what to do."""
    try:
        request_of(kind, **asked)
    except HpcToolkitError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cpus_per_worker": -1.0}, "--cpus-per-worker: -1 is not a valid amount"),
        ({"gpus_per_worker": float("nan")}, "--gpus-per-worker: nan is not a valid amount"),
        ({"gpus_per_worker": 1.5}, "whole GPUs or a fraction of one, not 1.5"),
        *(
            ({"address": one}, "HOST:PORT, not")
            for one in ("n1", ":6379", "n1:0", "n1:99999", "ray://n1:10001", "n1:x")
        ),
        ({}, "RAY_ADDRESS is not set"),
    ],
)
def test_settings_that_ray_cannot_give_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings(**values).resolve({})
    assert RaySettings().resolve({"RAY_ADDRESS": "n1:6379"}) == "n1:6379"


def test_room_counts_workers_on_nodes_and_those_without_room_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 3.0}]

    assert room(nodes, {"CPU": 2.0}) == 2
    assert room(nodes, {"CPU": 1.0, "GPU": 0.5}) == 2
    assert room(nodes, {"GPU": 2.0}) == 0
    assert room([{"GPU": 2.0}], {"GPU": 0.6}) == 2  # Ray takes a part of one GPU, never of two
    assert room(nodes, {"CPU": 0.0}) > 1000
    check_room(nodes, {"CPU": 2.0}, 3)
    with pytest.raises(ConfigError, match="no node of the Ray cluster has 1 GPU"):
        check_room(nodes[1:], {"CPU": 0.0, "GPU": 1.0}, 3)
    assert "room for 2 of 3 workers (2 CPU each)" in capsys.readouterr().err


def test_a_ranks_place_is_its_own_and_not_that_of_the_task_that_started_ray() -> None:
    node_environ = {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURMD_NODENAME": "n2",
        "CUDA_VISIBLE_DEVICES": "1",
    }

    def order(**values: Any) -> Order:
        standard = {"cwd": "/", "rank": 3, "world_size": 8, "gpus": 0, "options": {}}
        return Order(root="/run", **{"memory_bytes": 0, **standard, **values})

    found = order(gpus=1.0).environment(node_environ)

    assert found == {
        "SLURM_JOB_ID": "17",
        "SLURMD_NODENAME": "n2",
        "CUDA_VISIBLE_DEVICES": "1",
        "RANK": "3",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "8",
    }
    # Ray leaves the GPUs of its node visible to an actor without any.
    assert order().environment(node_environ)["CUDA_VISIBLE_DEVICES"] == ""
    assert "1048576" in order(memory_bytes=2**20).environment({}).values()
