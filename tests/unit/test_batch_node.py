"""What a node says of itself before ranks start, and the copies of files on its disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_toolkit.slurm.batch import node as preflight
from hpc_toolkit.slurm.batch.node import StagingError, check_node, stage_paths, usable_gpus
from tests.toyrun import ToyRun


def driver(*gpus: dict[str, Any]) -> dict[str, Any]:
    """What NVIDIA's driver tells of a node."""
    return {"driver": "550.54", "cuda": 12040, "gpus": list(gpus)}


def visible(devices: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": devices}


GPU, LOST = {"name": "L40S", "total": 1, "free": 1}, {"error": "GPU is lost"}


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ask_driver", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HPCTK_HOST", "n3")


@pytest.mark.parametrize(
    ("environ", "told", "expected"),
    [
        *(({}, None, 0), ({}, driver(GPU, GPU), 2), (visible("0,1,2,3"), None, 4)),
        *((visible(""), None, 0), (visible("NoDevFiles"), None, 0)),
        *((visible("-1"), driver(GPU, GPU), 0), (visible("0,-1,1"), None, 1)),
        *((visible("GPU-8932,GPU-1c0f,"), None, 2), ({"ROCR_VISIBLE_DEVICES": "0,1"}, None, 2)),
        (visible("2"), driver(GPU, GPU, GPU, GPU), 1),
        *((visible("0,1"), driver(GPU, LOST), 1), (visible("0,1"), {"error": "reason 9"}, 0)),
        # NVML counts cards, of which each may be divided into several devices.
        *((visible("MIG-1,MIG-2"), driver(GPU), 2), (visible("GPU-8a,GPU-1c"), driver(GPU), 1)),
    ],
)
def test_gpus_count_that_are_granted_and_answer(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], told: Any, expected: int
) -> None:
    monkeypatch.setattr(preflight, "ask_driver", lambda: told)

    assert usable_gpus(environ) == expected


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ({"f_bavail": 10}, "only 40.0 KiB are free for "),
        ({"f_favail": 7}, "room for 7 more files below "),
    ],
)
def test_a_full_filesystem_is_said(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, space: dict[str, int], problem: str
) -> None:
    plenty = {"f_bavail": 10**9, "f_frsize": 4096, "f_files": 10**6, "f_favail": 10**6}
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(**{**plenty, **space}))

    is_fit, line = check_node(toy.root, gpus=0, free_bytes=2**20)

    assert (is_fit, problem in line) == (False, True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory as models come: links to files that lie elsewhere."""
    blobs, root = tmp_path / "blobs", tmp_path / "it's a corpus"
    (root / "deep").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "weights").write_bytes(b"w" * 1000)
    (root / "weights").symlink_to("../blobs/weights")
    (root / "deep" / "tokens").write_text("tokens")
    (root / "deep").chmod(0o555)
    return root


def place(tmp_path: Path, restart: int = 0) -> Path:
    return tmp_path / f"hpctk-17.{restart}" / "n1"


def test_copies_hold_what_links_name_and_tell_their_users(source: Path, tmp_path: Path) -> None:
    target = place(tmp_path)

    told = stage_paths([source, source / "deep/tokens"], target, users=2)

    assert told.startswith("staged it's a corpus, tokens: 1012 B in ")
    assert (target / source.name / "weights").read_bytes() == b"w" * 1000
    assert not (target / source.name / "weights").is_symlink()
    assert (target / "tokens").read_text() == "tokens"
    assert sorted(path.name for path in (target / ".users").iterdir()) == ["0", "1"]
    # They can be removed whatever rights the source has.
    for path in (target, target / source.name / "deep"):
        assert path.stat().st_mode & 0o777 == 0o700


def test_what_an_earlier_start_left_is_removed_and_another_jobs_is_not(
    source: Path, tmp_path: Path
) -> None:
    stage_paths([source], place(tmp_path, 0), users=1)
    stage_paths([source], place(tmp_path, 1), users=1)
    other = tmp_path / "hpctk-18.0" / "n1"
    stage_paths([source], other, users=1)

    stage_paths([source], place(tmp_path, 2), users=1)

    assert not place(tmp_path, 0).parent.exists()
    assert not place(tmp_path, 1).parent.exists()
    assert other.exists()


def test_a_disk_without_the_room_is_told_and_left_as_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("hpc_toolkit.slurm.batch.node.shutil.disk_usage", lambda _: usage)

    with pytest.raises(StagingError, match=r"1006 B do not fit into 1000 B at .*n1"):
        stage_paths([source], place(tmp_path), users=1)

    assert not place(tmp_path).exists()


ODD = "it is neither a file nor"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        *((kind, "") for kind in ("missing", "nowhere", ".")),
        *((kind, ODD) for kind in ("pipe", "device", "/dev/null")),
    ],
)
def test_what_cannot_be_copied_is_refused_before_anything_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    path = Path("/dev/null") if kind == "device" else source / "odd"  # /dev/zero has no end
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("nowhere", ".", "/dev/null"):
        path.symlink_to(kind)
    monkeypatch.setattr(
        "hpc_toolkit.slurm.batch.node.shutil.copyfile", lambda *_: pytest.fail("copied")
    )
    given = path if kind in ("missing", "device") else source

    with pytest.raises(StagingError, match=rf"cannot stage .*(odd|null).*{why}"):
        stage_paths([source / "weights", given], place(tmp_path), users=1)

    assert not place(tmp_path).parent.exists()


def test_a_directory_of_somebody_else_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path).parent.mkdir()
    monkeypatch.setattr("hpc_toolkit.slurm.batch.node.os.geteuid", lambda: 4711)

    with pytest.raises(StagingError, match=r"hpctk-17.0 belongs to another user"):
        stage_paths([source], place(tmp_path), users=1)
