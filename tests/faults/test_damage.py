"""What a person, a power loss or a slow server leaves behind, met by every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.run import Run
from tests.faults.cut import Commands, Struck, copy_of
from tests.faults.test_faults import at_every, check_rows, done_lines
from tests.toyrun import ToyRun

LEASE = ("--lease", "300ms")


def soaking(value: object) -> Any:
    """One more case where there is time."""
    return pytest.param(value, marks=pytest.mark.soak)


def whole_rows(root: Path) -> list[dict[str, Any]]:
    """The published rows; each item once, done, at no cost."""
    table = Run.open(root).table()
    assert table.published
    return check_rows(table.rows, len(table.rows), root)


def hidden_payload(home: Path, kind: str) -> Path:
    """A run whose latest log entry names a payload of this kind, which is not read yet."""
    toy = ToyRun(home / "run", 4, unit=4, max_attempts=1, sealed=kind != "items")
    toy.worker("w").work(toy.unit_name(0), i0="done", i1="failed", i2="done", i3="done")
    if kind == "items":
        toy.add([{"id": 4}, {"id": 5}])
    else:
        toy.run.results()
    if kind == "retries":
        toy.reopen().retry()
    target = toy.paths.stage("items").entry(toy.log().length).readlink()
    return toy.paths.stage("items").root / target


PARTS = ["missing", "half", *(soaking(part) for part in ("empty", "one byte", "all but one byte"))]
COMMANDS: dict[str, tuple[object, ...]] = {
    "status": ("status", "run"),
    "gather": ("gather", "run", "-o", "rows.jsonl"),
    "gather --partial": ("gather", "run", "--partial", "-o", "some.jsonl"),
    "add": ("add", "run", "--items", "more.jsonl"),
    "seal": ("seal", "run"),
    "retry": ("retry", "run"),
    "work": ("work", "run", *LEASE, "--idle-exit", "100ms"),
}


def check_told(command: str, ended: Struck) -> None:
    """It ends, and not as if nothing were wrong or hpctk had a bug."""
    assert ended.code in (0, 1, 75), ended
    assert "Traceback" not in ended.err, ended
    if command == "status":
        assert "which is missing or incomplete" in ended.out, ended
    assert ended.code != 75 or command == "work" or "error: " in ended.err, ended


@pytest.mark.parametrize("kind", ["items", "retries", "results"])
@pytest.mark.parametrize("part", PARTS)
def test_a_payload_that_is_seen_after_its_entry_is_waited_for(
    fast_dir: Path, call: Commands, kind: str, part: str
) -> None:
    path = hidden_payload(fast_dir, kind)
    data = path.read_bytes()
    kept = {"empty": 0, "one byte": 1, "half": len(data) // 2, "all but one byte": len(data) - 1}
    if part == "missing":
        path.unlink()
    else:
        path.write_bytes(data[: kept[part]])
    entries = sorted((fast_dir / "run/stages/items/log").iterdir())

    for command, words in COMMANDS.items():
        check_told(command, call(*words, root=fast_dir / "run"))

    # Nothing stands in its place, and whoever waited goes on where it is there.
    assert sorted((fast_dir / "run/stages/items/log").iterdir()) == entries
    path.write_bytes(data)
    run = Run.open(fast_dir / "run")
    run.seal()
    run.retry()
    assert call("work", "run", *LEASE, root=fast_dir / "run").code == 0
    rows = run.results()
    assert {row["state"] for row in rows} == {"done"}
    assert len(rows) == (6 if kind == "items" else 4)


def test_a_payload_that_comes_while_a_worker_waits_is_worked_on(
    fast_dir: Path, call: Commands
) -> None:
    path = hidden_payload(fast_dir, "items")
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    worker = call.start("work", "run", "--idle-exit", "30s", root=fast_dir / "run")
    worker.until(lambda: bool(list((fast_dir / "run/workers").glob("*.json"))))

    path.write_bytes(data)

    worker.until(lambda: Run.open(fast_dir / "run").status().stages["items"].done == 5)
    Run.open(fast_dir / "run").seal()
    assert worker.end().code == 0


def test_a_table_that_lacks_rows_is_no_answer(fast_dir: Path, call: Commands) -> None:
    path = hidden_payload(fast_dir, "results")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))

    ended = call("gather", "run", "-o", "rows.jsonl", root=fast_dir / "run")

    assert ended.code == 75
    assert "shows 3 of its 4 rows" in ended.err
    assert not (fast_dir / "rows.jsonl").exists()


def test_claims_that_somebody_deleted_while_nothing_ran_cost_no_result(
    fast_dir: Path, call: Commands
) -> None:
    toy = ToyRun(fast_dir / "run", 6, unit=2)
    toy.worker("a").work(toy.unit_name(0), i0="done", i1="done")
    dead = toy.worker("b", interval_s=0.1)
    dead.claim(toy.unit_name(2))
    dead.attempt(2)
    shutil.rmtree(toy.stage_paths.claims)
    before = done_lines(fast_dir / "run")

    counts = toy.reopen().status().stages["items"]
    refused = call("work", "run", *LEASE, root=fast_dir / "run")

    assert (counts.done, counts.pending) == (3, 3)
    assert refused.code == 75
    assert "claims is missing" in refused.err
    assert "hint: 'hpctk doctor run --repair'" in refused.err
    assert call("doctor", "run", "--repair", root=fast_dir / "run").code == 0
    assert call("work", "run", *LEASE, root=fast_dir / "run").code == 0
    rows = whole_rows(fast_dir / "run")
    for item, line in before.items():
        assert rows[item]["value"] == line["value"]


@pytest.mark.parametrize("made_again", [True, False])
def test_claims_that_somebody_deletes_while_workers_run_cost_no_result(
    fast_dir: Path, call: Commands, made_again: bool
) -> None:
    """Whatever was done counts; whoever claims on ends, and says what is missing."""
    ToyRun(fast_dir / "template", 40, unit=1)
    claims = copy_of(fast_dir / "template", fast_dir / "run") / "stages/items/claims"
    workers = [call.start("work", "run", *LEASE, root=fast_dir / "run") for _ in range(2)]
    workers[0].until(lambda: len(done_lines(fast_dir / "run")) > 5)

    claims.rename(fast_dir / "deleted")
    if made_again:
        claims.mkdir()
    ended = [worker.end() for worker in workers]

    before = done_lines(fast_dir / "run")
    for one in ended:
        assert one.code in (0, 75), one
        # Made again between the failed claim and the look at it, the directory is not gone.
        said = ("claims is missing", *(("cannot write to run",) if made_again else ()))
        assert one.code == 0 or any(words in one.err for words in said), one
    claims.mkdir(exist_ok=True)
    assert call("work", "run", *LEASE, root=fast_dir / "run").code == 0
    rows = whole_rows(fast_dir / "run")
    assert len(rows) == 40
    assert set(before) <= set(range(40))
    lines = [
        json.loads(line)
        for path in (fast_dir / "run/journals").iterdir()
        for line in path.read_text().splitlines()
    ]
    values = {(line["item"], json.dumps(line["value"])) for line in lines if line["type"] == "done"}
    assert all((number, json.dumps(row["value"])) in values for number, row in enumerate(rows))


@at_every(217)
def test_a_journal_cut_at_any_byte_costs_its_last_line_and_no_more(
    fast_dir: Path, call: Commands, every: int
) -> None:
    """As a power loss leaves it, for readers and for the worker that comes next."""
    toy = ToyRun(fast_dir / "template", 6, unit=3, max_attempts=2)
    worker = toy.worker("w", interval_s=0.1)
    worker.work(toy.unit_name(0), i0="done", i1="failed", i2="done")
    worker.claim(toy.unit_name(3))
    worker.attempt(3, "done")
    data = toy.paths.journal("w").read_bytes()
    for size in range(0, len(data) + 1, every):
        root = copy_of(fast_dir / "template", fast_dir / "run")
        (root / "journals/w.jsonl").write_bytes(data[:size])
        kept = done_lines(root)
        assert len(kept) == data[:size].count(b'"type":"done"', 0, data.rfind(b"\n", 0, size) + 1)

        ended = call("work", "run", *LEASE, root=root)

        assert (ended.code, ended.err) == (0, ""), f"cut at {size}: {ended}"
        rows = Run.open(root).results()
        assert [row["item"]["id"] for row in rows] == list(range(6)), size
        assert {row["state"] for row in rows} == {"done"}, size
        for item, line in kept.items():
            assert (rows[item]["worker"], rows[item]["value"]) == ("w", line["value"]), size
