"""What a node says of itself before ranks start."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.slurm.batch import node as preflight
from hpc_toolkit.slurm.batch.node import check_node, usable_gpus

if TYPE_CHECKING:
    from tests.toyrun import ToyRun


def driver(*gpus: dict[str, Any]) -> dict[str, Any]:
    """What NVIDIA's driver tells of a node."""
    return {"driver": "550.54", "cuda": 12040, "gpus": list(gpus)}


GPU, LOST = {"name": "L40S", "total": 1, "free": 1}, {"error": "GPU is lost"}


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ask_driver", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HPCTK_HOST", "n3")


@pytest.mark.parametrize(
    ("environ", "told", "expected"),
    [
        ({}, None, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None, 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, None, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, driver(GPU, GPU), 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, None, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932,GPU-1c0f,"}, None, 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, None, 2),
        ({}, driver(GPU, GPU), 2),
        ({"CUDA_VISIBLE_DEVICES": "2"}, driver(GPU, GPU, GPU, GPU), 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, driver(GPU, LOST), 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"error": "reason 9"}, 0),
        # NVML counts cards, of which each may be divided into several devices.
        ({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, driver(GPU), 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8a,GPU-1c"}, driver(GPU), 1),
    ],
)
def test_gpus_count_that_are_granted_and_answer(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], told: Any, expected: int
) -> None:
    monkeypatch.setattr(preflight, "ask_driver", lambda: told)

    assert usable_gpus(environ) == expected


def test_a_fit_node_says_what_it_has(toy: ToyRun) -> None:
    before = sorted(toy.root.rglob("*"))

    report = check_node(toy.root, gpus=0, free_bytes=1)

    assert report.problems == ()
    assert report.line().startswith("n3: ready: hpctk ")
    assert sorted(toy.root.rglob("*")) == before


def test_a_node_without_its_gpus_says_how_many_there_are(toy: ToyRun) -> None:
    report = check_node(toy.root, gpus=2, free_bytes=1)

    assert report.line() == "n3: only 0 of 2 GPUs are there"


def test_a_run_that_a_node_does_not_see_is_said(toy: ToyRun) -> None:
    report = check_node(toy.root / "other", gpus=0, free_bytes=1)

    assert "is not a run" in report.line()


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

    report = check_node(toy.root, gpus=0, free_bytes=2**20)

    assert problem in report.line()


def test_a_filesystem_that_counts_no_files_is_not_full(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"f_bavail": 10**9, "f_frsize": 4096, "f_files": 0, "f_favail": 0}
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(**counts))

    assert check_node(toy.root, gpus=0, free_bytes=1).problems == ()


def test_a_run_that_cannot_be_written_to_is_said(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_options: Any) -> None:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)

    report = check_node(toy.root, gpus=0, free_bytes=1)

    assert f"cannot write to {toy.root}/workers: Read-only file system" in report.line()
