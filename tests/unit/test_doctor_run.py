"""A run's files as doctor reads them; every kind of damage is found; a repair loses no result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.cli.checking import doctor
from hpc_toolkit.doctor.runfiles import check_run, plan_repairs, repair_run
from hpc_toolkit.doctor.sides import Finding, Verdict
from hpc_toolkit.errors import HpcToolkitError, RunError
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import RunPaths
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


Draw = Any  # as DataObject.draw is: takes a strategy, gives one of its examples
HOURS_AGO_S = 7200
TEMPORARY = ".doctor.json.0123456789abcdef.tmp"


def age(*paths: Path) -> None:
    for path in paths:
        then = path.stat().st_mtime - HOURS_AGO_S
        os.utime(path, (then, then))


def worked_run(root: Path) -> ToyRun:
    """Three workers, two of them dead: results, failures, a retry, a takeover, an open unit."""
    toy = ToyRun(root, 12)
    first, second, third = (toy.worker(name) for name in ("w1", "w2", "w3"))
    first.work(toy.unit_name(0), i0="done", i1="failed", i2="done", i3="permanent")
    assert first.claim(toy.unit_name(4))
    first.attempt(4)
    first.journal.sync()
    assert toy.log().add_retry([(1, 3, 1)])
    second.work(toy.unit_name(0), 2, i1="done", i3="failed")
    third.death(5, generation=1, worker="w1", unit=f"items/{toy.unit_name(4)}")
    third.work(toy.unit_name(4), 2, i5="done", i6="done", i7="done")
    third.finish()
    for path in toy.paths.workers.iterdir():
        age(path)
    return toy


@pytest.fixture
def toy(fast_dir: Path) -> ToyRun:
    return worked_run(fast_dir / "run")


def test_claims_that_a_person_deleted_are_made_again_with_their_owners(toy: ToyRun) -> None:
    claims = toy.stage_paths.claims
    before = {name: os.readlink(claims / name) for name in os.listdir(claims)}
    shutil.rmtree(claims)

    assert {told for _, told in repair_run(toy.root, plan_repairs(toy.root).repairs)} == {""}

    assert {name: os.readlink(claims / name) for name in os.listdir(claims)} == before


def test_a_claim_that_somebody_made_meanwhile_is_his(toy: ToyRun) -> None:
    claim = toy.stage_paths.claims / f"{toy.unit_name(4)}.2.lock"
    claim.unlink()
    plan = plan_repairs(toy.root)
    claim.symlink_to("w9")

    ((_, outcome),) = repair_run(toy.root, plan.repairs)

    assert outcome == "w9 has it meanwhile"
    assert os.readlink(claim) == "w9"


@pytest.mark.parametrize("head", [True, False])
def test_a_log_that_is_gone_is_never_begun_anew(toy: ToyRun, head: bool) -> None:
    """The journals name items by their place in it: those of a new one would be others."""
    shutil.rmtree(toy.stage_paths.log)
    if not head:
        toy.stage_paths.head.unlink()

    plan = plan_repairs(toy.root)

    assert plan.repairs == ()
    (left,) = plan.left
    assert left.startswith("the log of items: ")
    assert left.endswith(" is missing; restore it from a backup")


def test_a_run_of_somebody_else_is_not_repaired(
    toy: ToyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.paths.control.rmdir()
    (toy.root / "run.json").chmod(0o666)

    with pytest.raises(RunError, match="world-writable"):
        doctor(str(toy.root), repair=True)

    assert capsys.readouterr().out == ""
    assert not toy.paths.control.exists()


def rows_of(root: Path) -> Any:
    """What a reader gets of a run, or why it gets nothing."""
    try:
        return Run.open(root).results(partial=True)
    except (HpcToolkitError, OSError, ValueError, KeyError, TypeError) as error:
        return type(error).__name__


def truth(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything from which results are computed."""
    named = ("run.json", "journals/", "stages/items/log/")
    kept = {name: one for name, one in tree(root).items() if name.startswith(named)}
    log = RunPaths(root).stage("items")
    for entry in log.log.glob("*"):
        path = log.root / os.readlink(entry)
        if path.is_file():
            kept[path.name] = (0, 0, path.read_bytes())
    return kept


def choose(draw: Draw, root: Path, *patterns: str) -> Path | None:
    pattern = draw(st.sampled_from(patterns))
    found = sorted(path for path in root.glob(pattern) if path.is_symlink() or path.is_file())
    return draw(st.sampled_from(found)) if found else None


def delete_one(draw: Draw, root: Path) -> None:
    places = ("stages/items/claims/*", "workers/*", "stages/items/head", "stages/items/*/*")
    if path := choose(draw, root, *places):
        path.unlink()


def delete_directory(draw: Draw, root: Path) -> None:
    parts = ("claims", "results", "retries", "items", "log")
    names = ["control", "bandit", "logs", "workers", "journals"]
    names += [f"stages/items/{part}" for part in parts]
    shutil.rmtree(root / draw(st.sampled_from(names)), ignore_errors=True)


def cut(draw: Draw, root: Path) -> None:
    if path := choose(draw, root, "journals/*", "stages/items/head"):
        data = path.read_bytes()
        path.write_bytes(data[: draw(st.integers(0, len(data)))])


def flip(draw: Draw, root: Path) -> None:
    places = ("journals/*", "workers/*.json", "stages/items/head", "stages/*/*/*")
    path = choose(draw, root, *places)
    if path is None or path.is_symlink() or not path.stat().st_size:
        return
    data = bytearray(path.read_bytes())
    data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    path.write_bytes(data)
    age(path)


def litter(draw: Draw, root: Path) -> None:
    parts = ("results/1.jsonl", "items/1.jsonl", "claims/notes", "retries/1.json")
    names = [TEMPORARY, "bandit/.trials.jsonl.0123456789abcdef.tmp", "journals/notes"]
    names += [f"stages/items/{part}" for part in parts]
    path = root / draw(st.sampled_from(names))
    if path.parent.is_dir():
        path.write_bytes(draw(st.binary(max_size=40)))
        age(path)


DAMAGES: list[Callable[[Draw, Path], None]] = [*(delete_one, delete_directory, cut, flip, litter)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_after_any_damage_a_repair_loses_no_result_and_leaves_nothing_to_repair(
    toy: ToyRun, fast_dir: Path, data: st.DataObject
) -> None:
    root = fast_dir / os.urandom(6).hex()
    shutil.copytree(toy.root, root, symlinks=True)
    for damage in data.draw(st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=4)):
        damage(data.draw, root)
    before, kept = rows_of(root), truth(root)

    told = list(repair_run(root, plan_repairs(root).repairs))

    assert truth(root) == kept
    # Where a reader got nothing it may get something now.
    assert rows_of(root) == before or isinstance(before, str)
    assert [one for one in told if one[1].startswith("failed")] == []
    assert plan_repairs(root).repairs == ()
