"""Calls of the executor beside a process pool and submitit, and on NFS with workers elsewhere.

    python benchmarks/executor.py [--calls 10000] [--rounds 5] [--nfs] [--write]

``operator.neg`` of numbers, on 2 local workers: seconds from the construction to the first result,
calls a second of one ``map``, and milliseconds of one call at a time. A process pool keeps nothing
on disk. submitit starts a process for every call, and looks for a result once a second. The systems
take turns, each in a process of its own. With ``--nfs`` also: the script on one host, 4 workers on
another, both of which mount an NFSv4.2 export; the server and the hosts are kernels of their own
(user-mode Linux).

Takes about a minute, and 3 more with ``--nfs``, which needs root and what ``.ci/system`` installs.
"""

from __future__ import annotations

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

SYSTEMS = ["hpctk", "1", "50", "submitit"]
"""A number: a process pool with so many calls in a chunk."""
TITLE = "Calls of the executor"
SINGLE, SUBMITIT_CALLS, NFS_CALLS, NFS_SINGLE, NFS_WORKERS = 100, 20, 2_000, 20, 4
_LIMIT_S = 300.0
SCRIPT = """
import json, operator, sys, time
from contextlib import ExitStack

def opened(system, where, workers):
    if system == "hpctk":
        from hpc_toolkit import Executor
        return Executor(where + "/run", workers=workers or None), 1
    from concurrent.futures import ProcessPoolExecutor
    return ProcessPoolExecutor(workers), int(system)

def main():
    system, where, workers, calls, single = *sys.argv[1:3], *map(int, sys.argv[3:])
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
    print(json.dumps([first, calls / together, 1000 * sorted(took)[single // 2]]))

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
print(json.dumps([first, calls / (time.perf_counter() - began), 1000 * first]))
"""


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--calls", type=number, default=10_000, help="of one map")
    given.add_argument("--rounds", type=number, default=5, help="turns of each system")
    given.add_argument("--nfs", action="store_true", help="also on NFS between kernels")
    given.add_argument("--directory", type=directory, help="for the runs")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    found: dict[str, list[list[float]]] = {}
    for turn in range(options.rounds):
        at = turn % len(SYSTEMS)
        for system in SYSTEMS[at:] + SYSTEMS[:at]:
            with tempfile.TemporaryDirectory(dir=options.directory) as where:
                took = measured(system, where, options.calls)
            found.setdefault(system, []).append(took)
            print(system, took, file=sys.stderr, flush=True)
    head = ["", "first result", "calls a second", "one call"]
    rows = [
        row("hpctk", found["hpctk"]),
        row("ProcessPoolExecutor", found["1"]),
        row("ProcessPoolExecutor, chunksize=50", found["50"]),
        row(f"submitit, local, {SUBMITIT_CALLS} calls", found["submitit"]),
    ]
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
    argv = [SCRIPT, system, where, "2", str(calls), str(SINGLE)]
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
        argv = [sys.executable, "-c", SCRIPT, "hpctk", str(where), "0", calls, single]
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
        finally:
            rehearsal.close()
    return [float(one) for one in json.loads(ended.out)]


def row(name: str, took: list[list[float]]) -> list[str]:
    first, rate, single = (statistics.median(one) for one in zip(*took, strict=True))
    return [name, f"{first:.2f} s", f"{rate:,.0f}", f"{single:,.1f} ms"]


if __name__ == "__main__":
    main()
