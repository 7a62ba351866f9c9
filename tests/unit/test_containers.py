"""The command lines of the programs that run containers, whatever images and paths are called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm import containers
from hpc_toolkit.slurm.clusters.facts import parse_cluster
from hpc_toolkit.slurm.containers import PROGRAMS, Container, gpu_of_type, node_gpu
from tests.hostile import HOSTILE, ODD_BUT_FINE

TEXTS = tuple(dict.fromkeys((*HOSTILE, *ODD_BUT_FINE)))


@pytest.mark.parametrize("runtime", PROGRAMS)
def test_a_hostile_image_or_path_is_one_word(runtime: str) -> None:
    harmless = _words(runtime, image="image", binds=("/x/y",))
    for text in TEXTS:
        words = _words(runtime, image=text, binds=(f"/x/{text}",))

        assert len(words) == len(harmless), (text, words)
        assert any(word.endswith(text) for word in words), (text, words)
        source, _, rest = f"/x/{text}".partition(":")
        assert any(f"{source}:{rest.partition(':')[0] or source}" in word for word in words), text


def _words(runtime: str, **fields: Any) -> list[str]:
    container = Container(words=(runtime,), **fields)
    return [*container.srun_options(), *container.inside(["prog"])]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("apptainer", ("apptainer",)),
        ("/opt/x/singularity --cleanenv", ("/opt/x/singularity", "--cleanenv")),
        ("podman-hpc --log-level='a b'", ("podman-hpc", "--log-level=a b")),
        *((bad, None) for bad in ("docker", "", "apptainer; id", "$(id)", "-x", "a/b/c", 3)),
    ],
)
def test_a_cluster_names_a_known_program_with_arguments(value: Any, words: Any) -> None:
    text = f"container_runtime = {value if isinstance(value, int) else repr(value)}\n"
    if words is None:
        with pytest.raises(HpcToolkitError, match="container_runtime"):
            parse_cluster(text.replace("'", '"'), file="site.toml", name="site")
        return
    quoted = text if text.count("'") == 2 else f'container_runtime = "{value}"\n'
    cluster = parse_cluster(quoted, file="site.toml", name="site")

    assert containers.program_words(cluster.container_runtime, "x") == words


def test_the_maker_of_gpus_is_that_of_their_type_or_of_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {"mi250x": "amd", "MI300A": "amd", "gfx90a": "amd", "a100": "", "gpu": "", None: ""}
    assert {kind: gpu_of_type(kind) for kind in kinds} == kinds
    of_node = {}
    for devices in ((), ("/dev/nvidiactl",), ("/dev/kfd",), ("/dev/nvidiactl", "/dev/kfd")):
        monkeypatch.setattr(os.path, "exists", devices.__contains__)
        of_node[devices] = node_gpu()
    assert [*of_node.values()] == ["nvidia", "nvidia", "amd", "nvidia"]


def test_a_directory_is_shown_once_and_the_users_binds_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("job/run", "cache", "code"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "job")
    monkeypatch.setattr(containers, "_used", lambda: [str(tmp_path / "cache"), "/a,b"])
    container = Container(
        words=("apptainer",), image="i", gpu="amd", binds=("/data", f"/x:{tmp_path}/cache")
    )

    words = container.inside(["p"], str(tmp_path / "job/run"), str(tmp_path / "code"))

    assert words[4:7] == ["apptainer", "exec", "--rocm"]
    assert [one for one in words if one.startswith("--bind=")] == [
        *(f"--bind={tmp_path}/{one}:{tmp_path}/{one}" for one in ("job", "code")),
        *("--bind=/data:/data", f"--bind=/x:{tmp_path}/cache"),
    ]
    assert words[-3:] == [f"--pwd={tmp_path}/job", "i", "p"]
