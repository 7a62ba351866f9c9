"""'hpctk map': one command that makes a run, works on it, checks it and writes its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.realrun import Hpctk

WORK = """\
import os, time

def square(item):
    if item["n"] == 13 and not os.path.exists("fixed"):
        raise ValueError("thirteen")
    time.sleep(0.02)
    return {"square": item["n"] ** 2}
"""
MAP = ("map", "work:square", "--count", "30", "--key", "n", "--max-attempts", "1")


@pytest.fixture(autouse=True)
def workload(hpctk: Hpctk) -> None:
    (hpctk.cwd / "work.py").write_text(WORK)


def test_map_makes_works_checks_and_writes(hpctk: Hpctk) -> None:
    Path("fixed").touch()

    ended = hpctk(*MAP, "--workers", "2", "-o", "rows.json")

    assert (ended.code, ended.out) == (0, "runs/work-square\n")
    assert "30 rows in rows.json\n" in ended.err
    rows = json.loads(Path("rows.json").read_text())
    assert [row["value"]["square"] for row in rows] == [n**2 for n in range(30)]
    assert hpctk(*MAP).out == "runs/work-square\n"


def test_map_goes_on_after_a_failure_that_was_fixed(hpctk: Hpctk) -> None:
    ended = hpctk(*MAP, "-o", "rows.csv")

    assert ended.code == 1
    assert "error: 1 failed, of 30 items in runs/work-square" in ended.err
    assert len(Path("rows.csv").read_text().splitlines()) == 31
    Path("fixed").touch()
    hpctk("retry")
    assert hpctk(*MAP, "-o", "rows.csv").code == 0


def test_map_with_other_arguments_is_refused(hpctk: Hpctk) -> None:
    Path("fixed").touch()
    assert hpctk(*MAP).code == 0

    for words, what in (
        (("--count", "31"), "items"),
        (("--timeout", "1h"), "timeout"),
        (("--option", "x=1"), "workload"),
    ):
        ended = hpctk(*MAP, *words)
        assert ended.code == 1
        assert f"error: runs/work-square was created with other {what}\n" in ended.err
