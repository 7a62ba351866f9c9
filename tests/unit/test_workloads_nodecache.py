"""Checkpoints copied once to a local disk of the node, whoever asks and whatever is killed."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.rundir import files
from hpc_toolkit.science.workloads import checkpointfiles
from hpc_toolkit.science.workloads.checkpointfiles import local_copy
from hpc_toolkit.science.workloads.checkpoints import prefetch_checkpoint

Shared = Callable[..., Path]
Disk = Callable[[int], None]
Warned = Callable[[], list[str]]


@pytest.fixture
def shared(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    """Makes checkpoints on what the kernel takes for a shared filesystem; all else is local."""
    root = fast_dir / "shared"

    def make(name: str = "step1", size: int = 1000) -> Path:
        directory = root / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(f"{{}}{name}")
        (directory / "model.safetensors").write_bytes(os.urandom(size))
        return directory

    monkeypatch.setattr(files, "is_local", lambda path: root not in (path, *path.parents))
    monkeypatch.setenv("HPCTK_NODE_CACHE", str(fast_dir / "node"))
    return make


@pytest.fixture
def node(fast_dir: Path) -> Path:
    """Where the copies are."""
    return fast_dir / "node" / "hpctk-checkpoints-1"


@pytest.fixture(autouse=True)
def _nothing_was_said_yet() -> None:
    checkpointfiles._warn.cache_clear()


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was warned of since the test began or asked last."""

    def take() -> list[str]:
        told = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return told

    return take


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were copied so far."""
    made: list[str] = []
    real = files.write_new

    def write_new(path: Path, chunks: Any) -> None:
        made.append(path.name)
        real(path, chunks)

    monkeypatch.setattr(files, "write_new", write_new)
    return made


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def copies(node: Path) -> set[str]:
    return {path.name for path in node.iterdir() if path.is_dir()}


def test_a_checkpoint_is_copied_once_and_read_from_the_copy(
    shared: Shared, node: Path, copied: list[str]
) -> None:
    source = shared()

    for _ in range(3):
        with local_copy(source) as copy:
            assert copy.parent == node
            assert content(copy) == content(source)

    assert sorted(copied) == ["config.json", "model.safetensors"]


def test_a_checkpoint_that_was_written_again_is_copied_again(shared: Shared) -> None:
    source = shared()
    before = copy_of(source)
    (source / "config.json").write_text("other")

    with local_copy(source) as copy:
        assert copy != before
        assert content(copy) == content(source)


@pytest.mark.parametrize("why", ["no cache", "local already"])
def test_without_a_cache_or_need_the_files_stay_where_they_are(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    source = shared()
    if why == "no cache":
        monkeypatch.delenv("HPCTK_NODE_CACHE")
    else:
        monkeypatch.setattr(files, "is_local", lambda _: True)

    assert copy_of(source) == source

    assert not node.is_dir() or not copies(node)


def test_the_copies_used_longest_ago_make_room(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "2500B")
    sources = [shared(f"step{n}") for n in range(3)]
    kept: dict[int, Path] = {}
    for use in (0, 1, 0, 2):
        with local_copy(sources[use]) as copy:
            kept[use] = copy

    assert copies(node) == {kept[0].name, kept[2].name}


def test_a_copy_that_is_being_read_is_never_deleted(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "1500B")
    first, second = shared("step1"), shared("step2")

    with local_copy(first) as reading:
        with local_copy(second) as other:
            assert other == second
        assert content(reading) == content(first)

    with local_copy(second) as copy:
        assert copies(node) == {copy.name}


def test_what_a_killed_process_left_is_cleared_away(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "1500B")
    first, second = shared("step1"), shared("step2")
    with local_copy(first) as copy:
        key, _, size = copy.name.partition("-")
    (node / f"{key}.dead.pin").touch()
    (node / f".{key}-{size}").mkdir()
    (node / f".{key}-{size}" / "model.safetensors").write_bytes(bytes(400))

    with local_copy(second) as copy:
        assert copies(node) == {copy.name}
    assert not list(node.glob("*.pin"))


@pytest.mark.parametrize("half", ["half-made", "partly deleted"])
def test_a_copy_that_is_not_whole_is_made_again(shared: Shared, node: Path, half: str) -> None:
    source = shared()
    copy = copy_of(source)
    if half == "half-made":
        copy.rename(copy.with_name(f".{copy.name}"))
        (node / f".{copy.name}" / "model.safetensors").write_bytes(b"half")
    else:
        (copy / "model.safetensors").unlink()

    with local_copy(source) as again:
        assert again == copy
        assert content(copy) == content(source)
    assert copies(node) == {copy.name}


def test_a_disk_that_is_full_costs_the_copy_alone(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = shared()

    def full(path: Path, chunks: Any) -> None:
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_new", full)
    with caplog.at_level(logging.WARNING), local_copy(source) as copy:
        assert copy == source

    assert "is not copied to this node: [Errno 28]" in caplog.text
    assert copies(node) == set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Says how many of the 10,001 bytes of the node's disk are free."""

    def say(free: int) -> None:
        usage = type("Usage", (), {"free": free, "total": 10_001})
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    return say


def test_a_disk_that_would_be_full_or_of_which_no_tenth_would_stay_free_takes_no_copy(
    shared: Shared, copied: list[str], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shared()
    size = sum(path.stat().st_size for path in source.iterdir())

    disk(size + 1000)
    assert copy_of(source) == source
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "1G")
    disk(size - 1)
    assert copy_of(source) == source
    assert copied == []
    monkeypatch.delenv("HPCTK_NODE_CACHE_SIZE")
    disk(size + 1001)
    assert copy_of(source) != source
    # It gives nothing back.
    disk(1500)
    other = shared("step2")
    assert copy_of(other) == other


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("shared", r"HPCTK_NODE_CACHE: .*/cache is on .*, not a local disk"),
        ("relative", r"HPCTK_NODE_CACHE: 'cache' is not an absolute path"),
        ("unset", r"HPCTK_NODE_CACHE: \$SLURM_TMPDIR is not set on this node"),
        ("open to all", r"HPCTK_NODE_CACHE: .*/node must be owned by you"),
        ("of another", r"HPCTK_NODE_CACHE: .*/node must be owned by you"),
        ("copies of another", r".*/hpctk-checkpoints-1 must be owned by you"),
        ("a link", r".*/hpctk-checkpoints-1 must be owned by you"),
        ("a file", r"HPCTK_NODE_CACHE: .*/node cannot be used: File exists"),
        ("below a file", r"HPCTK_NODE_CACHE: .*/node/cache cannot be used: Not a directory"),
        ("no size", r"HPCTK_NODE_CACHE_SIZE: 'much'"),
    ],
)
def test_a_cache_that_cannot_be_used_costs_a_warning_and_not_the_work(
    shared: Shared,
    node: Path,
    fast_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    warned: Warned,
    broken: str,
    why: str,
) -> None:
    break_cache(broken, node, fast_dir, monkeypatch)
    monkeypatch.chdir(fast_dir)
    sources = [shared(f"step{number}") for number in range(3)]
    before = sorted(fast_dir.rglob("*"))

    for source in sources:
        assert copy_of(source) == source

    (said,) = warned()
    assert re.match(why, said)
    made = set(fast_dir.rglob("*")).difference(before)
    assert made <= {node.parent, fast_dir / "shared" / "cache"}


def break_cache(broken: str, node: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = node.parent
    named = {
        "shared": str(base / "shared" / "cache"),
        "relative": "cache",
        "unset": "$SLURM_TMPDIR/cache",
        "below a file": str(root / "cache"),
    }
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("HPCTK_NODE_CACHE", named.get(broken, str(root)))
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "much" if broken == "no size" else "1G")
    if broken in {"a file", "below a file"}:
        root.write_text("")
        return
    root.mkdir()
    if broken == "open to all":
        root.chmod(0o777)
    elif broken == "of another":
        monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    elif broken == "a link":
        (base / "elsewhere").mkdir()
        node.symlink_to(base / "elsewhere")
    elif broken == "copies of another":
        node.mkdir()
        node.chmod(0o770)


@pytest.mark.parametrize("limited", [True, False])
def test_what_the_cache_did_not_make_is_never_deleted(
    shared: Shared, node: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, limited: bool
) -> None:
    copy_of(shared("step1"))
    theirs = [
        node.parent / "epoch9" / "model.pt",
        node.parent / ".git" / "HEAD",
        node.parent / ("a" * 32) / "weights",
        node / "notes" / "today.txt",
        node / ("a" * 32) / "weights",
        node / f".{'a' * 32}-7.old" / "weights",
    ]
    for path in theirs:
        path.parent.mkdir()
        path.write_text(path.name)
    if limited:
        monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "1500B")
    else:
        disk(10)

    with local_copy(shared("step2")) as copy:
        assert (copy.parent == node) == limited

    assert [path.read_text() for path in theirs] == [path.name for path in theirs]


def copy_of(source: Path) -> Path:
    with local_copy(source) as copy:
        return copy


def test_prefetching_copies_what_the_load_then_finds(
    shared: Shared, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shared()

    prefetch_checkpoint(source.parent, source.name)
    assert len(copied) == 2
    assert copy_of(source) != source

    assert len(copied) == 2
