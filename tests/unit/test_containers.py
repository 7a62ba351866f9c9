"""The command lines of the programs that run containers, whatever images and paths are called."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm import containers
from hpc_toolkit.slurm.clusters.facts import load_cluster, parse_cluster
from hpc_toolkit.slurm.containers import PROGRAMS, Container, gpu_of_type, node_gpu
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import read_spec
from tests.hostile import HOSTILE, ODD_BUT_FINE

TEXTS = tuple(dict.fromkeys((*HOSTILE, *ODD_BUT_FINE)))
GENERIC = load_cluster("generic")
SRUN = "srun() { printf '%s\\0' \"$@\"; }\n"


def words_of(script: str, cwd: Path) -> list[str]:
    """What a plain script gives srun, after its own options."""
    done = subprocess.run(
        ["bash", "-c", SRUN + script, "job"],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "SCRATCH": "/usr", "HF_HOME": "/nowhere", "TMPDIR": "/tmp"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]


def plain(runtime: str, **fields: Any) -> str:
    spec = read_spec({"plain": True, "command": ("prog", "word"), "cpus_per_gpu": None, **fields})
    return render_script(spec, replace(GENERIC, container_runtime=runtime), "command")


@pytest.mark.parametrize("runtime", PROGRAMS)
def test_a_hostile_image_or_path_is_one_word_or_refused(runtime: str, tmp_path: Path) -> None:
    program = PROGRAMS[runtime]
    # Each text for two or three of the programs.
    texts = TEXTS[list(PROGRAMS).index(runtime) % 3 :: 3]
    accepted = 0
    lengths = {
        field: len(words_of(plain(runtime, **{"container": "y", **one}), tmp_path))
        for field, one in (("container", {}), ("bind", {"bind": ("/x/y",)}))
    }
    for text in texts:
        for field, value in (("container", text), ("bind", (f"/x/{text}",))):
            try:
                script = plain(runtime, **{"container": "image", field: value})
            except HpcToolkitError:
                continue
            accepted += 1
            words = words_of(script, tmp_path)
            if field == "container":
                assert any(word.endswith(text) for word in words[1:]), (text, words)
            else:
                path = f"/x/{text}".replace(" ", program.space)
                source, _, target = path.partition(":")
                assert any(f"{source}:{target or source}" in word for word in words), (text, words)
            assert words[-2:] == ["prog", "word"]
            # As many words as for a harmless text.
            assert len(words) == lengths[field], (text, words)
    assert accepted > len(texts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("runtime", PROGRAMS)
def test_a_plain_script_shows_the_directories_that_exist_once(runtime: str, tmp_path: Path) -> None:
    words = words_of(plain(runtime, container="image", bind=("/opt:/mnt:ro",)), tmp_path)

    shown = " ".join(words)
    for directory, times in {str(tmp_path): 1, "/usr": 1, "/tmp": 1, "/nowhere": 0}.items():
        assert shown.count(f"{directory}:{directory}") == times, (directory, shown)
    assert "/opt:/mnt:" in shown


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
