"""Trainings measured on real ranks of this machine. What they take says nothing here; that they
are measured, resumed and compared does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

SMALL = ("--model", "decoder-1x32", "--seq-length", "16", "--max-steps", "3", "--warmup", "1")


def own_environ() -> dict[str, str]:
    """These variables, without what speaks of another launch."""
    hidden = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_RANK", "HPCTK", "PET_")
    return {key: value for key, value in os.environ.items() if not key.startswith(hidden)}


def hpctk(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hpc_toolkit", "scaling", *words],
        env=own_environ(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two world sizes, two values and two repeats."""
    directory = tmp_path_factory.mktemp("scaling") / "run"
    words = ("--world-sizes", "1,2", "--vary", "accumulate=1,2", "--repeats", "2")

    done = hpctk("run", "-o", str(directory), *SMALL, *words)

    assert "## accumulate=2" in done.stdout
    assert f"hpctk scaling analyze {os.path.relpath(directory)}" in done.stderr
    return directory


def records(directory: Path, world_size: int) -> list[dict[str, Any]]:
    path = directory / "records" / f"world-{world_size}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_world_size_value_and_repeat_is_measured_once(measured: Path) -> None:
    for size in (1, 2):
        found = records(measured, size)
        assert [(one["variation"]["accumulate"], one["repeat"]) for one in found] == [
            (1, 0),
            (1, 1),
            (2, 0),
            (2, 1),
        ]
        assert {one["world_size"] for one in found} == {size}
        assert {one["batch_per_rank"] for one in found} == {8 // size}
        assert {one["machine"]["threads"] for one in found} == {
            max(1, len(os.sched_getaffinity(0)) // 2)
        }


def test_numbers_of_a_record_fit_each_other(measured: Path) -> None:
    for one in [*records(measured, 1), *records(measured, 2)]:
        samples = 8 * one["settings"]["accumulate"]
        assert one["samples_per_s"] == pytest.approx(samples / one["step_s"]["mean"])
        assert one["tokens_per_s"] == pytest.approx(16 * one["samples_per_s"])
        assert one["step_s"]["median"] <= one["step_s"]["p90"]
        assert 0 < one["shares"]["loading"] < 1
        assert one["memory"]["rss"] > 2**26
        # A machine that is in no job is no cluster's.
        assert "cluster" not in one["machine"]
        exchange = one["communication"]
        if one["world_size"] == 1:
            assert exchange == {}
        else:
            assert exchange["gradient_bytes"] == 4 * one["trained_parameters"]
            assert exchange["all_reduce_s"] > 0
            share = exchange["exposed_s"] / one["step_s"]["median"]
            assert exchange["share"] == pytest.approx(min(max(share, 0.0), 1.0))
            # Of two ranks, each sends and receives every byte once.
            expected = exchange["gradient_bytes"] / exchange["bus_bytes_per_s"]
            assert exchange["expected_s"] == pytest.approx(expected)


@pytest.mark.soak  # test_scaling_own.py resumes a run, and test_train_ddp.py is told to leave
def test_a_run_that_is_told_to_leave_keeps_what_it_has_and_a_resumed_one_adds_the_rest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run" / "records" / "world-1.jsonl"
    words = ("run", "-o", str(tmp_path / "run"), *SMALL, "--world-sizes", "1")
    with subprocess.Popen(
        [sys.executable, "-m", "hpc_toolkit", "scaling", *words, "--repeats", "100000"],
        env=own_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as running:
        while not path.exists() or not path.read_bytes():
            assert running.poll() is None, running.communicate()[1]
            time.sleep(0.05)
        running.send_signal(signal.SIGUSR1)
        assert running.wait() == 75, running.communicate()[1]
    before = records(tmp_path / "run", 1)

    hpctk(*words, "--repeats", str(len(before) + 1), "--resume")

    after = records(tmp_path / "run", 1)
    assert after[:-1] == before
    assert [one["repeat"] for one in after] == list(range(len(after)))
    assert len(after) == len(before) + 1


def test_the_page_of_a_run_compares_each_value(measured: Path) -> None:
    found = json.loads(hpctk("analyze", str(measured), "--json").stdout)["series"]

    assert [one["name"] for one in found] == ["accumulate=1", "accumulate=2"]
    for one in found:
        assert [row["world_size"] for row in one["rows"]] == [1, 2]
        assert one["rows"][1]["all_reduce_s"] > 0
