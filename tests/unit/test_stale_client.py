"""Small files that are rewritten are seen by a client that compares nothing but their size."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hpc_toolkit.doctor.sides import Channel
from hpc_toolkit.queue.presence import DRAINING, FINISHED, Presence, PresenceFile, read_presence
from hpc_toolkit.rundir import files
from tests.toyrun import ToyRun

ROUNDS = 200
"""More rewrites than a file has sizes."""


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    StaleClient(monkeypatch)


def test_heartbeats_within_one_tick_of_the_server_are_seen(fast_dir: Path) -> None:
    path = fast_dir / "w.json"
    file = PresenceFile(path, Presence(worker="w", host="h", boot="b", pid=1, rank=0, job=None))
    for burst in (1, 2, 3, files.SIZES - 1):
        for _ in range(ROUNDS // burst):
            for _ in range(burst):
                file.update()
            assert read_presence(path) == file.presence

    for state in (DRAINING, FINISHED):
        file.update(state=state)
        assert read_presence(path) == file.presence
    assert path.stat().st_size < 4096


def test_messages_within_one_tick_of_the_server_are_seen(fast_dir: Path) -> None:
    one, other = Channel(fast_dir, "one", "other"), Channel(fast_dir, "other", "one")
    meeting = threading.Thread(target=other.connect, args=(30.0,))
    meeting.start()
    one.connect(30.0)
    meeting.join()

    for number in range(1, ROUNDS):
        one.send(number, {"said": number})
        assert other.receive(number, 0.5) == {"said": number}


def test_entries_within_one_tick_of_the_server_are_hinted_at(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 1, unit=1, sealed=False)
    reader = toy.log()
    for number in range(2, 20):
        assert reader.hint() == number - 1
        toy.add([{"id": number}])

        assert reader.poll(hinted=True)
        assert reader.length == number


def test_completeness_told_within_the_tick_of_the_last_entry_is_seen(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 1, unit=1)
    reader = toy.log()
    assert reader.hint() == reader.length

    toy.log().report_complete()

    assert not reader.poll(hinted=True)
    assert reader.reported_complete


def test_a_reader_of_a_rewritten_file_never_misses_its_first_line(fast_dir: Path) -> None:
    path = fast_dir / "file"
    lines = [b"%04d\n" % number for number in range(ROUNDS)]
    files.write_in_place(path, lines[0])
    seen: set[bytes] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.add(os.pread(fd, 5, 0))

    fd = os.open(path, os.O_RDONLY)
    looking = threading.Thread(target=look)
    looking.start()
    for line in lines:
        files.write_in_place(path, line)
    stop.set()
    looking.join()
    os.close(fd)

    assert seen <= set(lines)


class StaleClient:
    """Reads a file again only if its size changed, as an ``open`` does within one clock tick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copies: dict[Path, bytes] = {}
        monkeypatch.setattr(files, "read_fresh", self.read)

    def read(self, path: Path) -> bytes:
        copy = self._copies.get(path, b"")
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return b""
        if size != len(copy):
            # Read only this many bytes, because the file may grow meanwhile.
            with path.open("rb", buffering=0) as file:
                copy = self._copies[path] = file.read(size)
        return copy
