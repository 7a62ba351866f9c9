"""A run: made whole or not at all, found, trusted, added to and retried."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError, ItemsError, RunError, WorkloadError
from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir import layout
from hpc_toolkit.rundir.layout import (
    FORMAT,
    Manifest,
    StageSpec,
    WorkloadSpec,
    all_runs,
    find_run,
    read_manifest,
)
from hpc_toolkit.rundir.trust import check_trust, trusted_file
from hpc_toolkit.system.ranks import boot_id, host_name
from tests.toyrun import FAULTS, ToyRun, empty_campaign, every_fault, plain_items, spec_of
from tests.unit.jobcommands import call

NOOP = "hpc_toolkit.science.workloads.synthetic:Noop"


def made(root: Path, **changes: Any) -> Run:
    return Run.create(root, **{"items": plain_items(3), "workload": NOOP, **changes})


def test_create_makes_a_sealed_run_that_can_be_opened(tmp_path: Path) -> None:
    made(tmp_path / "deep" / "run")

    run = Run.open(tmp_path / "deep" / "run")
    status = run.status()

    assert status.stages["items"].total == 3
    assert status.stages["items"].sealed
    assert run.manifest.provenance["hpctk"]
    assert f"numpy=={metadata.version('numpy')}" in run.manifest.provenance["packages"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run"]


@pytest.mark.parametrize("call", [Run.seal, lambda run: run.add([{"id": 1}], stage="tasks")])
def test_a_campaign_is_sealed_and_filled_by_the_coordinator_alone(
    tmp_path: Path, call: Callable[[Run], object]
) -> None:
    run = empty_campaign(tmp_path / "toy")

    with pytest.raises(RunError, match="toy is a campaign: only its coordinator adds") as caught:
        call(run)

    assert "hpctk submit campaign --run" in caught.value.hint
    assert not any(stage.sealed for stage in run.status().stages.values())


@pytest.mark.parametrize(
    ("make", "name", "problem"),
    [
        (Path.mkdir, "run", "run exists"),
        (Path.touch, "run", "run exists"),
        (lambda p: p.symlink_to("nowhere"), "run", "run exists"),
        (Path.touch, "run/below", r"cannot make .*run/below: (Not a directory|File exists)"),
    ],
)
def test_create_refuses_a_name_that_is_taken(
    tmp_path: Path, make: Callable[[Path], object], name: str, problem: str
) -> None:
    make(tmp_path / "run")

    with pytest.raises(RunError, match=problem) as caught:
        made(tmp_path / name)

    assert name != "run" or "hpctk work" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"items": []}, ItemsError, "the list of items is empty"),
        ({"items": [{"a": 1}, {"a": 1}]}, ItemsError, "item 1 is a duplicate"),
        ({"workload": None, "command": " \n"}, ConfigError, "the command is empty"),
        (
            {"workload": None, "command": "true", "options": {"x": 1}},
            ConfigError,
            "options are for classes, not for a command",
        ),
        ({"group_by": "layer"}, ItemsError, "item 0 has no key 'layer'"),
        ({"workload": None}, ConfigError, "either a workload or a command"),
        ({"command": "true"}, ConfigError, "either a workload or a command"),
        ({"workload": "nothing"}, WorkloadError, "is not MODULE:NAME"),
        ({"options": {"a": 1}}, WorkloadError, "is a function; options are for classes"),
        ({"items": [{1: "a", "1": "b"}]}, ItemsError, "item 0 is not a dict with text as its keys"),
        ({"items": [{"a": {}}, {"a": {0: 1}}]}, ItemsError, r"item 1 is not a dict .*: {'a': {0"),
        ({"items": [["a"]]}, ItemsError, r"item 0 is not a dict .*: \['a'\]"),
        ({"items": "ab"}, ItemsError, "item 0 is not a dict .*: 'a'"),
        ({"options": 5}, TypeError, "'int' object is not iterable"),
        ({"options": {"a": date(2020, 1, 1)}}, ConfigError, "options: 'a': .*date"),
        ({"max_attempts": 2.5}, TypeError, "2.5 is not of type int"),
        ({"items_per_claim": 1.5}, TypeError, "1.5 is not of type int or null"),
        ({"timeout_s": "5"}, TypeError, "'int' and 'str'"),
        ({"max_failures": 5}, TypeError, "5 is not of type str or null"),
        ({"max_attempts": 0}, ConfigError, "max_attempts must be at least 1, got 0"),
        ({"timeout_s": 0.0}, ConfigError, "timeout must be a positive number of seconds, got 0"),
        ({"timeout_s": float("inf")}, ConfigError, "timeout must be a positive .*, got inf"),
        ({"max_failures": "many"}, ConfigError, "'many' is neither a count nor a share"),
    ],
)
def test_create_refuses_what_cannot_work_and_makes_nothing(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], problem: str
) -> None:
    with pytest.raises(kind, match=problem) as caught:
        made(tmp_path / "run", **changes)

    assert isinstance(caught.value, ValueError | TypeError | WorkloadError)
    assert list(tmp_path.iterdir()) == []


def test_create_refuses_a_filesystem_without_symlinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "symlink", refuse)

    with pytest.raises(
        RunError, match=r"symbolic links do not work on this filesystem \(Operation not supported"
    ):
        made(tmp_path / "run")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", FAULTS, ids=str)
def test_create_that_fails_anywhere_leaves_a_whole_run_or_nothing(
    fast_dir: Path, kind: int | str
) -> None:
    manifest = Manifest(run="run", stages=(spec_of("first"), spec_of("second")))
    items = {"first": plain_items(3), "second": plain_items(2)}
    for faults in every_fault(kind):
        parent = fast_dir / str(faults.at)
        parent.mkdir()
        failed = False
        with faults:
            try:
                create_run(parent / "run", manifest, items, sealed=True)
            except RunError as error:
                failed = str(parent) in error.message and bool(error.hint)
        left = [path.name for path in parent.iterdir()]
        assert left in ([[], ["run"]] if failed else [["run"]])
        if left:
            counts = Run.open(parent / "run").status().stages
            assert [counts[name].total for name in ("first", "second")] == [3, 2]
            assert all(count.sealed for count in counts.values())
    assert faults.at > 1


def test_add_refuses_an_item_that_is_there(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 2, unit=1, sealed=False)

    with pytest.raises(ItemsError, match="item 1 is a duplicate"):
        toy.reopen().add([{"id": 7}, {"id": 1}])

    assert toy.log().length == 1


def test_retry_of_one_item_leaves_the_others(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 3, unit=2, max_attempts=1)
    toy.worker("w").work(toy.unit_name(0), 1, i0="failed", i1="failed")

    assert toy.reopen().retry(item="1") == 1
    assert toy.states() == {(1, 0): "failed", (1, 1): "pending", (1, 2): "pending"}
    assert toy.reopen().retry(item="2") == 0
    with pytest.raises(ItemsError, match="no item is or contains '3'"):
        toy.reopen().retry(item="3")


def test_retry_lifts_failures_and_gives_a_full_budget(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 2, unit=2, max_attempts=2)
    worker = toy.worker("w")
    worker.work(toy.unit_name(0), 1, i0="failed", i1="permanent")
    worker.work(toy.unit_name(0), 2, i0="failed")
    assert set(toy.states().values()) == {"failed"}

    assert toy.reopen().retry() == 2
    assert set(toy.states().values()) == {"pending"}
    worker.work(toy.unit_name(0), 3, i0="failed", i1="done")

    assert toy.states() == {(1, 0): "pending", (1, 1): "done"}
    worker.work(toy.unit_name(0), 4, i0="failed")
    assert toy.states()[1, 0] == "failed"
    assert toy.rows()[0]["attempts"] == 2


def test_retry_match_names_items_by_their_json_or_error(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 3, unit=3, max_attempts=1)
    worker = toy.worker("w")
    worker.claim(toy.unit_name(0))
    worker.attempt(0, "failed", error="CUDA out of memory")
    worker.attempt(1, "failed", error="no such file")
    worker.attempt(2, "failed", error="no such file")
    worker.release()

    assert toy.reopen().retry(match="out of memory") == 1
    assert toy.states()[1, 0] == "pending"
    assert toy.reopen().retry(match='"id":2') == 1
    assert toy.states()[1, 1] == "failed"
    assert toy.reopen().retry(match="nothing like it") == 0


def test_an_unknown_stage_names_the_near_miss(toy: ToyRun) -> None:
    with pytest.raises(RunError, match="has no stage 'itmes'") as caught:
        toy.reopen().results(stage="itmes")

    assert caught.value.hint == "did you mean 'items'?"


@pytest.mark.parametrize("call", ["add", "seal", "retry", "work"])
def test_whatever_runs_or_changes_a_run_refuses_one_that_others_can_write(
    toy: ToyRun, call: str
) -> None:
    toy.root.chmod(0o777)

    with pytest.raises(RunError, match="is world-writable"):
        getattr(toy.reopen(), call)(*([[{"id": 9}]] if call == "add" else []))


def test_a_run_that_the_group_can_write_is_named_once(
    toy: ToyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.root.chmod(0o775)

    toy.reopen().retry()

    assert "warning: " in capsys.readouterr().err


def test_i4_a_drain_reaches_a_worker_whose_clock_is_a_day_behind(toy: ToyRun) -> None:
    toy.worker("far", host="far", at=time.time() - 86_400)
    toy.worker("gone", host=host_name(), boot=boot_id())
    toy.worker("left", host="far").finish()

    assert toy.reopen().drain() == 1

    (request,), _ = ControlReader(toy.paths).poll()
    assert request.workers == {"far"}


WORKLOAD = WorkloadSpec(function="m:f", options={"a": [1]}, path=("/x",))
LIMITS: dict[str, Any] = {"max_attempts": 7, "timeout_s": 2.5, "max_failures": "5%"}
LIMITS |= {"no_retry": "timeout", "items_per_claim": 4}
FULL = Manifest(
    run="r",
    stages=(
        StageSpec(name="items", workload=WORKLOAD, group_by="g", **LIMITS),
        StageSpec(name="more", workload=WorkloadSpec(command="echo {a}")),
    ),
    campaign={"name": "c"},
    provenance={"python": "3.11"},
)


def written(root: Path, content: bytes) -> Path:
    (root / "run.json").write_bytes(content)
    return root


def changed(**keys: Any) -> bytes:
    """The manifest with other values; None removes a key."""
    record = {**json.loads(FULL.to_bytes()), **keys}
    return json.dumps({key: one for key, one in record.items() if one is not None}).encode()


def with_stages(**keys: Any) -> bytes:
    stages = [{**stage, **keys} for stage in json.loads(FULL.to_bytes())["stages"]]
    return changed(stages=[{k: v for k, v in one.items() if v != "absent"} for one in stages])


def test_a_manifest_of_an_earlier_version_retries_timeouts(tmp_path: Path) -> None:
    old = with_stages(no_retry="absent", items_per_claim="absent")

    manifest = read_manifest(written(tmp_path, old))

    assert [stage.no_retry for stage in manifest.stages] == [None, None]


def test_what_is_not_a_run_is_refused_and_the_run_nearby_named(tmp_path: Path) -> None:
    root = written(tmp_path, FULL.to_bytes())
    (tmp_path / "file").touch()
    (tmp_path / "other/run.json").mkdir(parents=True)
    (tmp_path / "empty").mkdir()

    for path, message, hint in (
        (tmp_path / "empty", r"is not a run: it has no run\.json", "hpctk init"),
        (tmp_path / "other", r"run\.json: Is a directory", "permissions"),
        (tmp_path / "file", "file is a file, not a run", "name the run's directory; -o names"),
        (root / "run.json", r"run\.json is a file, not a run", f"name the run's directory: {root}"),
    ):
        with pytest.raises(RunError, match=message) as caught:
            read_manifest(path)
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        *((text, "is damaged", "") for text in (FULL.to_bytes()[:-20], b"[]", b"\xff\xfe")),
        (changed(stages=[{"name": "items"}]), "is damaged", ""),
        (changed(provenance=None), "is damaged", ""),
        # The name of a stage is that of a directory of the run.
        *(
            (with_stages(name=name), "is damaged: (Value|Type)Error", "")
            for name in ("../../../outside", "/outside", "..", "", "a.b", "a\n", "x" * 65, 7)
        ),
        (changed(format=FORMAT + 1), f"format {FORMAT + 1}; .* reads .* up to {FORMAT}", "upgrade"),
    ],
)
def test_a_damaged_manifest_and_one_of_a_newer_format_are_refused(
    tmp_path: Path, content: bytes, message: str, hint: str
) -> None:
    with pytest.raises(RunError, match=rf"run\.json.* {message}") as caught:
        read_manifest(written(tmp_path, content))

    assert caught.value.hint
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [(errno.ENOTCONN, 75), (errno.ESHUTDOWN, 75), (errno.EDQUOT, 75), (errno.EACCES, 1)],
)
def test_a_run_whose_filesystem_does_not_answer_is_worth_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(layout, "read_fresh", refuse)

    with pytest.raises(RunError, match=re.escape(os.strerror(code))) as caught:
        read_manifest(tmp_path)

    assert caught.value.exit_code == exit_code
    assert ("try again" in caught.value.hint) == (exit_code == 75)


@pytest.mark.parametrize("which", ["", "run.json"])
def test_a_run_of_ones_own_is_trusted_unless_everybody_can_write_it(
    tmp_path: Path, which: str
) -> None:
    written(tmp_path, FULL.to_bytes())
    tmp_path.chmod(0o755)
    assert check_trust(tmp_path) == ""
    tmp_path.chmod(0o775)
    assert "writable by its group" in check_trust(tmp_path)

    (tmp_path / which).chmod(0o777)

    with pytest.raises(RunError, match="world-writable") as caught:
        check_trust(tmp_path)
    assert caught.value.hint == f"chmod o-w {str(tmp_path / which)!r}"


def test_check_trust_refuses_the_run_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, FULL.to_bytes())
    owner = tmp_path.stat().st_uid or 4711
    if tmp_path.stat().st_uid == 0:
        os.chown(tmp_path, owner, -1)
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)

    with pytest.raises(RunError, match=f"belongs to user {owner}") as caught:
        check_trust(tmp_path)
    assert f"hpctk trust {str(tmp_path)!r}" in caught.value.hint
    assert "create your own run" in caught.value.hint


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of another user, below a directory of runs; the settings are those of this user."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    root = tmp_path / "group" / "runs" / "a"
    root.mkdir(parents=True)
    written(root, FULL.to_bytes())
    if os.getuid() != 0:
        pytest.skip("giving a run away needs root")
    os.chown(root, pwd.getpwnam("nobody").pw_uid, -1)
    return root


@pytest.mark.parametrize("words", [("{run}",), ("{run}/../..",), ("--owner", "nobody")])
def test_a_trusted_run_is_accepted_until_it_is_removed(
    foreign: Path, words: tuple[str, ...]
) -> None:
    words = tuple(word.format(run=foreign) for word in words)

    said = call("trust", *words)

    assert (said.exit_code, len(said.stdout.splitlines())) == (0, 1)
    assert check_trust(foreign) == ""
    trusted_file().chmod(0o664)
    with pytest.raises(ConfigError, match="can be changed by other users"):
        check_trust(foreign)
    trusted_file().chmod(0o600)
    assert call("trust", *words, "--remove").stdout == ""
    with pytest.raises(RunError, match="belongs to user"):
        check_trust(foreign)


def test_a_run_is_the_argument_the_variable_or_the_only_one_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no run is named.* contains: none"):
        find_run(None, {})
    (tmp_path / "runs/no-run").mkdir(parents=True)
    (tmp_path / "runs/b").mkdir()
    written(tmp_path / "runs/b", FULL.to_bytes())

    assert find_run("given", {"HPCTK_RUN": "named"}) == Path("given")
    assert find_run(None, {"HPCTK_RUN": "named"}) == Path("named")
    assert find_run(None, {}) == Path("runs/b")

    (tmp_path / "runs/a").mkdir()
    written(tmp_path / "runs/a", FULL.to_bytes())
    assert all_runs() == [Path("runs/a"), Path("runs/b")]
    with pytest.raises(ConfigError, match="contains: runs/a, runs/b") as caught:
        find_run(None, {})
    assert "HPCTK_RUN" in caught.value.hint
