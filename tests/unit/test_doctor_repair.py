"""Repairs of a run: what is planned, what is done, and that no result is ever lost by it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.cli.checking import doctor
from hpc_toolkit.doctor.runfiles import plan_repairs, repair_run
from hpc_toolkit.errors import HpcToolkitError, RunError
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import RunPaths
from tests.toyrun import ToyRun, tree

Draw = Any  # as DataObject.draw is: takes a strategy, gives one of its examples
HOURS_AGO_S = 7200
MEMORY = next((name for name in ["/dev/shm"] if Path(name).is_dir()), None)
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


def test_a_run_of_somebody_else_is_refused_before_the_plan_is_shown(
    toy: ToyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.paths.control.rmdir()
    (toy.root / "run.json").chmod(0o666)

    with pytest.raises(RunError, match="world-writable"):
        doctor(str(toy.root), repair=True, yes=True)

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


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield worked_run(Path(name, "model")).root


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_after_any_damage_a_repair_loses_no_result_and_leaves_nothing_to_repair(
    model: Path, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        root = Path(directory, "run")
        shutil.copytree(model, root, symlinks=True)
        for damage in data.draw(st.lists(st.sampled_from(DAMAGES), min_size=1, max_size=4)):
            damage(data.draw, root)
        before, kept = rows_of(root), truth(root)

        told = list(repair_run(root, plan_repairs(root).repairs))

        assert truth(root) == kept
        # Where a reader got nothing it may get something now.
        assert rows_of(root) == before or isinstance(before, str)
        assert [one for one in told if one[1].startswith("failed")] == []
        assert plan_repairs(root).repairs == ()
