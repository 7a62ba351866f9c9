"""How benchmarks write down what they measured, and which queues they can measure."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def part(name: str) -> dict[str, Any]:
    """What a benchmark's script defines."""
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


PAGE = "# Results\n\nIntroduction.\n\n## One\n1\n\n## Two\nold\n\nolder\n\n## Three\n3\n"


def test_a_benchmark_replaces_its_own_section_alone(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text(PAGE)
    write = part("resultsfile")["write_section"]

    write("Two", ["new", ""], page)

    assert page.read_text() == PAGE.replace("old\n\nolder", "new")
    write("Two", ["new", ""], page)
    assert page.read_text() == PAGE.replace("old\n\nolder", "new")


@pytest.mark.parametrize("title", ["Three", "Four"])
def test_a_benchmark_writes_the_last_section_or_a_new_one(tmp_path: Path, title: str) -> None:
    page = tmp_path / "results.md"
    page.write_text(PAGE)

    part("resultsfile")["write_section"](title, ["new"], page)

    assert page.read_text().endswith(f"\n\n## {title}\nnew\n")
    assert page.read_text().startswith(PAGE.partition("## Three")[0])


def test_the_facts_of_a_measurement_name_day_commit_command_and_machine(tmp_path: Path) -> None:
    line = part("resultsfile")["facts"](tmp_path)

    assert re.match(r"\d{4}-\d\d-\d\d, commit (\w{7}|unknown)( with changes)?, `python ", line)
    assert re.search(r"\d+ cores, \d+ GiB, \w+, Python 3\.\d+\.\d+\.$", line)


def test_a_picture_has_one_bar_a_number_as_long_as_its_logarithm() -> None:
    values = {"ours": 10_000.0, "a <b>": 100.0, "c": 10.0}

    picture = part("picture")["bars"]("title", values, "/s")

    assert picture == part("picture")["bars"]("title", values, "/s")
    lengths = [float(one) for one in re.findall(r'y="\d+" width="([\d.]+)" height="18"', picture)]
    assert lengths[0] == pytest.approx(3 * lengths[1], rel=0.01)
    assert lengths[2] == 1.0
    assert "a &lt;b&gt;" in picture


def test_the_naive_queue_runs_every_item_once_and_says_how_fast(tmp_path: Path) -> None:
    argv = [sys.executable, str(BENCHMARKS / "peers.py"), "naive_filelock", "--items", "40"]

    ended = subprocess.run(
        [*argv, "--workers", "2", "--dir", str(tmp_path / "q")], capture_output=True, check=True
    )

    found = json.loads(ended.stdout)
    assert (found["done"], found["twice"], found["capped"]) == (40, 0, False)
    assert found["items_per_s"] > 0
    assert len(list((tmp_path / "q" / "results").iterdir())) == 40


def test_a_queue_that_does_not_end_is_cut_at_the_cap(tmp_path: Path) -> None:
    argv = [sys.executable, str(BENCHMARKS / "peers.py"), "naive_filelock", "--items", "1000000"]

    ended = subprocess.run(
        [*argv, "--workers", "1", "--cap", "0.2", "--dir", str(tmp_path / "q")],
        capture_output=True,
        check=True,
    )

    found = json.loads(ended.stdout)
    assert found["capped"]
    assert 0 < found["done"] < 1_000_000


def test_items_of_a_queue_tell_when_they_begin_and_end(tmp_path: Path) -> None:
    argv = [sys.executable, str(BENCHMARKS / "peers.py"), "naive_filelock", "--items", "3"]
    argv += ["--workers", "1", "--dir", str(tmp_path / "q"), "--seconds", "0.01"]

    subprocess.run([*argv, "--trace", str(tmp_path / "trace")], capture_output=True, check=True)

    lines = [line.split() for line in (tmp_path / "trace").read_text().splitlines()]
    assert [(what, item) for what, item, *_ in lines] == [
        (what, item) for item in "012" for what in ("start", "end")
    ]
    assert float(lines[1][-1]) - float(lines[0][-1]) >= 0.01
