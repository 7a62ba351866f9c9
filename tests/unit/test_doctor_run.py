"""A run's files as doctor reads them: every kind of damage is found, and nothing is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.doctor.runfiles import check_run, plan_repairs
from hpc_toolkit.doctor.sides import Finding, Verdict
from hpc_toolkit.errors import HpcToolkitError
from tests.toyrun import ToyRun, tree


@pytest.fixture
def worked(tmp_path: Path) -> ToyRun:
    """Two units; the first is done, the second was begun."""
    toy = ToyRun(tmp_path / "run", 8)
    worker = toy.worker("w1")
    worker.work(toy.unit_name(0), i0="done", i1="done", i2="done", i3="done")
    assert worker.claim(toy.unit_name(4))
    worker.attempt(4)
    worker.journal.sync()
    return toy


def findings(toy: ToyRun) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for one in check_run(toy.root):
        found.setdefault(one.check, []).append(one)
    return found


def test_a_run_in_order_is_fine_and_is_not_touched(worked: ToyRun) -> None:
    before = tree(worked.root)

    found = check_run(worked.root)

    assert {one.verdict for one in found} == {Verdict.FINE}
    assert [one.check for one in found] == ["log (items)", "claims (items)", "journals", "workers"]
    assert "6 lines of 1 worker," in found[2].found
    assert tree(worked.root) == before


def test_a_journal_that_cannot_be_read_is_unsafe_and_the_others_are_looked_at(
    worked: ToyRun,
) -> None:
    worked.worker("w0")
    worked.paths.journal("w0").unlink()
    worked.paths.journal("w0").mkdir()

    found = findings(worked)

    (journal,) = found["journals"]
    assert (journal.verdict, bool(journal.fix)) == (Verdict.UNSAFE, True)
    assert "w0.jsonl (Is a directory)" in journal.found
    assert found["workers"][0].verdict is Verdict.FINE


@pytest.mark.parametrize("kept", [b"\0\n", b"", b"7\n", b'{"at":[1]}\n'])
def test_a_published_table_with_a_bad_row_is_unsafe(worked: ToyRun, kept: bytes) -> None:
    worked.worker("w2").work(worked.unit_name(4), 2, i4="done", i5="done", i6="done", i7="done")
    worked.reopen().results()
    assert {one.verdict for one in check_run(worked.root)} == {Verdict.FINE}
    (table,) = (worked.stage_paths.root / "results").iterdir()
    lines = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(b"".join(lines[:-1]) + kept)

    (log,) = findings(worked)["log (items)"]

    assert log.verdict is Verdict.UNSAFE
    assert f"line {len(lines)} of results/" in log.found


def damage(toy: ToyRun, how: str) -> None:
    def edit(path: Path, old: bytes, new: bytes) -> None:
        path.write_bytes(path.read_bytes().replace(old, new, 1))

    journal, entry = toy.paths.journal("w1"), toy.stage_paths.entry
    first, second = (toy.stage_paths.claims / f"000001-4.{n}.lock" for n in (1, 2))
    damages: dict[str, Callable[[], Any]] = {
        "a torn line": lambda: os.truncate(journal, journal.stat().st_size - 5),
        "a changed line": lambda: edit(journal, b'"seconds":1.0', b'"seconds":9.0'),
        "a file as a claim": lambda: second.write_text("w1"),
        "the first of two claims": lambda: first.rename(second),
        "a claim for nobody": lambda: second.symlink_to("ghost"),
        "a worker's file": lambda: edit(toy.paths.worker("w1"), b"w1", b"w9"),
        "a segment": lambda: next(toy.stage_paths.items.iterdir()).unlink(),
        "a log entry": lambda: entry(1).unlink(),
        "an entry of a later version": lambda: entry(3).symlink_to("miracles/1"),
    }
    damages[how]()


@pytest.mark.parametrize(
    ("how", "check", "verdict", "words"),
    [
        ("a torn line", "journals", "slower", "torn at the end: w1.jsonl ("),
        ("a changed line", "journals", "slower", "damaged: w1.jsonl at byte 0"),
        ("a file as a claim", "claims (items)", "slower", "cannot be read: 000001-4.2"),
        ("the first of two claims", "claims (items)", "unsafe", "missing: 000001-4.1.lock"),
        ("a claim for nobody", "claims (items)", "slower", "without a file: 000001-4.2.lock"),
        ("a worker's file", "workers", "slower", "cannot be read: w1"),
        ("a segment", "log (items)", "unsafe", "entry 1, or what it names, is missing"),
        ("a log entry", "log (items)", "unsafe", "entry 1, or what it names, is missing"),
        ("an entry of a later version", "log (items)", "unsafe", "unknown entry 'miracles/1'"),
    ],
)
def test_damage_is_found_where_it_is_and_says_what_it_means(
    worked: ToyRun, how: str, check: str, verdict: str, words: str
) -> None:
    damage(worked, how)
    before = tree(worked.root)

    found = [one for one in findings(worked)[check] if one.verdict is not Verdict.FINE]

    assert [str(one.verdict) for one in found] == [verdict]
    assert words in found[0].found
    assert found[0].means
    assert tree(worked.root) == before


@pytest.mark.parametrize("name", ["workers", "control", "stages/items/log", "stages/items/claims"])
def test_a_file_in_the_place_of_a_directory_is_no_bug_of_ours(worked: ToyRun, name: str) -> None:
    worked.worker("w2").work(worked.unit_name(4), 2, i4="done", i5="done", i6="failed", i7="done")
    assert worked.log().add_retry([(1, 6, 2)])
    worked.worker("w3").work(worked.unit_name(4), 3, i6="done")
    worked.reopen().results()
    shutil.rmtree(worked.root / name)
    (worked.root / name).touch()
    for call in (
        lambda: check_run(worked.root),
        lambda: plan_repairs(worked.root),
        lambda: worked.reopen().status(),
        lambda: worked.reopen().results(),
        lambda: worked.reopen().results(partial=True),
        lambda: worked.reopen().retry(),
        lambda: worked.reopen().drain(),
        lambda: worked.reopen().seal(),
    ):
        with suppress(HpcToolkitError):
            call()
