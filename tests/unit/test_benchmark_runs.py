"""Benchmarks count failures as failures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What gives a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_drain_that_fails_is_a_row_and_the_next_ones_are_measured(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharedfs = part("sharedfs")

    def play(drain: Any, *, kill: bool) -> Any:
        if not kill:
            message = "workers left:\n [code | 1]"
            raise AssertionError(message)
        return part("sharedfs_peers").Came(1, 0, 0, 1, 0, 1.0, capped=False, person=0)

    monkeypatch.setattr(sharedfs, "play_ours", play)
    filesystem = SimpleNamespace(name="none")
    directories = sharedfs.Directories(tmp_path)

    found = sharedfs.drains(filesystem, Path("python"), directories, ["hpctk"], sharedfs.SMALL)

    table = sharedfs.Table()
    for name, _, came in found:
        table.add("none", "fine", name, "two a host", *sharedfs.cells_of(came))
    assert [len(cells) for cells in table.rows] == [len(sharedfs.COLUMNS) + 1] * 2
    assert table.rows[0][5] == "failed: workers left: [code / 1]"
    assert table.rows[1][5] == "0"
    assert table.lost


def test_only_named_filesystems_are_measured_with_all_mounts_of_their_hosts(part: Any) -> None:
    sharedfs = part("sharedfs")
    names = [kind.name for kind in sharedfs.chosen(sharedfs.NFS_KINDS, ["CephFS", "NFSv3"])]
    assert names == ["NFSv3", "NFSv3 actimeo=60"]
    assert sharedfs.chosen(sharedfs.FUSE_KINDS, ["NFSv3"]) == ()
    assert sharedfs.chosen(sharedfs.NFS_KINDS, None) == sharedfs.NFS_KINDS


def test_another_queue_that_fails_is_left_out_and_the_rest_is_measured(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    throughput = part("throughput")

    asked = []

    def peer(name: str, *_: Any) -> dict[str, Any]:
        asked.append(name)
        if name == "bad":
            throughput.timed([sys.executable, "-c", "import sys; sys.exit('no | luck')"])
        return {"items_per_s": 1.0}

    monkeypatch.setattr(throughput, "ours", lambda *_: {"items_per_s": 2.0})
    monkeypatch.setattr(throughput, "peer", peer)
    options = SimpleNamespace(dir=tmp_path, repeats=2, items=1, workers=1)

    found, failed = throughput.measure(options, ["bad", "hpctk", "good"])

    assert {name: len(runs) for name, runs in found.items()} == {"hpctk": 2, "good": 2}
    assert asked.count("bad") == 1
    assert failed["bad"].seen.startswith("failed: no / luck (exit code 1 of ")


def test_what_a_fault_costs_is_told_by_the_items(part: Any, tmp_path: Path) -> None:
    told = [
        *("start 0 70 7 1.0", "end 0 70 7 1.5", "start 1 80 8 1.0", "start 2 90 9 2.0"),
        *("start 3 71 7 2.0", "end 3 71 7 2.25", "start 2 72 7 2.75", "end 2 72 7 3.0"),
        *("start 0 81 8 3.5", "end 0 81 8 3.75", "start 3 72 7 4.0", "end 3 72 7 4.25"),
        *("start 1 82 8 6.25", "end 1 82 8 6.5", "start 4 72 7 6.5", "end 4 72 7 6.75"),
    ]
    (tmp_path / "run-notes").mkdir()
    (tmp_path / "run-notes" / "trace").write_text("".join(f"{line}\n" for line in told))
    faults = {0: "fail", 1: "hang", 2: "kill"}
    items = [{"seed": seed, **({"how": faults[seed]} if seed < 3 else {})} for seed in range(5)]

    rows = part("iterated").fault_rows(tmp_path / "run", items)

    assert [row[1:] for row in rows] == [
        ["1", "2.00 s", "0.50 s"],
        ["1", "5.25 s", "5.25 s"],
        ["1", "0.75 s", "0.75 s"],
        ["1", "", "0.25 s"],
    ]
