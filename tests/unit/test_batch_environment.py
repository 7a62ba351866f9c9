"""The archive of a Python environment, and its copy on a node's disk."""

from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from hpc_toolkit.slurm.batch import staging
from hpc_toolkit.slurm.batch.node import StagingError, check_room, stage_paths
from hpc_toolkit.slurm.batch.staging import archive_environment, stage_environment

THING = "import sys\nNAME = 'thing'\n"


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of this process: a module that is compiled, a script, and its own links."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    root = tmp_path / "it's an env"
    venv.create(root, symlinks=True)
    packages = site_packages(root)
    (packages / "thing.py").write_text(THING)
    (packages / "thing-1.dist-info").mkdir()
    os.utime(packages / "thing.py", (1_000_000_000, 1_000_000_000.5))
    subprocess.run([root / "bin/python", "-c", "import thing"], check=True)
    (packages / "alias").symlink_to("thing.py")
    (packages / "same.py").hardlink_to(packages / "thing.py")
    script(root / "bin/tool", f"#!{root}/bin/python\nimport thing; print(thing.__file__)\n")
    script(root / "bin/env", f"#!/bin/sh\n'''exec' '{root}/bin/python' \"$0\"\n' '''\n")
    script(root / "bin/other", f"#!{root}-2/bin/python\n# /x{root}/bin\n")
    (root / "bin/binary").write_bytes(b"\x7fELF\0" + os.fsencode(root))
    monkeypatch.setattr(sys, "prefix", str(root))
    monkeypatch.setattr(sys, "executable", f"{root}/bin/python")
    return root


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def site_packages(root: Path) -> Path:
    (found,) = root.glob("lib/python*/site-packages")
    return found


def answer(*words: str | Path) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def staged(archive: Path, place: Path) -> str:
    """What a node's task says; the copy is below ``place``."""
    return stage_paths([], place, users=0, more=lambda here: stage_environment(archive, here))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "hpctk-17.0" / "n1"


@pytest.fixture
def archive(prefix: Path, tmp_path: Path) -> Path:
    return archive_environment(prefix, tmp_path / "archives")


def test_the_copy_is_an_environment_of_its_own(prefix: Path, archive: Path, place: Path) -> None:
    said = staged(archive, place)

    copy = place / ".environment"
    assert said.startswith("staged the environment: ")
    packages = site_packages(copy)
    cached = next(packages.glob("__pycache__/*"))
    compiled = cached.stat().st_ino
    shown = "import sys, thing; print(sys.prefix, thing.__file__, thing.__cached__)"
    assert answer(copy / "bin/python", "-Pc", shown) == f"{copy} {packages}/thing.py {cached}"
    assert next(packages.glob("__pycache__/*")).stat().st_ino == compiled
    assert copy.stat().st_mode & 0o777 == 0o700
    assert os.readlink(packages / "alias") == "thing.py"
    assert (packages / "same.py").read_text() == THING
    assert os.readlink(copy / "bin/python") == os.readlink(prefix / "bin/python")
    assert (packages / "thing.py").stat().st_mtime == 1_000_000_000
    assert sorted(path.name for path in place.iterdir()) == [".environment", ".users"]
    # Scripts name the copy.
    assert answer(copy / "bin/tool") == f"{packages}/thing.py"
    assert f"'exec' '{copy}/bin/python'" in (copy / "bin/env").read_text().replace("''", "")
    assert (copy / "bin/other").read_text() == (prefix / "bin/other").read_text()
    assert (copy / "bin/binary").read_bytes() == (prefix / "bin/binary").read_bytes()
    activated = f'. "{copy}/bin/activate"; echo "$VIRTUAL_ENV"'
    assert answer("sh", "-c", activated) == str(copy)


@pytest.mark.parametrize("change", ["install", "update", "remove", "pth"])
def test_an_archive_is_used_until_a_package_changes(
    prefix: Path, archive: Path, change: str
) -> None:
    before = archive.stat().st_ino
    assert archive_environment(prefix, archive.parent).stat().st_ino == before
    other = archive.with_name("0123-4567.tar")  # of another environment
    other.touch()
    (archive.parent / f".{archive.name}.17.tmp").touch()  # of a job that was killed

    packages = site_packages(prefix)
    if change == "install":
        (packages / "new-1.dist-info").mkdir()
    elif change == "update":
        os.utime(packages / "thing-1.dist-info", (1, 1))
    elif change == "remove":
        (packages / "thing-1.dist-info").rmdir()
    else:
        (packages / "source.pth").write_text("/src")
    newer = archive_environment(prefix, archive.parent)

    assert newer != archive
    assert sorted(archive.parent.iterdir()) == sorted([newer, other])


def test_an_environment_of_conda_is_archived_without_its_downloads(
    prefix: Path, tmp_path: Path
) -> None:
    (prefix / "pyvenv.cfg").unlink()
    for name in ("conda-meta", "pkgs/cache", "envs/other", "share/pkgs"):
        (prefix / name).mkdir(parents=True)
    (prefix / "conda-meta/python-3.json").touch()

    archive = archive_environment(prefix, tmp_path / "archives")

    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    assert {"conda-meta/python-3.json", "share/pkgs", "bin/python"} <= names
    assert names.isdisjoint({"pkgs", "pkgs/cache", "envs", "envs/other"})
    (prefix / "conda-meta/new-1.json").touch()
    assert archive_environment(prefix, tmp_path / "archives") != archive


def test_of_two_jobs_the_second_uses_the_archive_of_the_first(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends while the second one writes, and removes its draft."""
    write = staging._write
    found: list[Path] = []

    def slowly(root: Path, file: io.BufferedWriter) -> None:
        monkeypatch.setattr(staging, "_write", write)
        found.append(archive_environment(root, tmp_path / "archives"))
        write(root, file)

    monkeypatch.setattr(staging, "_write", slowly)

    second = archive_environment(prefix, tmp_path / "archives")

    assert [second] == found == list((tmp_path / "archives").iterdir())
    assert tarfile.is_tarfile(second)


def test_an_environment_that_changes_meanwhile_is_not_kept(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = staging._write

    def installing(root: Path, file: io.BufferedWriter) -> None:
        write(root, file)
        (site_packages(root) / "new-1.dist-info").mkdir()

    monkeypatch.setattr(staging, "_write", installing)

    with pytest.raises(StagingError, match="was changed while it was archived"):
        archive_environment(prefix, tmp_path / "archives")

    assert list((tmp_path / "archives").iterdir()) == []


def test_a_file_that_disappears_meanwhile_is_left_out(
    prefix: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = staging._below
    monkeypatch.setattr(staging, "_below", lambda root: [*below(root), f"{root}/gone.pyc.17"])

    said = staged(archive_environment(prefix, tmp_path / "archives"), place)

    assert said.startswith("staged the environment")


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("system", "is neither a virtual environment nor one of conda"),
        ("inside", "is inside of the environment"),
        ("foreign", "can be changed by other users"),
        ("shared", "can be changed by other users"),
    ],
)
def test_what_is_not_archived(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, message: str
) -> None:
    directory = tmp_path / "archives"
    if refused == "system":
        (prefix / "pyvenv.cfg").unlink()
    elif refused == "inside":
        directory = prefix / "runs"
    elif refused == "foreign":
        monkeypatch.setattr("hpc_toolkit.slurm.batch.staging.os.geteuid", lambda: 4711)
    else:
        directory.mkdir()
        directory.chmod(0o770)

    with pytest.raises(StagingError, match=message):
        archive_environment(prefix, directory)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    found.size = 1 if kind == tarfile.REGTYPE else 0
    return found


@pytest.mark.parametrize("way", ["above", "absolute", "link", "hard link", "device", "truncated"])
def test_an_archive_that_would_write_elsewhere_is_not_extracted(
    archive: Path, place: Path, tmp_path: Path, way: str
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    members = {
        "above": [member("../../../../victim/file")],
        "absolute": [member(f"{victim}/new")],
        "link": [member("lib", tarfile.SYMTYPE, str(victim)), member("lib/file")],
        "hard link": [member("x", tarfile.LNKTYPE, str(victim / "file")), member("x")],
        "device": [member("null", tarfile.FIFOTYPE)],
    }
    if way == "truncated":
        os.truncate(archive, archive.stat().st_size // 2)
    else:
        with tarfile.open(archive, "w") as tar:
            for one in members[way]:
                tar.addfile(one, io.BytesIO(b"x" * one.size))

    said = staged(archive, place)

    assert said.startswith("warning: the environment is not staged: ")
    assert [path.name for path in place.iterdir()] == [".users"]
    assert (victim / "file").read_text() == "mine"
    assert len(list(victim.iterdir())) == 1


def no_space(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    if member.name.endswith(".py"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    return member


@pytest.mark.parametrize("reason", ["small", "full", "noexec", "interpreter", "gone"])
def test_a_node_without_a_copy_says_why(
    prefix: Path, archive: Path, place: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "small":
        monkeypatch.setattr(staging, "check_room", lambda _, here: check_room(1 << 60, here))
    elif reason == "full":
        monkeypatch.setattr(staging, "_extracted", no_space)
    elif reason == "noexec":
        monkeypatch.setattr("hpc_toolkit.slurm.batch.staging.os.ST_NOEXEC", 0xFFFFFFFF)
    elif reason == "interpreter":
        monkeypatch.setattr(staging, "_TRIAL", "raise SystemExit('broken')")
    else:
        archive.unlink()
    message = {
        "small": "do not fit into",
        "full": "No space left on device",
        "noexec": "is mounted noexec",
        "interpreter": "its interpreter does not work in .*: broken",
        "gone": "No such file",
    }

    said = staged(archive, place)

    assert said.startswith("warning: the environment is not staged: ")
    assert re.search(message[reason], said)
    assert [path.name for path in place.iterdir()] == [".users"]
