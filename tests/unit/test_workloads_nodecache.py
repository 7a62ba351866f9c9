"""Checkpoints copied once to a local disk of the node, whoever asks and whatever is killed."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock, Timeout

from hpc_toolkit import files
from hpc_toolkit.errors import ConfigError, PermanentError
from hpc_toolkit.workloads import nodecache, prefetch
from hpc_toolkit.workloads.nodecache import NodeCache, local_copy
from hpc_toolkit.workloads.prefetch import prefetch_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Shared = Callable[..., Path]


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
    return fast_dir / "node"


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


def test_links_are_copied_as_what_they_lead_to(shared: Shared, fast_dir: Path) -> None:
    blob = shared("blobs")
    snapshot = fast_dir / "shared" / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(blob / "model.safetensors")

    with local_copy(snapshot) as copy:
        assert not (copy / "model.safetensors").is_symlink()
        assert content(copy) == content(snapshot)


def test_a_checkpoint_that_was_written_again_is_copied_again(shared: Shared) -> None:
    source = shared()
    with local_copy(source) as copy:
        before = copy
    (source / "config.json").write_text("other")

    with local_copy(source) as copy:
        assert copy != before
        assert content(copy) == content(source)


def test_of_many_who_ask_at_once_one_copies_and_all_read_the_copy(
    shared: Shared, copied: list[str]
) -> None:
    source = shared(size=300_000)
    seen: list[Path] = []
    ready = threading.Barrier(6)

    def ask() -> None:
        ready.wait()
        with local_copy(source) as copy:
            assert content(copy) == content(source)
            seen.append(copy)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seen) == 6
    assert len(set(seen)) == 1
    assert len(copied) == 2


def test_others_wait_while_a_copy_is_made(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    real = files.write_new

    def write_new(path: Path, chunks: Any) -> None:
        key = path.parent.name.removeprefix(".")
        with pytest.raises(Timeout), FileLock(node / f"{key}.lock", timeout=0):
            pass
        refused.append(path.name)
        real(path, chunks)

    monkeypatch.setattr(files, "write_new", write_new)

    with local_copy(shared()):
        pass

    assert len(refused) == 2


@pytest.mark.parametrize("why", ["no cache", "local already"])
def test_without_a_cache_or_need_the_files_stay_where_they_are(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    source = shared()
    if why == "no cache":
        monkeypatch.delenv("HPCTK_NODE_CACHE")
    else:
        monkeypatch.setattr(files, "is_local", lambda _: True)

    with local_copy(source) as copy:
        assert copy == source

    assert not node.is_dir() or not copies(node)


def test_the_copies_used_longest_ago_make_room(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "2500")
    sources = [shared(f"step{n}") for n in range(3)]
    kept: dict[int, Path] = {}
    for use in (0, 1, 0, 2):
        with local_copy(sources[use]) as copy:
            kept[use] = copy

    assert copies(node) == {kept[0].name, kept[2].name}


def test_a_copy_that_is_being_read_is_never_deleted(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "1500")
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
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "1500")
    first, second = shared("step1"), shared("step2")
    with local_copy(first) as copy:
        key = copy.name
    (node / f"{key}.dead.pin").touch()
    (node / f".{key}").mkdir()
    (node / f".{key}" / "model.safetensors").write_bytes(bytes(400))

    with local_copy(second) as copy:
        assert copies(node) == {copy.name}
    assert not list(node.glob("*.pin"))


def test_a_half_made_copy_of_its_own_is_made_again(shared: Shared, node: Path) -> None:
    source = shared()
    key = nodecache._key(source, nodecache._listing(source))
    (node / f".{key}").mkdir(parents=True)
    (node / f".{key}" / "model.safetensors").write_bytes(b"half")

    with local_copy(source) as copy:
        assert content(copy) == content(source)
    assert copies(node) == {key}


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

    assert "is not copied: [Errno 28]" in caplog.text
    assert copies(node) == set()


def test_a_disk_of_which_a_tenth_would_not_stay_free_takes_no_copy(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shared()
    free = sum(path.stat().st_size for path in source.iterdir()) + 1000

    def disk(_: Path) -> Any:
        return type("Usage", (), {"free": free, "total": 10_001})

    monkeypatch.setattr(shutil, "disk_usage", disk)

    with local_copy(source) as copy:
        assert copy == source
    free += 1
    with local_copy(source) as copy:
        assert copy != source


def test_files_that_change_while_they_are_copied_are_not_kept(
    shared: Shared, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shared()
    real = files.write_new

    def write_new(path: Path, chunks: Any) -> None:
        real(path, chunks)
        (source / "config.json").write_text("meanwhile")

    monkeypatch.setattr(files, "write_new", write_new)

    with local_copy(source) as copy:
        assert copy == source
    assert copies(node) == set()


def test_a_cache_that_is_shared_between_nodes_is_refused(shared: Shared, fast_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"HPCTK_NODE_CACHE: .*/cache is on .*, not a local disk"):
        NodeCache(fast_dir / "shared" / "cache")


def test_a_cache_that_others_may_write_to_is_refused(shared: Shared, node: Path) -> None:
    node.mkdir()
    node.chmod(0o777)

    with pytest.raises(ConfigError, match="or anybody may write there"), local_copy(shared()):
        pass


def test_a_size_that_is_none_is_refused(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTK_NODE_CACHE_SIZE", "much")

    with pytest.raises(ConfigError, match="HPCTK_NODE_CACHE_SIZE: 'much'"), local_copy(shared()):
        pass


def test_no_lock_is_held_once_a_copy_is_closed(shared: Shared, node: Path) -> None:
    with local_copy(shared()):
        assert len(list(node.glob("*.pin"))) == 1

    assert not list(node.glob("*.pin"))
    with ExitStack() as stack:
        for path in node.glob("*lock"):
            stack.enter_context(FileLock(path, timeout=0))


def test_prefetching_copies_what_the_load_then_finds(
    shared: Shared, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shared()

    prefetch_checkpoint(source.parent, source.name)
    assert len(copied) == 2
    with local_copy(source) as copy:
        assert copy != source

    assert len(copied) == 2


def test_prefetching_without_a_cache_reads_every_file_ahead(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shared()
    monkeypatch.delenv("HPCTK_NODE_CACHE")
    ahead: list[str] = []
    monkeypatch.setattr(prefetch, "_read_ahead", lambda path: ahead.append(path.name))

    prefetch_checkpoint(source.parent, source.name)

    assert sorted(ahead) == ["config.json", "model.safetensors"]


def test_prefetching_what_is_not_there_says_nothing(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch_checkpoint(shared().parent, "step9")

    def refuse(*_: object) -> Path:
        message = "gone"
        raise PermanentError(message)

    monkeypatch.setattr(prefetch, "locate", refuse)
    prefetch_checkpoint("anywhere", "step1")
