"""Calls of the executor beside other executors, and on NFS with workers elsewhere.

    python benchmarks/executor.py [--calls 10000] [--rounds 5] [--nfs] [--write]

``operator.neg`` of numbers, on 2 local workers: seconds from the construction to the first result,
calls a second of one ``map``, and milliseconds of one call at a time; then seconds of a ``map`` of
1,000 arrays of 1 MB, of which the sum is returned. Only hpctk keeps anything on disk, except
submitit, which starts a process for every call, and looks for a result once a second. Dask and Ray
are measured where they are installed. The systems take turns, each in a process of its own. With
``--nfs`` also: the script on one host, 4 workers on another, both of which mount an NFSv4.2 export;
the server and the hosts are kernels of their own (user-mode Linux).

Takes 3 minutes, and 3 more with ``--nfs``, which needs root and what ``.ci/system`` installs.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from arguments import directory, number, parser
from resultsfile import facts, table, write_section

from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from tests.sharedfs.filesystems import mounted
from tests.sharedfs.hosts import SERVER, HostsError
from tests.sharedfs.nfs import NFS42
from tests.sharedfs.rehearsal import HIT, SMALL, SPARED, Rehearsal

SYSTEMS = {
    "hpctk": "hpctk",
    "1": "ProcessPoolExecutor",
    "50": "ProcessPoolExecutor, chunksize=50",
    "loky": "loky",
    "dask": "Dask",
    "ray": "Ray",
    "submitit": "submitit, local, 20 calls",
}
"""How each is called in the table. A number: a process pool with so many calls in a chunk."""
NEEDS = {"loky": "joblib", "dask": "distributed", "ray": "ray"}
TITLE = "Calls of the executor"
SINGLE, ARRAYS, SUBMITIT_CALLS = 100, 1_000, 20
NFS_CALLS, NFS_SINGLE, NFS_WORKERS = 2_000, 20, 4
_LIMIT_S = 300.0
SCRIPT = """
import json, operator, sys, time
from concurrent.futures import Executor as Interface, Future

class OnRay(Interface):
    # What functions of Ray do, by the names of an executor.
    def __init__(self, workers):
        import ray
        self.ray = ray
        ray.init(num_cpus=workers, include_dashboard=False, logging_level="error")
        self.remote = {}

    def reference(self, call, *given):
        if call not in self.remote:
            self.remote[call] = self.ray.remote(lambda *arguments: call(*arguments))
        return self.remote[call].remote(*given)

    def submit(self, call, *given):
        future = Future()
        future.set_result(self.ray.get(self.reference(call, *given)))
        return future

    def map(self, call, values, chunksize=1):
        return self.ray.get([self.reference(call, value) for value in values])

    def shutdown(self, wait=True):
        self.ray.shutdown()

def opened(system, where, workers):
    if system == "hpctk":
        from hpc_toolkit import Executor
        return Executor(where + "/run", workers=workers or None), 1
    if system == "loky":
        from joblib.externals.loky import ProcessPoolExecutor
        return ProcessPoolExecutor(workers), 1
    if system == "dask":
        from distributed import Client
        made = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None}
        return Client(processes=True, **made).get_executor(), 1
    if system == "ray":
        return OnRay(workers), 1
    from concurrent.futures import ProcessPoolExecutor
    return ProcessPoolExecutor(workers), int(system)

def main():
    system, where, workers, calls, single, arrays = *sys.argv[1:3], *map(int, sys.argv[3:])
    began = time.perf_counter()
    executor, chunk = opened(system, where, workers)
    with executor:
        executor.submit(operator.neg, -1).result()
        first = time.perf_counter() - began
        began = time.perf_counter()
        given = list(executor.map(operator.neg, range(calls), chunksize=chunk))
        together = time.perf_counter() - began
        assert given == [-one for one in range(calls)]
        took = []
        for one in range(single):
            began = time.perf_counter()
            executor.submit(operator.neg, calls + one).result()
            took.append(time.perf_counter() - began)
        large = 0.0
        if arrays:
            import numpy
            given = [numpy.full(131_072, float(one)) for one in range(arrays)]
            began = time.perf_counter()
            sums = list(executor.map(numpy.sum, given, chunksize=1))
            large = time.perf_counter() - began
            assert sums == [131_072.0 * one for one in range(arrays)]
    print(json.dumps([first, calls / together, 1000 * sorted(took)[single // 2], large]))

if __name__ == "__main__":
    main()
"""
SUBMITIT = """
import json, operator, sys, time
import submitit

where, calls = sys.argv[1], int(sys.argv[2])
executor = submitit.LocalExecutor(where)
began = time.perf_counter()
executor.submit(operator.neg, -1).result()
first = time.perf_counter() - began
began = time.perf_counter()
jobs = executor.map_array(operator.neg, range(calls))
assert [job.result() for job in jobs] == [-one for one in range(calls)]
print(json.dumps([first, calls / (time.perf_counter() - began), 1000 * first, 0.0]))
"""

ECHO = """
import os, sys, time
own, other, first, turns = *sys.argv[1:3], sys.argv[3] == "first", int(sys.argv[4])
mine = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
began = time.perf_counter()
for turn in range(1, turns + 1):
    if first:
        os.write(mine, b".")
        os.fsync(mine)
    size = 0
    while size < turn:
        time.sleep(0.01)
        try:
            with open(other, "rb") as file:
                size = len(file.read())
        except FileNotFoundError:
            pass
    if not first:
        os.write(mine, b".")
        os.fsync(mine)
print((time.perf_counter() - began) / turns)
"""
"""Two hosts that append to a file in turn, each until it sees what the other one wrote."""


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--calls", type=number, default=10_000, help="of one map")
    given.add_argument("--rounds", type=number, default=5, help="turns of each system")
    given.add_argument("--nfs", action="store_true", help="also on NFS between kernels")
    given.add_argument("--directory", type=directory, help="for the runs")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    found: dict[str, list[list[float]]] = {}
    systems = [one for one in SYSTEMS if importlib.util.find_spec(NEEDS.get(one, "json"))]
    for turn in range(options.rounds):
        at = turn % len(systems)
        for system in systems[at:] + systems[:at]:
            with tempfile.TemporaryDirectory(dir=options.directory) as where:
                took = measured(system, where, options.calls)
            found.setdefault(system, []).append(took)
            print(system, took, file=sys.stderr, flush=True)
    head = ["", "first result", "calls a second", "one call", f"{ARRAYS:,} arrays of 1 MB"]
    rows = [row(SYSTEMS[system], found[system]) for system in systems]
    if options.nfs:
        with tempfile.TemporaryDirectory(prefix="executor-", ignore_cleanup_errors=True) as base:
            rows.append(row(f"hpctk, NFSv4.2, {NFS_CALLS:,} calls", [on_nfs(Path(base))]))
    words = f"{options.calls:,} calls, medians of {options.rounds} turns; 2 local workers."
    lines = [words, "", *table(head, rows)]
    print("\n".join(lines))
    if options.write:
        write_section(
            TITLE, ["", facts(options.directory or Path(tempfile.gettempdir())), "", *lines]
        )


def measured(system: str, where: str, calls: int) -> list[float]:
    argv = [SCRIPT, system, where, "2", str(calls), str(SINGLE), str(ARRAYS)]
    if system == "submitit":
        argv = [SUBMITIT, where, str(SUBMITIT_CALLS)]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(argv[0])
        script.flush()
        command = [sys.executable, script.name, *argv[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=where)
    return [float(one) for one in json.loads(done.stdout)]


def on_nfs(base: Path) -> list[float]:
    """The script on the first host, workers on the second."""
    (base / "hosts").mkdir()
    with mounted(base / "hosts", (NFS42,)) as filesystems:
        size = replace(SMALL, workers=NFS_WORKERS, lease_s=DEFAULT_LEASE_S)
        rehearsal = Rehearsal(filesystems[NFS42.name], base, size, "run")
        where, calls, single = rehearsal.run.parent, str(NFS_CALLS), str(NFS_SINGLE)
        argv = [sys.executable, "-c", SCRIPT, "hpctk", str(where), "0", calls, single, "0"]
        try:
            script = rehearsal.start_program(HIT, argv)
            # A worker that looks for a directory before it exists is told so for a while.
            words = "find", Path("/srv/export") / rehearsal.run.parent.name, "-name", "run.json"
            rehearsal.until(lambda: rehearsal.hosts.call(SERVER, *words), "the run")
            rehearsal.work(SPARED)
            ended = script.ended(limit_s=_LIMIT_S)
            if ended.code != 0:
                message = f"the script exited with {ended.code}: {ended.err}"
                raise HostsError(message)
            echo = echoed(rehearsal, where)
        finally:
            rehearsal.close()
    print(f"NFSv4.2: two hosts answer each other in {1000 * echo:.0f} ms", file=sys.stderr)
    return [float(one) for one in json.loads(ended.out)]


def echoed(rehearsal: Rehearsal, where: Path) -> float:
    """Seconds in which one host sees that the other one saw what it wrote."""
    files, argv = (where / "ping", where / "pong"), [sys.executable, "-c", ECHO]
    second = rehearsal.start_program(SPARED, [*argv, *map(str, files[::-1]), "second", "30"])
    first = rehearsal.start_program(HIT, [*argv, *map(str, files), "first", "30"])
    ended = [one.ended(limit_s=_LIMIT_S) for one in (second, first)]
    return float(ended[-1].out)


def row(name: str, took: list[list[float]]) -> list[str]:
    first, rate, single, large = (statistics.median(one) for one in zip(*took, strict=True))
    arrays = f"{large:.2f} s" if large else ""
    return [name, f"{first:.2f} s", f"{rate:,.0f}", f"{single:,.1f} ms", arrays]


if __name__ == "__main__":
    main()
