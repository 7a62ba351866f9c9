"""``hpctk scaling``: pages, files, exit codes, and what is refused before a rank starts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.training.scaling.launches import job_request
from tests.scripttext import batch_program
from tests.unit import jobcommands
from tests.unit.test_scaling_records import record

scaling = partial(jobcommands.call, "scaling")


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "v100.jsonl"
    rates = {1: 100 / 480, 2: 100 / 245, 4: 100 / 128, 8: 100 / 68}
    named = {**record(1, 1.0)["settings"], "model": "a\n# b \033[2J", "seq": 1}
    found = [record(size, rate, settings=named) for size, rate in rates.items()]
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return str(path)


def test_a_page_has_the_numbers_and_the_advice(table: str) -> None:
    found = scaling("analyze", table, "--samples", "100", "--price-per-gpu-hour", "3.06")

    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert "## a # b \\x1b[2J" in lines  # a name does nothing to a terminal
    (row,) = (line for line in lines if line.startswith("| 8 | 1.471 |"))
    assert "| 1 min 08 s | 7.06 | 88.2% | 0.1511 | +13.3% | 0.4624 | 4.624 |" in row
    assert "**Use 8** (fair on 8: 88.2% efficiency, at least 85% wanted)" in lines


@pytest.mark.parametrize(("wanted", "code"), [("0.88", 0), ("0.89", 1)])
def test_the_exit_code_says_whether_an_efficiency_is_below(
    table: str, wanted: str, code: int
) -> None:
    assert scaling("analyze", table, "--min-efficiency", wanted).exit_code == code
    assert scaling("analyze", table).exit_code == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("run", "-o", "d", "--time", "10", "x.py"), "--time is for jobs"),
        (("run", "-o", "d", "--force", "x.py"), "--force is for jobs"),
        (("run", "-o", "d", "--cluster", "nowhere", "x.py"), "nowhere"),
        (("run", "-o", "TABLE/d", "x.py"), "/d: cannot be written to: Not a directory"),
        (
            ("run", "-o", "d", "--slurm", "--price-per-gpu-hour", "3", "x.py"),
            "--price-per-gpu-hour is for a table, which jobs have",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    table: str, words: tuple[str, ...], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    found = scaling(*(word.replace("TABLE", table) for word in words))

    assert isinstance(found.exception, ConfigError | RunError | HpcToolkitError)
    assert match in str(found.exception)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("run", "-o", "d", "--backend", "mpi"), "one of nccl, gloo"),
        (("run", "-o", "d", "--ranks-per-node", "0"), "a number from 1 on"),
        (("analyze", "x.log", "--price-per-gpu-hour", "nan"), "a number from 0 on"),
        (("analyze", "x.log", "--min-efficiency", "inf"), "a number from 0 on"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_a_usage_error(
    words: tuple[str, ...], wanted: str
) -> None:
    found = scaling(*words)

    assert found.exit_code == 2
    assert f"Invalid value for '{words[-2]}': '{words[-1]}' is not {wanted}" in found.output


def test_a_training_is_a_job_for_each_world_size_and_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "d/records").mkdir(parents=True)
    known = record(2, 1.0, 1, settings={"arguments": "--lr 1"})
    (tmp_path / "d/records/world-2-repeat-1.jsonl").write_text(json.dumps(known))
    words = ("--world-sizes", "1,2", "--repeats", "2", "--gpus-per-node", "2", "--cluster", "lab")
    own = ("--env", "A=b", "--dry-run", "--", "train.py", "--lr", "1")

    found = scaling("run", "-o", "d", "--resume", "--slurm", *words, *own)

    assert found.exit_code == 0, found.exception
    lines = found.stdout.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH --job-name")] == [
        f"#SBATCH --job-name=scaling-repeat-{name}" for name in ("0-1", "0-2", "1-1")
    ]
    scripts = found.stdout.split("#!/bin/bash")[1:]
    assert [batch_program(one)[-3:] for one in scripts] == [["train.py", "--lr", "1"]] * 3
    for name, value in (
        ("HPCTK_SCALING_RECORDS", tmp_path / "d/records/world-2-repeat-0.jsonl"),
        ("HPCTK_SCALING_REPEAT", 0),
        ("HPCTK_SCALING_CLUSTER", "lab"),
        ("A", "b"),
    ):
        assert f"export {name}={value}\n" in scripts[1]


def test_a_job_launches_the_ranks_of_its_nodes() -> None:
    directory = Path("/shared/s")
    with pytest.raises(ConfigError, match="6 ranks do not fill nodes of 4"):
        job_request(directory, 6, 4, gpus="", launch=None)
    for size, template, ranks, gpus in (
        (1, "train-multi-gpu", 1, "l40s:1"),
        (4, "train-multi-gpu", 4, "l40s:4"),
        (8, "train-multi-node", 4, "l40s:4"),
    ):
        found, values = job_request(directory, size, 4, gpus="l40s:4", launch=None)
        assert (found, values["nodes"]) == (template, max(1, size // 4))
        assert (values["nproc_per_node"], values["gpus_per_node"]) == (ranks, gpus)
    for gpus in ("", "0"):
        found, _ = job_request(directory, 2, 2, gpus=gpus, launch="task-per-gpu")
        assert found == "train-multi-node"
