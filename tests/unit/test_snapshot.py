"""A run's items and results as one file, and a new run that begins from it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.errors import RunError
from hpc_toolkit.results.snapshots import read_snapshot, write_snapshot
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import WorkloadSpec
from tests.toyrun import ToyRun, empty_campaign, units_of

if TYPE_CHECKING:
    from pathlib import Path


ROW = {
    "item": {"id": 1},
    "state": "done",
    "value": {},
    "error": None,
    "attempts": 1,
    "seconds": 0.0,
    "worker": "w",
}


def half_done(root: Path, **spec: Any) -> ToyRun:
    """Items 0, 1, 5 done, 4 failed for good, 2 failed once, the others untouched."""
    toy = ToyRun(root, 9, unit=3, **spec)
    one = toy.worker("one")
    one.work(toy.unit_name(0), i0="done", i1="done", i2="failed")
    assert one.claim(toy.unit_name(3))
    one.attempt(4, "permanent")
    one.attempt(5, seconds=2.5, value={"mean": 0.25})
    return toy


def test_a_snapshot_is_read_back_as_it_was_taken(tmp_path: Path) -> None:
    toy = half_done(tmp_path / "run")
    path = tmp_path / "s.json"

    taken = toy.reopen().snapshot()
    write_snapshot(path, taken)

    assert read_snapshot(path) == taken
    assert taken.counts == {"items": 9, "done": 3, "failed": 1, "pending": 5}
    assert [row["item"]["id"] for row in taken.rows] == [0, 1, 4, 5]
    assert taken.items == [{"id": number} for number in range(9)]
    assert toy.log().table is None  # nothing was published


def test_a_restored_run_has_what_was_done_and_runs_the_rest(tmp_path: Path) -> None:
    toy = half_done(tmp_path / "run", max_attempts=2, timeout_s=30.0)
    with units_of(3):
        run = Run.restore(tmp_path / "again", toy.reopen().snapshot())

    status = Run.open(tmp_path / "again").status()
    counts = status.stages["items"]
    assert (counts.done, counts.failed, counts.pending) == (3, 0, 6)
    assert counts.sealed
    assert (status.workers.alive, status.workers.finished) == (0, 1)
    assert (run.manifest.run, run.manifest.stages[0].timeout_s) == ("again", 30.0)
    assert run.manifest.provenance["from"]["run"] == "run"
    rows = {row["item"]["id"]: row for row in run.results(partial=True)}
    assert rows[5]["value"] == {"mean": 0.25}
    assert rows[5]["seconds"] == 2.5
    assert rows[5]["worker"].startswith("import-")

    assert run.work(1) == 0
    rows = {row["item"]["id"]: row for row in Run.open(tmp_path / "again").results()}
    assert sorted(rows) == list(range(9))
    assert {row["state"] for row in rows.values()} == {"done"}
    assert rows[0]["value"] == {"by": "one"}
    assert rows[2]["value"] == {"id": 2}
    assert {row["attempts"] for row in rows.values()} == {1}


def test_settings_come_along_and_can_be_changed(tmp_path: Path) -> None:
    toy = half_done(tmp_path / "run", sealed=False, max_failures="5%")
    snapshot = toy.reopen().snapshot()
    command = WorkloadSpec(command="echo {id}")

    same = Run.restore(tmp_path / "same", snapshot).manifest.stages[0]
    changes = {"workload": command, "max_attempts": 7, "group_by": "id"}
    other = Run.restore(tmp_path / "other", snapshot, changes=changes, open_end=False)

    assert same == toy.run.manifest.stages[0]
    assert not Run.open(tmp_path / "same").status().stages["items"].sealed
    assert other.manifest.stages[0].workload == command
    assert other.manifest.stages[0].max_attempts == 7
    assert other.status().stages["items"].sealed
    assert other.status().stages["items"].done == 3  # found again in their groups


def test_a_campaign_has_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has several stages"):
        empty_campaign(tmp_path / "run").snapshot()


def test_every_cut_of_a_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    with pytest.raises(RunError, match="No such file"):
        read_snapshot(path)
    write_snapshot(path, half_done(tmp_path / "run").reopen().snapshot())
    data = path.read_bytes()

    for size in range(0, len(data) - 2, 97):
        path.write_bytes(data[:size])
        with pytest.raises(RunError, match="is not a snapshot"):
            read_snapshot(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "other"}, "is not a snapshot: ValueError: its kind is 'other'"),
        ({"format": 2}, "format 2; this hpctk reads up to 1"),
        ({"rows": [{**ROW, "item": {"id": 77}}]}, "row 0: it is of no item"),
        ({"rows": [ROW, ROW]}, "row 1: it is of no item, or of one that has a row already"),
        ({"rows": [ROW, {**ROW, "state": "lost"}]}, "row 1: its 'state' is neither"),
        ({"rows": [{"item": {"id": 1}, "state": "done"}]}, "row 0: it has no 'value'"),
        ({"items": [1]}, "item 0 is not a JSON object"),
        ({"items": [{"id": number} for number in range(8)]}, "it holds"),
        ({"manifest": {}}, "is damaged: KeyError"),
        ({"sealed": 1}, "not that of one list"),
    ],
)
def test_a_damaged_snapshot_is_refused(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    write_snapshot(path, half_done(tmp_path / "run").reopen().snapshot())
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, **change}))

    with pytest.raises(RunError, match=match):
        read_snapshot(path)
