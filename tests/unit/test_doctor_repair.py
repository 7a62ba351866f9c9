"""Repairs of a run: what is planned, what is done, and that no result is ever lost by it."""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hpc_toolkit.cli import load_commands
from hpc_toolkit.cli.doctor import doctor
from hpc_toolkit.doctor.findings import Verdict
from hpc_toolkit.doctor.run import planning, repairing
from hpc_toolkit.doctor.run.planning import plan_repairs
from hpc_toolkit.doctor.run.repairing import repair_run
from hpc_toolkit.errors import HpcToolkitError, RunError
from hpc_toolkit.run import Run
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RunPaths
from tests.toyrun import ToyRun, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_toolkit.doctor.run.planning import Repair

Draw = Any  # as DataObject.draw is: takes a strategy, gives one of its examples
HOURS_AGO_S = 7200
MEMORY = next((name for name in ["/dev/shm"] if Path(name).is_dir()), None)
LOOK_AGAIN = "look again in a minute; if it stays away, restore it from a backup"
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


@pytest.fixture(autouse=True, scope="module")
def _nobody_writes() -> Iterator[None]:
    """What is found damaged stays so: no look has to be repeated after a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_BEING_WRITTEN_S", 0.0)
        yield


@pytest.fixture
def toy(fast_dir: Path) -> ToyRun:
    return worked_run(fast_dir / "run")


def complete(toy: ToyRun) -> None:
    worker = toy.worker("w4")
    worker.work(toy.unit_name(8), i8="done", i9="done", i10="done", i11="done")
    worker.work(toy.unit_name(0), 3, i3="done")
    worker.finish()
    age(toy.paths.worker("w4"))
    assert toy.reopen().status().complete


def planned(toy: ToyRun) -> dict[str, list[Repair]]:
    found: dict[str, list[Repair]] = {}
    for one in plan_repairs(toy.root).repairs:
        found.setdefault(one.kind, []).append(one)
    return found


def repaired(toy: ToyRun) -> dict[str, str]:
    return dict(repair_run(toy.root, plan_repairs(toy.root).repairs))


def test_a_run_in_order_needs_no_repair_and_is_not_touched(toy: ToyRun) -> None:
    before = tree(toy.root)

    plan = plan_repairs(toy.root)

    assert (plan.repairs, plan.left) == ((), ())
    assert tree(toy.root) == before


def test_an_open_stage_without_entries_needs_no_repair(tmp_path: Path) -> None:
    toy = ToyRun(tmp_path / "run", 0, sealed=False)

    plan = plan_repairs(toy.root)

    assert (plan.repairs, plan.left) == ((), ())


def test_a_plan_changes_nothing(toy: ToyRun) -> None:
    shutil.rmtree(toy.stage_paths.claims)
    toy.stage_paths.head.write_text("junk")
    before = tree(toy.root)

    assert planned(toy).keys() == {"directory", "claim", "head"}
    assert tree(toy.root) == before


def test_claims_that_a_person_deleted_are_made_again_with_their_owners(toy: ToyRun) -> None:
    claims = toy.stage_paths.claims
    before = {name: os.readlink(claims / name) for name in os.listdir(claims)}
    shutil.rmtree(claims)

    assert set(repaired(toy).values()) == {""}

    assert {name: os.readlink(claims / name) for name in os.listdir(claims)} == before


def test_a_claim_without_a_line_cannot_be_made_again_and_that_is_said(toy: ToyRun) -> None:
    toy.worker("w5").claim(toy.unit_name(8))
    shutil.rmtree(toy.stage_paths.claims)

    (directory,) = planned(toy)["directory"]

    assert "begun without a line in a journal is begun once more" in directory.why
    repaired(toy)
    assert f"{toy.unit_name(8)}.1.lock" not in os.listdir(toy.stage_paths.claims)


def test_a_death_that_another_worker_wrote_tells_of_a_claim_without_a_line(toy: ToyRun) -> None:
    toy.worker("w5").claim(toy.unit_name(8))
    other = toy.worker("w6")
    other.begin(toy.unit_name(8), 2)
    other.death(8, generation=1, worker="w5")
    claim = toy.stage_paths.claims / f"{toy.unit_name(8)}.1.lock"
    claim.unlink()

    repaired(toy)

    assert os.readlink(claim) == "w5"


def test_of_two_owners_the_one_whose_results_count_gets_the_claim(toy: ToyRun) -> None:
    """A generation that was claimed again after its name was deleted."""
    claim = toy.stage_paths.claims / f"{toy.unit_name(0)}.1.lock"
    claim.unlink()
    again = toy.worker("w0")
    again.work(toy.unit_name(0), 1, i0="done")
    claim.unlink()

    repaired(toy)

    assert os.readlink(claim) == "w0"
    assert next(row for row in toy.rows() if row["item"]["id"] == 0)["worker"] == "w0"


def test_a_claim_that_somebody_made_meanwhile_is_his(toy: ToyRun) -> None:
    claim = toy.stage_paths.claims / f"{toy.unit_name(4)}.2.lock"
    claim.unlink()
    plan = plan_repairs(toy.root)
    claim.symlink_to("w9")

    ((_, outcome),) = repair_run(toy.root, plan.repairs)

    assert outcome == "w9 has it meanwhile"
    assert os.readlink(claim) == "w9"


def test_a_claim_of_no_known_unit_is_not_made(toy: ToyRun) -> None:
    worker = toy.worker("w7")
    worker.begin("000009-0", 1)
    worker.attempt(0)

    assert planned(toy) == {}


@pytest.mark.parametrize("data", [b"", b"junk", b".\n", b".\n" * 3 + b"\xff" * 30])
def test_a_head_that_is_behind_or_damaged_is_written_from_the_log(toy: ToyRun, data: bytes) -> None:
    toy.stage_paths.head.write_bytes(data)

    assert repaired(toy) == {"stages/items/head": ""}

    assert toy.log().hint() == 3
    assert planned(toy) == {}


def test_a_head_that_tells_of_more_entries_is_kept_as_evidence(toy: ToyRun) -> None:
    toy.stage_paths.entry(3).unlink()

    plan = plan_repairs(toy.root)

    assert plan.repairs == ()
    assert plan.left == (f"the log of items: entry 3, or what it names, is gone; {LOOK_AGAIN}",)


def test_a_head_is_right_also_if_an_entry_comes_meanwhile(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.stage_paths.head.write_bytes(b"junk")
    plan = plan_repairs(toy.root)
    write = files.write_at

    def late(path: Path, data: bytes, at: int) -> None:
        monkeypatch.setattr(files, "write_at", write)
        assert toy.log().add_retry([(1, 3, 2)])
        write(path, data, at)

    monkeypatch.setattr(files, "write_at", late)

    assert dict(repair_run(toy.root, plan.repairs)) == {"stages/items/head": ""}
    assert toy.log().hint() == 4


@pytest.mark.parametrize("name", ["control", "bandit", "logs", "workers", "stages/items/results"])
def test_a_directory_that_is_missing_is_made(toy: ToyRun, name: str) -> None:
    shutil.rmtree(toy.root / name)

    assert repaired(toy) == {name: ""}
    assert (toy.root / name).is_dir()


def test_a_directory_whose_files_the_log_names_is_not_made_empty(toy: ToyRun) -> None:
    shutil.rmtree(toy.stage_paths.retries)

    plan = plan_repairs(toy.root)

    assert plan.repairs == ()
    assert "entry 3, or what it names, is gone" in plan.left[0]


@pytest.mark.parametrize("head", [True, False])
def test_a_log_that_is_gone_is_never_begun_anew(toy: ToyRun, head: bool) -> None:
    """The journals name items by their place in it: those of a new one would be others."""
    shutil.rmtree(toy.stage_paths.log)
    if not head:
        toy.stage_paths.head.unlink()

    plan = plan_repairs(toy.root)

    assert plan.repairs == ()
    assert plan.left == (f"the log of items: every entry is gone; {LOOK_AGAIN}",)


def test_a_claim_that_an_old_listing_lacks_is_not_missing(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = files.list_names
    claims = toy.stage_paths.claims
    monkeypatch.setattr(files, "list_names", lambda path: [] if path == claims else listed(path))

    assert planned(toy) == {}


def left_over(toy: ToyRun) -> list[Path]:
    """A temporary file and a payload that no entry names, both old."""
    paths = [toy.root / TEMPORARY, toy.stage_paths.results / "0123456789abcdef.jsonl"]
    for path in paths:
        path.write_text("{}\n")
    age(*paths)
    return paths


def test_what_is_left_over_of_a_complete_run_is_moved_and_not_deleted(toy: ToyRun) -> None:
    complete(toy)
    paths = left_over(toy)

    assert set(repaired(toy).values()) == {""}

    for path in paths:
        assert not path.exists()
        assert (toy.paths.repaired / path.relative_to(toy.root)).read_text() == "{}\n"
    assert planned(toy) == {}


def test_payloads_of_a_stage_that_is_not_complete_are_left(toy: ToyRun) -> None:
    _, payload = left_over(toy)

    plan = plan_repairs(toy.root)

    assert [one.names for one in plan.repairs] == [(TEMPORARY,)]
    assert plan.left == ("1 payloads without an entry: items is incomplete",)
    assert payload.exists()


@pytest.mark.parametrize("alive", ["a recent heartbeat", "an unreadable file"])
def test_nothing_is_taken_away_while_a_worker_may_be_alive(toy: ToyRun, alive: str) -> None:
    complete(toy)
    left_over(toy)
    path = toy.paths.worker("w1")
    if alive == "an unreadable file":
        path.write_text("{")
    os.utime(path)

    plan = plan_repairs(toy.root)

    assert plan.repairs == ()
    assert [words.partition(": ")[2] for words in plan.left] == ["workers may be alive: w1"] * 2


def test_workers_that_left_or_were_silent_for_an_hour_are_not_alive(toy: ToyRun) -> None:
    complete(toy)
    left_over(toy)
    toy.worker("w5").finish()
    toy.worker("w6")
    age(toy.paths.worker("w6"))

    assert planned(toy).keys() == {"aside"}


def test_what_changed_within_the_hour_is_left(toy: ToyRun) -> None:
    complete(toy)
    temporary, payload = left_over(toy)
    os.utime(payload)

    plan = plan_repairs(toy.root)

    assert [one.names for one in plan.repairs] == [(TEMPORARY,)]
    assert plan.left == ("1 payloads without an entry: changed within the last hour",)
    plan_of_before = [*plan.repairs]
    os.utime(temporary)
    assert list(repair_run(toy.root, plan_of_before)) == [
        (TEMPORARY, "left: changed within the last hour")
    ]
    assert temporary.exists()


def test_a_worker_that_came_meanwhile_keeps_everything_in_its_place(toy: ToyRun) -> None:
    complete(toy)
    left_over(toy)
    plan = plan_repairs(toy.root)
    toy.worker("w8")

    assert {outcome for _, outcome in repair_run(toy.root, plan.repairs)} == {
        "left: w8 may be alive"
    }


def many_left_over(toy: ToyRun, count: int) -> list[Path]:
    paths = [toy.root / f".doctor.json.{number:016x}.tmp" for number in range(count)]
    for path in paths:
        path.touch()
    age(*paths)
    return paths


def test_for_many_files_workers_are_looked_at_once(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_left_over(toy, 20)
    plan = plan_repairs(toy.root)
    looks = []

    def look(paths: RunPaths, now_s: float) -> list[str]:
        looks.append(paths)
        return planning.present_workers(paths, now_s)

    monkeypatch.setattr(repairing, "present_workers", look)

    assert {outcome for _, outcome in repair_run(toy.root, plan.repairs)} == {""}
    assert len(looks) == 1


def test_a_worker_that_comes_amid_many_files_keeps_the_rest_in_their_place(toy: ToyRun) -> None:
    paths = many_left_over(toy, 5)
    told = repair_run(toy.root, plan_repairs(toy.root).repairs)

    first = next(told)
    toy.worker("w8")
    rest = [outcome for _, outcome in told]

    assert first[1] == ""
    assert rest == ["left: w8 may be alive"] * 4
    assert [path.exists() for path in paths] == [False, True, True, True, True]


def test_a_payload_that_an_entry_names_meanwhile_comes_back(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(toy)
    _, payload = left_over(toy)
    plan = plan_repairs(toy.root)
    move = files.move_file

    def late(path: Path, to: Path) -> None:
        move(path, to)
        if path == payload:
            assert toy.log().append(f"results/{payload.name}")

    monkeypatch.setattr(files, "move_file", late)

    told = dict(repair_run(toy.root, plan.repairs))

    assert told["stages/items/results/0123456789abcdef.jsonl"] == "left: an entry names it now"
    assert payload.read_text() == "{}\n"


def test_a_payload_that_an_entry_names_later_is_moved_back_by_the_next_repair(
    toy: ToyRun,
) -> None:
    complete(toy)
    _, payload = left_over(toy)
    repaired(toy)
    assert toy.log().append(f"results/{payload.name}")

    (back,) = planned(toy)["back"]
    repaired(toy)

    assert back.names == (str(payload.relative_to(toy.root)),)
    assert payload.read_text() == "{}\n"


def test_two_repairs_of_one_plan_fail_at_nothing(toy: ToyRun) -> None:
    complete(toy)
    left_over(toy)
    plan = plan_repairs(toy.root)

    first = [outcome for _, outcome in repair_run(toy.root, plan.repairs)]
    second = [outcome for _, outcome in repair_run(toy.root, plan.repairs)]

    assert (set(first), set(second)) == ({""}, {"somebody did it meanwhile"})


def test_of_two_repairs_that_move_a_file_at_once_the_later_one_is_content(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(toy)
    left_over(toy)
    plan = plan_repairs(toy.root).repairs
    move = files.move_file

    def late(path: Path, to: Path) -> None:
        move(path, to)
        move(path, to)

    monkeypatch.setattr(files, "move_file", late)

    assert {outcome for _, outcome in repair_run(toy.root, plan)} == {"somebody did it meanwhile"}


@pytest.mark.parametrize("target", ["items/../../../../own", "items/..", "../items/x.jsonl"])
def test_an_entry_that_names_a_file_outside_the_stage_has_nothing_moved(
    toy: ToyRun, target: str
) -> None:
    complete(toy)
    own = toy.root / "own"
    own.write_text("mine")
    (toy.paths.repaired / "stages/items/items").mkdir(parents=True)
    toy.stage_paths.entry(9).symlink_to(target)

    repaired(toy)

    assert own.read_text() == "mine"
    assert not (toy.root.parent / "own").exists()


def test_files_behind_a_linked_directory_are_left(toy: ToyRun) -> None:
    complete(toy)
    other = toy.root.parent / "other"
    results = toy.stage_paths.root / "results"
    results.rename(other)
    results.symlink_to(other)
    own = other / "own.jsonl"
    own.write_text("mine")
    age(own)

    assert planned(toy) == {}


def test_a_head_that_is_a_link_empties_no_other_file(toy: ToyRun, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("mine")
    toy.stage_paths.head.unlink()
    toy.stage_paths.head.symlink_to(own)

    (outcome,) = repaired(toy).values()

    assert outcome.startswith("failed: ")
    assert own.read_text() == "mine"


def test_a_file_in_the_place_of_a_directory_is_told_as_a_failure(toy: ToyRun) -> None:
    shutil.rmtree(toy.paths.control)
    plan = plan_repairs(toy.root)
    toy.paths.control.touch()

    assert dict(repair_run(toy.root, plan.repairs)) == {"control": "failed: File exists"}


def test_a_repair_that_fails_is_told_and_the_others_are_done(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(toy.paths.control)
    toy.stage_paths.head.write_bytes(b"junk")
    plan = plan_repairs(toy.root)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync_directory", full)

    assert dict(repair_run(toy.root, plan.repairs)) == {
        "control": "failed: No space left on device",
        "stages/items/head": "",
    }


def test_claims_whose_directory_cannot_be_made_are_told_in_one_line(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(toy.stage_paths.claims)
    plan = plan_repairs(toy.root)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)

    told = list(repair_run(toy.root, plan.repairs))

    assert told[0] == ("stages/items/claims", "failed: No space left on device")
    assert told[1][0].endswith(" and 1 more")
    assert told[1][1] == "left: stages/items/claims could not be made"
    assert len(told) == 2


def test_an_examination_names_what_can_be_mended(toy: ToyRun) -> None:
    shutil.rmtree(toy.stage_paths.claims)
    toy.stage_paths.head.write_bytes(b"")

    found = [(one.verdict, one.found) for one in plan_repairs(toy.root).findings()]

    assert found[0] == (Verdict.UNSAFE, "missing: stages/items/claims")
    assert found[1][0] is Verdict.UNSAFE
    assert found[1][1].endswith("000001-0.2.lock, stages/items/claims/000001-4.1.lock and 1 more")
    assert found[2][0] is Verdict.SLOWER


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(load_commands("doctor"), ["doctor", *words])
    return done.exit_code, done.output


def test_without_yes_and_a_terminal_the_plan_is_shown_and_nothing_done(toy: ToyRun) -> None:
    toy.stage_paths.head.write_bytes(b"junk")
    before = tree(toy.root)

    code, out = command(str(toy.root), "--repair")

    assert code == 0
    assert "write anew stages/items/head" in out
    assert "nothing was changed; --yes does it" in out
    assert tree(toy.root) == before


def test_with_yes_it_is_done_and_counted(toy: ToyRun) -> None:
    toy.stage_paths.head.write_bytes(b"junk")

    code, out = command(str(toy.root), "--repair", "--yes")

    assert code == 0
    assert out.splitlines()[-1] == "done: 1 of 1"
    assert command(str(toy.root), "--repair") == (0, f"{toy.root}: nothing to repair\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_at_a_terminal_a_person_is_asked(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    toy.stage_paths.head.write_bytes(b"junk")
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)

    doctor(str(toy.root), repair=True)

    assert "Do that? [y/N]" in screen.getvalue()
    assert ("done: 1 of 1" in screen.getvalue()) is (answer == "y")
    assert (toy.stage_paths.head.read_bytes() == b"junk") is (answer != "y")


def test_a_run_of_somebody_else_is_refused_before_the_plan_is_shown(
    toy: ToyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.stage_paths.head.write_bytes(b"junk")
    (toy.root / "run.json").chmod(0o666)

    with pytest.raises(RunError, match="writable by everybody"):
        doctor(str(toy.root), repair=True, yes=True)

    assert capsys.readouterr().out == ""
    assert toy.stage_paths.head.read_bytes() == b"junk"


@pytest.mark.parametrize("yes", [True, False])
def test_as_json_the_plan_and_what_was_done_are_told(toy: ToyRun, yes: bool) -> None:
    toy.stage_paths.head.write_bytes(b"junk")

    code, out = command(str(toy.root), "--repair", "--json", *(["--yes"] if yes else []))

    told = json.loads(out)
    assert code == 0
    assert [(one["kind"], one["names"]) for one in told["repairs"]] == [
        ("head", ["stages/items/head"])
    ]
    assert told["done"] == ([{"name": "stages/items/head", "outcome": "done"}] if yes else [])
    assert (toy.stage_paths.head.read_bytes() == b"junk") is not yes


def test_a_repair_that_failed_exits_with_1(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.stage_paths.head.write_bytes(b"junk")
    monkeypatch.setattr(repairing, "_write_head", lambda *_: "failed: it is damaged again")

    code, out = command(str(toy.root), "--repair", "--yes")

    assert code == 1
    assert "  stages/items/head: failed: it is damaged again" in out


@pytest.mark.parametrize("words", [("--yes",), ("--repair", "--pair", ".")])
def test_options_that_do_not_belong_together_are_refused(
    toy: ToyRun, words: tuple[str, ...]
) -> None:
    done = CliRunner().invoke(load_commands("doctor"), ["doctor", str(toy.root), *words])

    assert isinstance(done.exception, HpcToolkitError)
    assert done.exception.hint


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
    for target in planning.targets(log):
        path = log.root / target
        if path.is_file():
            kept[target] = (0, 0, path.read_bytes())
    return kept


def choose(draw: Draw, root: Path, pattern: str) -> Path | None:
    found = sorted(path for path in root.glob(pattern) if path.is_symlink() or path.is_file())
    return draw(st.sampled_from(found)) if found else None


def delete_one(draw: Draw, root: Path) -> None:
    pattern = draw(
        st.sampled_from(
            ["stages/items/claims/*", "workers/*", "stages/items/head", "stages/items/*/*"]
        )
    )
    if path := choose(draw, root, pattern):
        path.unlink()


def delete_directory(draw: Draw, root: Path) -> None:
    name = draw(
        st.sampled_from(
            [
                *("control", "bandit", "logs", "workers", "stages/items/claims"),
                *("stages/items/results", "stages/items/retries", "stages/items/items"),
                *("stages/items/log", "journals"),
            ]
        )
    )
    shutil.rmtree(root / name, ignore_errors=True)


def cut(draw: Draw, root: Path) -> None:
    if path := choose(draw, root, draw(st.sampled_from(["journals/*", "stages/items/head"]))):
        data = path.read_bytes()
        path.write_bytes(data[: draw(st.integers(0, len(data)))])


def flip(draw: Draw, root: Path) -> None:
    pattern = st.sampled_from(["journals/*", "workers/*.json", "stages/items/head", "stages/*/*/*"])
    path = choose(draw, root, draw(pattern))
    if path is None or path.is_symlink() or not path.stat().st_size:
        return
    data = bytearray(path.read_bytes())
    data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    path.write_bytes(data)
    age(path)


def litter(draw: Draw, root: Path) -> None:
    name = draw(
        st.sampled_from(
            [
                *(TEMPORARY, "bandit/.trials.jsonl.0123456789abcdef.tmp"),
                *("stages/items/results/1.jsonl", "stages/items/items/1.jsonl"),
                *("stages/items/claims/notes", "stages/items/retries/1.json", "journals/notes"),
            ]
        )
    )
    path = root / name
    if path.parent.is_dir():
        path.write_bytes(draw(st.binary(max_size=40)))
        age(path)


DAMAGES: list[Callable[[Draw, Path], None]] = [*(delete_one, delete_directory, cut, flip, litter)]


@pytest.fixture(scope="module")
def models() -> Iterator[dict[bool, Path]]:
    """A run that is complete and one that is not."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        found = {}
        for whole in (False, True):
            toy = worked_run(Path(name, str(whole)))
            if whole:
                complete(toy)
            found[whole] = toy.root
        yield found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_after_any_damage_a_repair_loses_no_result_and_leaves_nothing_to_repair(
    models: dict[bool, Path], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        root = Path(directory, "run")
        shutil.copytree(models[data.draw(st.booleans())], root, symlinks=True)
        for damage in data.draw(st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=4)):
            damage(data.draw, root)
        before, kept = rows_of(root), truth(root)

        told = list(repair_run(root, plan_repairs(root).repairs))

        assert truth(root) == kept
        # Where a reader got nothing it may get something now.
        assert rows_of(root) == before or isinstance(before, str)
        assert [one for one in told if one[1].startswith("failed")] == []
        assert plan_repairs(root).repairs == ()
