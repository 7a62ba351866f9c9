"""The one door for writes: exclusive names, whole files, and what a failed call leaves behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.rundir import files, trust
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


@pytest.mark.parametrize(("refused", "made"), [(1, False), (3, False), (1, True)])
def test_create_name_that_is_refused_without_an_owner_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, *, made: bool
) -> None:
    """GlusterFS may refuse a name to everybody who races for it, and keep it for nobody; the
    reply to a request that made the name may be lost."""
    real, left = os.symlink, [refused]

    def symlink(target: str, path: Path) -> None:
        left[0] -= 1
        if left[0] < 0 or made:
            real(target, path)
        if left[0] >= 0:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    monkeypatch.setattr(os, "symlink", symlink)
    monkeypatch.setattr("time.sleep", lambda _: None)

    assert files.create_name(tmp_path / "name", "me") == "me"
    assert files.create_name(tmp_path / "name", "other") == "me"


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
    monkeypatch.undo()
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


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """What is synced, each time with the content that ``file`` then has."""
    found: list[tuple[str, bytes]] = []
    path, real = tmp_path / "file", os.fsync

    def note(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        content = path.read_bytes() if path.is_file() else b""
        found.append(("its directory" if name == str(tmp_path) else "a file", content))
        real(fd)

    monkeypatch.setattr(os, "fsync", note)
    return found


def test_i1_write_new_syncs_the_content_and_then_its_name(
    tmp_path: Path, synced: list[tuple[str, bytes]]
) -> None:
    files.write_new(tmp_path / "file", [b"a", b"b"])

    assert synced == [("a file", b"ab"), ("its directory", b"ab")]


def test_a_file_that_is_replaced_is_synced_once_with_its_new_name(
    tmp_path: Path, synced: list[tuple[str, bytes]]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    files.replace_file(path, [b"n", b"ew"])
    with files.replacing_file(path) as file:
        file.write(b"newer")

    assert synced == [
        *(("a file", b"old"), ("its directory", b"new")),
        *(("a file", b"new"), ("its directory", b"newer")),
    ]


def test_a_published_directory_is_synced_after_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging, final = tmp_path / "staging", tmp_path / "final"
    staging.mkdir()
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(files, "sync_directory", lambda path: synced.append((path, final.is_dir())))

    files.publish_directory(staging, final)

    assert (synced, staging.exists()) == ([(tmp_path, True)], False)


@pytest.mark.parametrize("write", [files.write_new, files.replace_file])
@pytest.mark.parametrize("kind", FAULTS, ids=str)
def test_a_write_that_fails_anywhere_leaves_the_old_or_has_the_new(
    tmp_path: Path, kind: int | str, write: Callable[..., None]
) -> None:
    before = [b"old"] if write is files.replace_file else []
    for faults in every_fault(kind):
        path = tmp_path / str(faults.at) / "file"
        path.parent.mkdir()
        for data in before:
            path.write_bytes(data)
        with faults:
            try:
                write(path, [b"n", b"ew"])
            except OSError:
                allowed = [before, [b"new"]] if before else [[]]
            else:
                allowed = [[b"new"]]
        assert [found.read_bytes() for found in path.parent.iterdir()] in allowed
    assert faults.at > 1


def test_sync_directory_accepts_a_filesystem_that_cannot_and_reports_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [OSError(errno.EINVAL, "cannot"), OSError(errno.EIO, "broken disk")]
    monkeypatch.setattr(os, "fsync", _answering(answers))

    files.sync_directory(tmp_path)
    with pytest.raises(OSError, match="broken disk"):
        files.sync_directory(tmp_path)


def test_a_large_file_is_read_completely_a_taken_one_refused_and_one_written_in_place(
    tmp_path: Path,
) -> None:
    path, data = tmp_path / "file", os.urandom(1 << 20) * 3
    path.write_bytes(data)
    inode = path.stat().st_ino

    with pytest.raises(FileExistsError, match="file"):
        files.write_new(path, [b"new"])
    assert files.read_fresh(path) == data
    os.truncate(path, 0)
    for text in (b"0001\n", b"0002\n"):
        files.write_in_place(path, text)

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
    monkeypatch.setattr(trust, "MOUNTINFO", str(listed))
    monkeypatch.delenv("HPCTK_FILESYSTEM", raising=False)

    assert trust.mount_of(shared).kind == "nfs4"
    assert not trust.is_local(shared)


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
