"""``hpctk scaling``: pages, files, exit codes, and what is refused before a rank starts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError
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
    ("words", "wanted"),
    [
        (("run", "-o", "d", "--backend", "mpi"), "one of nccl, gloo"),
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


def test_a_directory_that_cannot_be_written_to_is_refused_before_a_rank_starts(table: str) -> None:
    found = scaling("run", "-o", f"{table}/d", "x.py")

    assert isinstance(found.exception, ConfigError)
    assert "/d: cannot be written to: Not a directory" in str(found.exception)


def test_what_is_missing_is_measured(tmp_path: Path) -> None:
    (tmp_path / "d/records").mkdir(parents=True)
    known = record(2, 1.0, 1, settings={"arguments": "--lr 1"})
    (tmp_path / "d/records/world-2.jsonl").write_text(json.dumps(known))
    words = ("run", "-o", tmp_path / "d", "--world-sizes", "1,2", "--repeats", "2", "--dry-run")

    found = scaling(*words, "--resume", "--", "train.py", "--lr", "1")
    refused = scaling(*words, "--", "train.py", "--lr", "1")

    assert [line.partition(":")[0] for line in found.stdout.splitlines()] == [
        f"world size {size}, repeat {repeat}" for size, repeat in ((1, 0), (2, 0), (1, 1))
    ]
    assert "already contains measurements" in str(refused.exception)
