"""One run of another queue: processes drain no-op items, and each result is persisted.

    PEERS-PYTHON benchmarks/peers.py NAME --items N --workers W --dir NEW-DIRECTORY --cap SECONDS
    PEERS-PYTHON benchmarks/peers.py --installed [--all]
    PEERS-PYTHON benchmarks/peers.py NAME --fill | --worker ...

Prints one JSON object. The rate is that of the drain alone: the queue is filled and every worker
has imported and opened it before the clock starts. Each execution appends one line to a file of its
process; that is the persisted result of a queue that keeps none, and tells for all how often an
item ran. Runs with the interpreter that has the queues, without this project.

With ``--fill`` a queue is only made; a ``--worker`` says ``ready``, drains it once it is given a
line, and says when it was done. With ``--seconds`` an item sleeps, and with ``--trace`` it appends
a line to that file when it begins and when it ends.

Takes the time of filling the queue and at most --cap. Needs what benchmarks/peers.txt names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from arguments import number, parser, seconds
from peerqueues import Dirq, Jug, Litequeue, NaiveFilelock, Peer, PersistQueue, Record, executions


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
    "persist-queue": PersistQueue,
    "dask": Dask,
    "parsl": Parsl,
    "hyperqueue": HyperQueue,
}


def installed(*, every: bool) -> dict[str, str]:
    """The queues that this interpreter has, with versions; by default those for many items."""
    found = {}
    for name, peer in PEERS.items():
        if not (every or peer.many):
            continue
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(peer.distribution)
    return found


def work(peer: Peer) -> None:
    """Be one worker: open, say so, wait for the word, drain, say when."""
    record = Record(peer.root, seconds=peer.seconds, trace=peer.trace)
    peer.open()
    print("ready", flush=True)
    sys.stdin.readline()
    peer.drain(record)
    print(time.perf_counter(), flush=True)


def drain(name: str, peer: Peer, workers: int, cap_s: float) -> float:
    """Seconds that ``workers`` processes take, or the cap."""
    argv = [sys.executable, __file__, name, "--worker", "--items", str(peer.items)]
    argv += ["--dir", str(peer.root), "--seconds", str(peer.seconds), "--trace", peer.trace]
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
    given = parser(__doc__)
    given.add_argument("name", nargs="?", choices=PEERS)
    given.add_argument("--installed", action="store_true", help="list what can be measured")
    given.add_argument("--all", action="store_true", help="list those of few items as well")
    given.add_argument("--items", type=number, default=1_000, help="in the queue")
    given.add_argument("--workers", type=number, default=2, help="that drain it")
    given.add_argument("--dir", type=Path, help="a directory that does not exist yet")
    given.add_argument("--cap", type=seconds, default=60.0, help="seconds that the drain may take")
    given.add_argument("--seconds", type=float, default=0.0, help="length of an item")
    given.add_argument("--trace", default="", help="a file that tells what runs")
    given.add_argument("--fill", action="store_true", help="only make the queue")
    given.add_argument("--worker", action="store_true", help="be one worker of a queue")
    options = given.parse_args()
    if options.installed:
        print(json.dumps(installed(every=options.all)))
        return
    if options.name is None or options.dir is None:
        given.error("give the name of a queue and --dir")
    root = options.dir.absolute()
    peer = PEERS[options.name](root, options.items, seconds=options.seconds, trace=options.trace)
    if options.worker:
        work(peer)
        return
    # Asked to end it takes its workers along, which have process groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if root.exists():
        given.error(f"{root} exists")
    (root / "done").mkdir(parents=True)
    peer.fill()
    if options.fill:
        return
    if isinstance(peer, Server):
        took_s = peer.serve(options.workers, options.cap)
    else:
        took_s = drain(options.name, peer, options.workers, options.cap)
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
