"""Copies on a node's disk: whole, of this user alone, and none where something is wrong."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from hpc_toolkit.cli import load_commands
from hpc_toolkit.slurm.batch.node import StagingError, stage_paths

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory as models come: links to files that lie elsewhere."""
    blobs, root = tmp_path / "blobs", tmp_path / "it's a corpus"
    (root / "deep").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "weights").write_bytes(b"w" * 1000)
    (root / "weights").symlink_to("../blobs/weights")
    (root / "deep" / "tokens").write_text("tokens")
    (root / "deep").chmod(0o555)
    return root


def place(tmp_path: Path, restart: int = 0) -> Path:
    return tmp_path / f"hpctk-17.{restart}" / "n1"


def test_copies_hold_what_links_name_and_tell_their_users(source: Path, tmp_path: Path) -> None:
    target = place(tmp_path)

    told = stage_paths([source, source / "deep/tokens"], target, users=2)

    assert told.startswith("staged it's a corpus, tokens: 1012 B in ")
    assert (target / source.name / "weights").read_bytes() == b"w" * 1000
    assert not (target / source.name / "weights").is_symlink()
    assert (target / "tokens").read_text() == "tokens"
    assert sorted(path.name for path in (target / ".users").iterdir()) == ["0", "1"]


def test_copies_can_be_removed_whatever_rights_the_source_has(source: Path, tmp_path: Path) -> None:
    stage_paths([source], place(tmp_path), users=1)

    assert (place(tmp_path) / source.name / "deep").stat().st_mode & 0o777 == 0o700
    assert place(tmp_path).stat().st_mode & 0o777 == 0o700


def test_what_an_earlier_start_left_is_removed_and_another_jobs_is_not(
    source: Path, tmp_path: Path
) -> None:
    stage_paths([source], place(tmp_path, 0), users=1)
    stage_paths([source], place(tmp_path, 1), users=1)
    other = tmp_path / "hpctk-18.0" / "n1"
    stage_paths([source], other, users=1)

    stage_paths([source], place(tmp_path, 2), users=1)

    assert not place(tmp_path, 0).parent.exists()
    assert not place(tmp_path, 1).parent.exists()
    assert other.exists()


def test_a_start_that_broke_off_is_begun_anew(source: Path, tmp_path: Path) -> None:
    place(tmp_path).mkdir(parents=True)
    (place(tmp_path) / "half").touch()

    stage_paths([source], place(tmp_path), users=1)

    assert not (place(tmp_path) / "half").exists()


def test_a_disk_without_the_room_is_told_and_left_as_it_was(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("hpc_toolkit.slurm.batch.node.shutil.disk_usage", lambda _: usage)

    with pytest.raises(StagingError, match=r"1006 B do not fit into 1000 B at .*n1"):
        stage_paths([source], place(tmp_path), users=1)

    assert not place(tmp_path).exists()


@pytest.mark.parametrize("make", ["missing", "dangling", "circle"])
def test_what_cannot_be_copied_is_named(tmp_path: Path, make: str) -> None:
    root = tmp_path / "data"
    root.mkdir()
    if make == "missing":
        root = tmp_path / "missing"
    else:
        (root / "link").symlink_to("nowhere" if make == "dangling" else ".")

    with pytest.raises(StagingError, match=r"cannot stage .*(missing|link)"):
        stage_paths([root], place(tmp_path), users=1)

    assert not place(tmp_path).exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device"])
def test_what_is_neither_file_nor_directory_is_refused_before_anything_is_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = source / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = type(source)("/dev/null")  # /dev/zero has no end
    else:
        path.symlink_to("/dev/null")
    monkeypatch.setattr(
        "hpc_toolkit.slurm.batch.node.shutil.copyfile", lambda *_: pytest.fail("copied")
    )

    with pytest.raises(StagingError, match=r"cannot stage .*(odd|null): it is neither a file nor"):
        stage_paths(
            [source / "weights", source if kind != "device" else path], place(tmp_path), users=1
        )

    assert not place(tmp_path).parent.exists()


def test_a_copying_that_fails_is_told_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("hpc_toolkit.slurm.batch.node.shutil.copyfile", broken)

    with pytest.raises(StagingError, match=r"cannot copy to .*Input/output error: .*tokens"):
        stage_paths([source], place(tmp_path), users=1)

    assert not place(tmp_path).parent.exists()


def test_a_copying_that_is_ended_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise SystemExit(143)

    monkeypatch.setattr("hpc_toolkit.slurm.batch.node.shutil.copyfile", ended)

    with pytest.raises(SystemExit):
        stage_paths([source], place(tmp_path), users=1)

    assert not place(tmp_path).parent.exists()


def test_a_directory_of_somebody_else_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path).parent.mkdir()
    monkeypatch.setattr("hpc_toolkit.slurm.batch.node.os.geteuid", lambda: 4711)

    with pytest.raises(StagingError, match=r"hpctk-17.0 belongs to another user"):
        stage_paths([source], place(tmp_path), users=1)


def test_copies_lie_where_the_script_looks_for_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_HOST", "elsewhere")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr("signal.signal", lambda *_: None)

    ended = CliRunner().invoke(
        load_commands("stage"), ["stage", str(tmp_path / "hpctk-17.0"), str(source)]
    )

    assert ended.exit_code == 0, ended.output
    assert ended.output.startswith("n1: staged it's a corpus")
    assert (place(tmp_path) / source.name / "weights").exists()
