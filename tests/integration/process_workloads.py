"""Workloads that start processes, as people's scripts do."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_toolkit.system.processes import WARNINGS, parent_of

Item = dict[str, Any]


def square(number: int) -> int:
    return number**2


def files_of(pid: int | str) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # the descriptor of this listing itself
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def signals_and_files() -> dict[str, Any]:
    """Dispositions and masks of this process (proc(5)), and what its descriptors are."""
    status = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":\t") for line in status if line.startswith("Sig"))
    return {
        "mask": int(found["SigBlk"], 16),
        "caught": [n.name for n in OURS if int(found["SigCgt"], 16) >> (n - 1) & 1],
        "ignored": [n.name for n in OURS if int(found["SigIgn"], 16) >> (n - 1) & 1],
        "files": files_of("self"),
    }


OURS = (signal.SIGTERM, *WARNINGS, signal.SIGCHLD)


def fork_and(act: Callable[[], Any]) -> int:
    """Fork a child that runs ``act`` in this very place, as the issue of most reports does."""
    pid = os.fork()
    if pid == 0:
        act()
        return 0
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raise_error() -> None:
    message = "wrong in the child"
    raise ValueError(message)


def exec_nothing() -> None:
    os.execvp("/no/such/program", ["program"])


ACTS: dict[str, Callable[[], Any]] = {
    "return": lambda: None,
    "raise": raise_error,
    "exec": exec_nothing,
    "exit": lambda: sys.exit(3),
    "exit text": lambda: sys.exit("bad"),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "terminate": lambda: signal.raise_signal(signal.SIGTERM),
}


def fork(item: Item) -> Item:
    return {"code": fork_and(ACTS[item["act"]])}


def fork_in_a_thread(item: Item) -> Item:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(fork_and(ACTS["terminate"])))
    thread.start()
    thread.join()
    return {"code": codes[0]}


class Forks:
    """Forks in ``load``, and between the results of a generator."""

    def load(self, group: Any) -> None:
        fork_and(raise_error)

    def run(self, context: None, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            yield {"code": fork_and(ACTS[item["act"]])}


def pool(item: Item) -> Item:
    with multiprocessing.get_context(item["method"]).Pool(2) as workers:
        return {"squares": workers.map(square, range(3))}


def look_around(item: Item) -> Item:
    """What a child of this start method inherits from the executor."""
    with multiprocessing.get_context(item["method"]).Pool(1) as workers:
        found = workers.apply(signals_and_files)
    script = "import json, process_workloads as w; print(json.dumps(w.signals_and_files()))"
    program = json.loads(subprocess.getoutput(f"{sys.executable} -c '{script}'"))
    pipes = [os.readlink(f"/proc/self/fd/{fd}") for fd in (3, 4)]
    for one in (found, program):
        one["files"] = [file for file in one["files"] if file in pipes]
    return {"child": found, "program": program, "pipes": pipes}


def broken_pool(item: Item) -> Item:
    """A pool whose child ends; it terminates the others."""
    broken = False
    with ProcessPoolExecutor(2) as workers:
        try:
            workers.submit(os._exit, 1).result()
        except BrokenProcessPool:
            broken = True
    return {"broken": broken}


def terminate(item: Item) -> Item:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
    process.start()
    process.terminate()
    process.join()
    return {"code": process.exitcode}


def start_and_leave(item: Item) -> Item:
    """Start a process in a session of its own, note it, and go on as ``then`` says."""
    left = subprocess.Popen(["/bin/sleep", "3600"], start_new_session=True)
    with open(item["trace"], "a") as file:
        file.write(f"left {item['id']} {left.pid} {os.getpid()}\n")
    if item.get("then") == "hang":
        time.sleep(3600)
    elif item.get("then") == "crash":
        os.abort()
    return {"left": left.pid}


_poisoned = False
_kept: list[bytes] = []


def poison(item: Item) -> Item:
    """Fail for ever in a process in which one item has spoiled something."""
    global _poisoned  # noqa: PLW0603 - the state of the process is what is tested
    marker = Path(item["once"]) if item.get("poison") else None
    if marker is not None and not marker.exists():
        marker.touch()
        _poisoned = True
    if _poisoned:
        message = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(message)
    return {"pid": os.getpid()}


def always_fail(item: Item) -> Item:
    raise ValueError(os.getpid())


def leak(item: Item) -> Item:
    _kept.append(b"x" * (item["mib"] << 20))
    return {"pid": os.getpid()}


def wait_for_child(item: Item) -> Item:
    """A pool that breaks if Slurm ends its processes; the item starts as its trace says."""
    with ProcessPoolExecutor(1) as workers:
        waiting = workers.submit(time.sleep, 3600)
        child = next(iter(workers._processes))
        with open(item["trace"], "a") as file:
            file.write(f"start {item['id']} {os.getpid()} {child}\n")
        waiting.result()
    return {}


def loader(item: Item) -> Item:
    """A torch DataLoader with two worker processes."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    loading: Any = DataLoader(torch.arange(8), 4, num_workers=2)  # type: ignore[arg-type] # a tensor is one
    return {"sum": int(sum(batch.sum() for batch in loading))}


def mixed(item: Item) -> Item:
    """One of the ways in which scripts start processes and threads, chosen by the item's number."""
    with open(item["trace"], "a") as file:
        file.write(f"start {item['id']} {os.getpid()} {parent_of(os.getppid())[0]}\n")
    ways: list[Callable[[Item], Any]] = [
        lambda item: pool({**item, "method": "fork"}),
        lambda item: pool({**item, "method": "spawn"}),
        lambda item: pool({**item, "method": "forkserver"}),
        executor_of_processes,
        loader,
        terminate,
        lambda _: fork_and(raise_error),
        lambda _: subprocess.run(["/bin/sh", "-c", "sleep 0.01"], check=True).returncode,
        lambda _: subprocess.Popen(["/bin/sleep", "3600"], start_new_session=True).pid,
        lambda _: threading.Thread(target=time.sleep, args=(3600,), daemon=True).start(),
    ]
    ways[item["id"] % len(ways)](item)
    return {"id": item["id"]}


def executor_of_processes(item: Item) -> Item:
    with ProcessPoolExecutor(2) as workers:
        return {"squares": list(workers.map(square, range(3)))}
