"""Other queues in a directory, and what a worker of each does; see ``benchmarks/peers.py``.

Runs with the interpreter that has the queues, without this project.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections import Counter
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any


class Record:
    """Runs items: appends one line for each that this process has run."""

    def __init__(self, root: Path, *, seconds: float = 0.0, trace: str = "") -> None:
        # Two kernels give the same numbers to their processes.
        path = root / "done" / f"{os.uname().nodename}-{os.getpid()}.jsonl"
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self._fd = os.open(path, flags, 0o644)
        self._seconds = seconds
        self._trace = os.open(trace, flags, 0o644) if trace else None

    def __call__(self, item: int) -> dict[str, Any]:
        self._note("start", item)
        if self._seconds:
            time.sleep(self._seconds)
        os.write(self._fd, b'{"item":%d,"value":%d,"state":"done"}\n' % (item, 2 * item))
        self._note("end", item)
        return {"item": item, "value": 2 * item, "state": "done"}

    def _note(self, what: str, item: int) -> None:
        if self._trace is not None:
            line = f"{what} {item} {os.getpid()} {os.getpid()} {time.time():.6f}\n"
            os.write(self._trace, line.encode())


def executions(root: Path) -> Counter[int]:
    """How often each item ran; a line cut by a kill does not count."""
    found: Counter[int] = Counter()
    for path in (root / "done").iterdir():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                found[json.loads(line)["item"]] += 1
    return found


class Peer:
    """A queue in a directory; every worker calls :meth:`open` and then :meth:`drain`."""

    distribution = ""
    many = True
    """Whether it is filled with 100,000 items in seconds."""

    def __init__(self, root: Path, items: int, *, seconds: float = 0.0, trace: str = "") -> None:
        self.root = root
        self.items = items
        self.seconds = seconds
        self.trace = trace

    def fill(self) -> None:
        """Put all items in."""

    def open(self) -> None:
        """Import and open; not timed."""

    def drain(self, record: Record) -> None:
        """Run items until none is left."""
        raise NotImplementedError


class Dirq(Peer):
    """One file an item, locked by a link."""

    distribution = "dirq"

    def open(self) -> None:
        self._queue = importlib.import_module("dirq.QueueSimple").QueueSimple(str(self.root / "q"))

    def fill(self) -> None:
        self.open()
        for item in range(self.items):
            self._queue.add(str(item))

    def drain(self, record: Record) -> None:
        name = self._queue.first()
        while name:
            if self._queue.lock(name):
                record(int(self._queue.get(name)))
                self._queue.remove(name)
            name = self._queue.next()


class Jug(Peer):
    """A lock file and a result file an item; loading the list is part of its drain."""

    distribution = "Jug"

    def fill(self) -> None:
        (self.root / "jugfile.py").write_text(
            "import pathlib, sys\n"
            "from jug import TaskGenerator\n"
            f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "from peerqueues import Record\n"
            f"root = pathlib.Path({str(self.root)!r})\n"
            f"record = Record(root, seconds={self.seconds}, trace={self.trace!r})\n"
            "@TaskGenerator\n"
            "def work(item):\n"
            "    return record(item)\n"
            f"for item in range({self.items}):\n"
            "    work(item)\n"
        )

    def open(self) -> None:
        self._main = importlib.import_module("jug.jug").main
        for name in ("jug.subcommands.execute", "jug.backends.file_store"):
            importlib.import_module(name)

    def drain(self, record: Record) -> None:
        del record  # its file has one of its own
        argv = ["jug", "execute", str(self.root / "jugfile.py"), "--will-cite"]
        argv += ["--jugdir", str(self.root / "jugdata")]
        argv += ["--wait-cycle-time", "1", "--nr-wait-cycles", "3"]
        with redirect_stdout(sys.stderr), suppress(SystemExit):
            self._main(argv)


class Litequeue(Peer):
    """SQLite with a write-ahead log."""

    distribution = "litequeue"

    def open(self) -> None:
        self._queue = importlib.import_module("litequeue").LiteQueue(
            str(self.root / "queue.db"), timeout=60
        )

    def fill(self) -> None:
        self.open()
        with self._queue.transaction():
            for item in range(self.items):
                self._queue.put(str(item))
        self._queue.close()

    def drain(self, record: Record) -> None:
        import sqlite3

        while True:
            try:
                message = self._queue.pop()
            except sqlite3.OperationalError:  # busy
                continue
            if message is None:
                return
            record(int(message.data))
            while True:
                with suppress(sqlite3.OperationalError):
                    self._queue.done(message.message_id)
                    break


class PersistQueue(Peer):
    """SQLite; an item is acknowledged when it is done, else it is back when the queue is opened."""

    distribution = "persist-queue"
    many = False

    def open(self) -> None:
        self._module = importlib.import_module("persistqueue")
        path = str(self.root / "queue")
        self._queue = self._module.SQLiteAckQueue(path, multithreading=True)

    def fill(self) -> None:
        self.open()
        for item in range(self.items):
            self._queue.put(item)

    def drain(self, record: Record) -> None:
        import sqlite3

        while True:
            try:
                message = self._queue.get(block=False, raw=True)
            except self._module.Empty:
                return
            except sqlite3.OperationalError:  # busy
                continue
            record(message["data"])
            while True:
                with suppress(sqlite3.OperationalError):
                    self._queue.ack(id=message["pqid"])
                    break


class NaiveFilelock(Peer):
    """One lock and one result file an item; every worker walks the list once."""

    distribution = "filelock"

    def open(self) -> None:
        self._filelock = importlib.import_module("filelock")

    def fill(self) -> None:
        for name in ("locks", "results"):
            (self.root / name).mkdir()

    def drain(self, record: Record) -> None:
        for item in range(self.items):
            result = f"{self.root}/results/{item}.json"
            if os.path.exists(result):
                continue
            lock = self._filelock.FileLock(f"{self.root}/locks/{item}.lock")
            try:
                lock.acquire(timeout=0)
            except self._filelock.Timeout:
                continue
            try:
                if not os.path.exists(result):
                    temporary = f"{result}.{os.uname().nodename}-{os.getpid()}.tmp"
                    with open(temporary, "w", encoding="utf-8") as file:
                        json.dump(record(item), file)
                    os.replace(temporary, result)
            finally:
                lock.release()
