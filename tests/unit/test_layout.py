"""Where a run lies, what run.json says, and whose code it may name."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError, RunError
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
from tests.unit.jobcommands import call

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
        (
            changed(format=FORMAT + 1),
            f"format {FORMAT + 1}; this hpctk reads .* up to {FORMAT}",
            "upgrade",
        ),
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
