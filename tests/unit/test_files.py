"""The one door for writes: exclusive names, whole files, and what a failed call leaves behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.rundir import files, mounts
from tests.toyrun import FAULTS, all_at_once, every_fault


@pytest.mark.parametrize("twins", [False, True])
def test_i6_create_name_has_one_winner_of_many_at_once(tmp_path: Path, twins: bool) -> None:
    twin = [tmp_path / f"w{n}" if twins else None for n in range(16)]
    for n, path in enumerate(twin):
        if path is not None:
            files.create_name(path, f"w{n}")
    answers: list[str] = []

    def take(n: int) -> None:
        answers.append(files.create_name(tmp_path / "name", f"w{n}", twin=twin[n]))

    all_at_once(take, 16)

    assert len(answers) == 16
    assert set(answers) == {os.readlink(tmp_path / "name")}


@pytest.mark.parametrize("refused", [1, 3])
def test_create_name_tries_again_where_a_name_is_refused_and_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """GlusterFS may refuse a name to everybody who races for it, and keep it for nobody."""
    real, left = os.symlink, [refused]

    def symlink(target: str, path: Path) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        real(target, path)

    monkeypatch.setattr(os, "symlink", symlink)
    monkeypatch.setattr("time.sleep", lambda _: None)

    assert files.create_name(tmp_path / "name", "me") == "me"
    assert files.create_name(tmp_path / "name", "other") == "me"


def test_create_name_whose_reply_was_lost_is_known_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.symlink

    def symlink_and_retransmit(target: str, path: Path) -> None:
        real(target, path)
        raise FileExistsError(errno.EEXIST, "sent again")

    monkeypatch.setattr(os, "symlink", symlink_and_retransmit)

    assert files.create_name(tmp_path / "name", "me") == "me"


def test_create_name_gives_a_twin_another_name(tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    files.create_name(twin, "me")

    assert files.create_name(tmp_path / "name", "me", twin=twin) == "me"

    assert os.readlink(tmp_path / "name") == "me"
    assert (tmp_path / "name").lstat().st_ino == twin.lstat().st_ino
    assert files.create_name(tmp_path / "name", "other") == "me"


@pytest.mark.parametrize("hidden", [FileNotFoundError(), ""])
def test_read_name_that_is_invisible_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: Any
) -> None:
    (tmp_path / "name").symlink_to("owner")
    monkeypatch.setattr(os, "readlink", _answering([hidden, hidden, "owner"]))
    monkeypatch.setattr("time.sleep", lambda _: None)

    assert files.read_name(tmp_path / "name") == "owner"


def test_read_name_that_stays_invisible_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)

    with pytest.raises(FileNotFoundError, match="absent"):
        files.read_name(tmp_path / "absent", tries=3)


def _answering(answers: list[Any]) -> Callable[..., Any]:
    def answer(*_: object, **__: object) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return answer


def test_write_all_goes_on_after_short_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    try:
        files.write_all(fd, b"0123456789")
    finally:
        os.close(fd)

    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_i1_write_new_syncs_the_content_and_then_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", note)

    files.write_new(tmp_path / "file", [b"a", b"b"])

    assert synced == [str(tmp_path / "file"), str(tmp_path)]
    assert (tmp_path / "file").read_bytes() == b"ab"


def test_a_file_that_is_replaced_is_synced_once_with_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bytes]] = []
    path, real = tmp_path / "file", os.fsync
    path.write_bytes(b"old")

    def note(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        synced.append(("its directory" if name == str(tmp_path) else "a file", path.read_bytes()))
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    files.replace_file(path, [b"n", b"ew"])
    with files.replacing_file(path) as file:
        file.write(b"newer")

    assert synced == [
        *(("a file", b"old"), ("its directory", b"new")),
        *(("a file", b"new"), ("its directory", b"newer")),
    ]


def test_publish_directory_syncs_the_name_after_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, bool]] = []
    staging, final = tmp_path / "staging", tmp_path / "final"
    staging.mkdir()
    monkeypatch.setattr(files, "sync_directory", lambda path: synced.append((path, final.is_dir())))

    files.publish_directory(staging, final)

    assert synced == [(tmp_path, True)]
    assert not staging.exists()


def test_write_new_refuses_a_taken_name_and_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")

    with pytest.raises(FileExistsError, match="file"):
        files.write_new(tmp_path / "file", [b"new"])

    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("kind", FAULTS, ids=str)
def test_write_new_that_fails_anywhere_leaves_nothing(tmp_path: Path, kind: int | str) -> None:
    for faults in every_fault(kind):
        path = tmp_path / str(faults.at)
        with faults:
            try:
                files.write_new(path, [b"one", b"two"])
            except OSError:
                assert not path.exists()
            else:
                assert path.read_bytes() == b"onetwo"
    assert faults.at > 1


@pytest.mark.parametrize("kind", FAULTS, ids=str)
def test_replace_file_that_fails_anywhere_keeps_the_old_or_has_the_new(
    tmp_path: Path, kind: int | str
) -> None:
    for faults in every_fault(kind):
        path = tmp_path / str(faults.at) / "file"
        path.parent.mkdir()
        path.write_bytes(b"old")
        with faults:
            try:
                files.replace_file(path, [b"n", b"ew"])
            except OSError:
                assert path.read_bytes() in (b"old", b"new")
            else:
                assert path.read_bytes() == b"new"
        assert [found.name for found in path.parent.iterdir()] == ["file"]
    assert faults.at > 1


def test_sync_directory_accepts_a_filesystem_that_cannot_and_reports_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [OSError(errno.EINVAL, "cannot"), OSError(errno.EIO, "broken disk")]
    monkeypatch.setattr(os, "fsync", _answering(answers))

    files.sync_directory(tmp_path)
    with pytest.raises(OSError, match="broken disk"):
        files.sync_directory(tmp_path)


def test_read_fresh_reads_all_of_a_file_larger_than_one_read(tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 3
    (tmp_path / "file").write_bytes(data)

    assert files.read_fresh(tmp_path / "file") == data


def test_write_in_place_keeps_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "head"
    files.write_in_place(path, b"0001\n")
    inode = path.stat().st_ino

    files.write_in_place(path, b"0002\n")

    assert path.read_bytes() == b"0002\n\n"
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("name", ["data", "do nnées", "名前", "latin-\udce9"])
def test_a_shared_filesystem_is_known_whatever_its_directory_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One that was taken for a local disk would get no syncs for other hosts."""
    shared = tmp_path / name
    shared.mkdir()
    point = str(shared).replace(" ", r"\040")
    lines = ["20 1 8:1 / / rw - ext4 /dev/sda rw", f"30 20 0:5 / {point} rw - nfs4 server:/x rw"]
    listed = tmp_path / "mountinfo"
    listed.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr(mounts, "MOUNTINFO", str(listed))
    monkeypatch.delenv("HPCTK_FILESYSTEM", raising=False)

    assert files.filesystem_of(shared) == "nfs4"
    assert not files.is_local(shared)


@pytest.mark.parametrize(
    ("call", "answer", "refusal"),
    [
        ("symlink", OSError(errno.EPERM, "no"), "Operation not permitted"),
        ("readlink", "PROBE", "a symlink's target was changed"),
    ],
)
def test_symlink_refusal_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, answer: Any, refusal: str
) -> None:
    assert files.symlink_refusal(tmp_path) == ""
    monkeypatch.setattr(os, call, _answering([answer]))

    assert files.symlink_refusal(tmp_path) == refusal
