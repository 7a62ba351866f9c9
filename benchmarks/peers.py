"""One run of another queue: processes drain no-op items, and each result is persisted.

    PEERS-PYTHON benchmarks/peers.py NAME --items N --workers W --dir NEW-DIRECTORY --cap SECONDS
    PEERS-PYTHON benchmarks/peers.py --installed

Prints one JSON object. The rate is that of the drain alone: the queue is filled and every worker
has imported and opened it before the clock starts. Each execution appends one line to a file of its
process; that is the persisted result of a queue that keeps none, and tells for all how often an
item ran. Runs with the interpreter that has the queues, without this project.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any


class Record:
    """Appends one line for each item that this process runs."""

    def __init__(self, root: Path) -> None:
        path = root / "done" / f"{os.getpid()}.jsonl"
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    def __call__(self, item: int) -> dict[str, Any]:
        os.write(self._fd, b'{"item":%d,"value":%d,"state":"done"}\n' % (item, 2 * item))
        return {"item": item, "value": 2 * item, "state": "done"}


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
    note = ""

    def __init__(self, root: Path, items: int) -> None:
        self.root = root
        self.items = items

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
            "from peers import Record\n"
            f"record = Record(pathlib.Path({str(self.root)!r}))\n"
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
                    temporary = f"{result}.{os.getpid()}.tmp"
                    with open(temporary, "w", encoding="utf-8") as file:
                        json.dump(record(item), file)
                    os.replace(temporary, result)
            finally:
                lock.release()


class Server(Peer):
    """A queue in the memory of a server, which starts the workers itself."""

    def serve(self, workers: int, cap_s: float) -> float:
        """Seconds from the first submission to the last result, or to the cap."""
        raise NotImplementedError


_record: Record | None = None


def remote(root: str, item: int) -> int:
    """An item of a server's worker."""
    global _record  # noqa: PLW0603 - one file for each process that a server started
    _record = _record or Record(Path(root))
    return int(_record(item)["value"])


def shared_remote() -> Any:
    """:func:`remote` as other processes can import it."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    return importlib.import_module("peers").remote


class Dask(Server):
    """distributed.LocalCluster, one process a worker."""

    distribution = "distributed"

    def serve(self, workers: int, cap_s: float) -> float:
        distributed = importlib.import_module("distributed")
        with (
            distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                dashboard_address=None,
                local_directory=str(self.root),
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            client.wait_for_workers(workers)
            began = time.perf_counter()
            futures = client.map(remote, [str(self.root)] * self.items, range(self.items))
            with suppress(Exception):
                distributed.wait(futures, timeout=cap_s)
            return time.perf_counter() - began


class Parsl(Server):
    """HighThroughputExecutor on a local provider."""

    distribution = "parsl"

    def serve(self, workers: int, cap_s: float) -> float:
        # Its programs are looked for on PATH.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        parsl = importlib.import_module("parsl")
        executors = importlib.import_module("parsl.executors")
        executor = executors.HighThroughputExecutor(
            address="127.0.0.1", max_workers_per_node=workers, encrypted=False
        )
        config = importlib.import_module("parsl.config").Config(
            executors=[executor],
            run_dir=str(self.root / "runinfo"),
            strategy="none",
            initialize_logging=False,
        )
        parsl.load(config)
        run = parsl.python_app(shared_remote())
        warm = [parsl.python_app(abs)(number) for number in range(2 * workers)]
        for future in warm:
            future.result()
        began = time.perf_counter()
        futures = [run(str(self.root), item) for item in range(self.items)]
        for future in futures:
            with suppress(Exception):
                future.result(timeout=max(0.001, began + cap_s - time.perf_counter()))
        took_s = time.perf_counter() - began
        parsl.dfk().cleanup()
        return took_s


class HyperQueue(Server):
    """Server and one worker in this process; each item starts a Python."""

    distribution = "hyperqueue"

    def serve(self, workers: int, cap_s: float) -> float:
        hyperqueue = importlib.import_module("hyperqueue")
        worker = importlib.import_module("hyperqueue.cluster").WorkerConfig(cores=workers)
        python = importlib.import_module("hyperqueue.task.function").PythonEnv(
            python_bin=sys.executable
        )
        function = shared_remote()
        cluster = hyperqueue.LocalCluster(
            server_dir=str(self.root / "server"), worker_config=worker
        )
        client = cluster.client(python_env=python)
        job = hyperqueue.Job()
        for item in range(self.items):
            job.function(function, args=(str(self.root), item), cwd=str(self.root))
        began = time.perf_counter()
        submitted = client.submit(job)
        # Waiting asks once a second and cannot be given a time.
        threading.Thread(
            target=client.wait_for_jobs,
            args=([submitted],),
            kwargs={"raise_on_error": False},
            daemon=True,
        ).start()
        took_s = 0.0
        while took_s < cap_s and len(executions(self.root)) < self.items:
            time.sleep(0.05)
            took_s = time.perf_counter() - began
        return took_s


PEERS: dict[str, type[Peer]] = {
    "dirq": Dirq,
    "jug": Jug,
    "litequeue": Litequeue,
    "naive_filelock": NaiveFilelock,
    "dask": Dask,
    "parsl": Parsl,
    "hyperqueue": HyperQueue,
}


def installed() -> dict[str, str]:
    """The queues that this interpreter has, with their versions."""
    found = {}
    for name, peer in PEERS.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(peer.distribution)
    return found


def work(peer: Peer) -> None:
    """Be one worker: open, say so, wait for the word, drain, say when."""
    record = Record(peer.root)
    peer.open()
    print("ready", flush=True)
    sys.stdin.readline()
    peer.drain(record)
    print(time.perf_counter(), flush=True)


def drain(name: str, items: int, workers: int, root: Path, cap_s: float) -> float:
    """Seconds that ``workers`` processes take, or the cap."""
    argv = [sys.executable, __file__, name, "--worker", "--items", str(items), "--dir", str(root)]
    processes = [
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )
        for _ in range(workers)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                message = f"a worker of {name} did not start"
                raise SystemExit(message)
        began = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        ends = []
        for process in processes:
            left_s = max(0.01, began + cap_s - time.perf_counter())
            try:
                ends.append(float(process.communicate(timeout=left_s)[0]))
            except subprocess.TimeoutExpired:
                return cap_s
        return max(ends) - began
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", nargs="?", choices=PEERS)
    parser.add_argument("--installed", action="store_true", help="list what can be measured")
    parser.add_argument("--items", type=int, default=1_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="a directory that does not exist yet")
    parser.add_argument("--cap", type=float, default=60.0, help="seconds that the drain may take")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.installed:
        print(json.dumps(installed()))
        return
    if options.name is None or options.dir is None:
        parser.error("give the name of a queue and --dir")
    root = options.dir.absolute()
    peer = PEERS[options.name](root, options.items)
    if options.worker:
        work(peer)
        return
    (root / "done").mkdir(parents=True)
    peer.fill()
    if isinstance(peer, Server):
        took_s = peer.serve(options.workers, options.cap)
    else:
        took_s = drain(options.name, options.items, options.workers, root, options.cap)
    ran = executions(root)
    found = {
        "items_per_s": len(ran) / took_s,
        "done": len(ran),
        "twice": sum(ran.values()) - len(ran),
        "capped": took_s >= options.cap,
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # servers leave threads behind


if __name__ == "__main__":
    main()
