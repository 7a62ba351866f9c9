"""What does importing cost from NFS, and from a copy that 'hpctk render --stage-env' makes?

    python benchmarks/stage_env.py [--rounds 3] [--write]

The server and two hosts that mount its export are kernels of their own (user-mode Linux). On the
export are an environment with numpy and scipy, without their tests, and its archive. One host, each
time with empty caches, imports scipy with 1 and with 4 processes at once: from the
export, and from a copy in memory that it extracts first. Then the workers of one command do an item
each of a module that imports scipy from the export: once for all of them, and once for each, as
with ``fork_safe = False``. nfsstat on the server counts requests.

Takes up to an hour on a busy machine. Needs root and the packages that ``.ci/system`` installs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import number, parser
from nfs_load import Load, measured
from resultsfile import facts, table, write_section

import hpc_toolkit
from tests.sharedfs.filesystems import mounted
from tests.sharedfs.hosts import HOSTS, SERVER, HostsError
from tests.sharedfs.nfs import NFS42

if TYPE_CHECKING:
    from tests.sharedfs.hosts import Hosts

_MODULE = "scipy.stats"
_PACKAGES = ("numpy", "numpy.libs", "scipy", "scipy.libs")
_PROCESSES = (1, 4)
_WORKERS = (1, 4, 8)
_LIMIT_S = 600.0
_MAKE = """
python=$1 root=$2 above=$3 others=$4; shift 4
mkdir -p "$root"; cd "$root"
"$python" -m venv --without-pip env
cd env/lib/python*/site-packages
tar -C "$above" --exclude=tests -cf - hpc_toolkit | tar -xf -
tar -C "$others" --exclude=tests -cf - "$@" | tar -xf -
mkdir of-the-packages.dist-info
# What else hpctk imports comes from this machine.
echo "$others" >others.pth
sync
"""
_ARCHIVE = """
import pathlib, sys
from hpc_toolkit.slurm.batch.staging import archive_environment
archive = archive_environment(pathlib.Path(sys.prefix), pathlib.Path(sys.argv[1]))
print(archive, archive.stat().st_size, sep="\\n")
"""
_EXTRACT = """
import pathlib, sys
from hpc_toolkit.slurm.batch.staging import stage_environment
said = stage_environment(*map(pathlib.Path, sys.argv[1:]))
sys.exit(None if said.startswith("staged") else said)
"""
_TIMED = """
import json, subprocess, sys, time
argv, count, began = json.loads(sys.argv[1]), int(sys.argv[2]), time.monotonic()
processes = [subprocess.Popen(argv) for _ in range(count)]
codes = [one.wait() for one in processes]
print(json.dumps(time.monotonic() - began))
sys.exit(max(codes))
"""
_FUNCTION = f"""
import pathlib, time
import {_MODULE}
fork_safe = %s
def run(item):
    pathlib.Path("/dev/shm/copy", str(item)).touch()
    while len(list(pathlib.Path("/dev/shm/copy").iterdir())) < %d:
        time.sleep(0.05)
"""
_COLD = "rm -rf /dev/shm/copy; sync; echo 3 >/proc/sys/vm/drop_caches; mkdir /dev/shm/copy"


def once(hosts: Hosts, commands: list[tuple[str, ...]], processes: int) -> tuple[list[float], Load]:
    """Run commands on a host with empty caches, the last one with several processes."""
    hosts.call(HOSTS[1], "sh", "-c", _COLD)
    taken = []
    with measured(hosts) as load:
        for at, argv in enumerate(commands, 1):
            times = processes if at == len(commands) else 1
            words = (sys.executable, "-c", _TIMED, json.dumps(argv), times)
            taken.append(float(hosts.call(HOSTS[1], *words, limit_s=_LIMIT_S).splitlines()[-1]))
    return taken, load


def rows(base: Path, rounds: int) -> tuple[list[list[str]], list[list[str]], str]:
    with mounted(base, (NFS42,)) as filesystems:
        filesystem = filesystems[NFS42.name]
        hosts, root = filesystem.hosts, filesystem.shared / "stage"
        at_server = Path("/srv/export") / filesystem.shared.name / "stage"
        above = Path(hpc_toolkit.__file__).parents[1]
        made = (sys.executable, at_server, above, sysconfig.get_path("purelib"), *_PACKAGES)
        hosts.call(SERVER, "sh", "-ec", _MAKE, "make", *made, limit_s=_LIMIT_S)
        print("the environment is made", file=sys.stderr, flush=True)
        python = str(root / "env/bin/python")
        # The server itself is the fastest place to make it.
        make = (at_server / "env/bin/python", "-Pc", _ARCHIVE, at_server / "archives")
        name, size = hosts.call(SERVER, *make, limit_s=_LIMIT_S).splitlines()
        name = str(root / "archives" / Path(name).name)
        made_of = f"The archive has {int(size) / 2**20:.0f} MiB."
        copy = "/dev/shm/copy"
        ways: dict[str, list[tuple[str, ...]]] = {
            "from NFS": [(python, "-Pc", f"import {_MODULE}")],
            "extracted, then from memory": [
                (python, "-Pc", _EXTRACT, name, copy),
                (f"{copy}/.environment/bin/python", "-Pc", f"import {_MODULE}"),
            ],
        }
        found = []
        for way, commands in ways.items():
            for processes in _PROCESSES:
                done = [once(hosts, commands, processes) for _ in range(rounds)]
                each = [
                    statistics.median(times)
                    for times in zip(*(one[0] for one in done), strict=True)
                ]
                cells = [" + ".join(f"{one:.1f}" for one in each), f"{sum(each):.1f} s"]
                cells.append(f"{statistics.median(load.requests for _, load in done):,.0f}")
                found.append([way, str(processes), *cells, done[-1][1].shown(1).replace(".00", "")])
                print(*found[-1], sep=" | ", file=sys.stderr, flush=True)
        return found, workers_rows(hosts, root, python, rounds), made_of


def workers_rows(hosts: Hosts, root: Path, python: str, rounds: int) -> list[list[str]]:
    """Rows of the workers of one command on a host, from its start to its end."""
    found = []
    for workers in _WORKERS:
        for once_each, shown in ((False, "one import"), (True, "an import each")):
            taken, loads = [], []
            for turn in range(rounds):
                cwd = root / f"workers-{workers}-{once_each}-{turn}"
                text = _FUNCTION % (not once_each, workers)
                hosts.call(HOSTS[0], "mkdir", "-p", cwd)
                hosts.call(HOSTS[0], "sh", "-c", f'echo "$1" >"{cwd}/bench.py"', "sh", text)
                hpctk = f"cd {cwd}; exec {python} -m hpc_toolkit"
                init = f"init run --workload bench:run --count {workers} --items-per-claim 1"
                hosts.call(HOSTS[0], "sh", "-c", f"{hpctk} {init}", limit_s=_LIMIT_S)
                hosts.call(HOSTS[1], "sh", "-c", _COLD)
                work = f"{hpctk} work run --workers {workers}"
                with measured(hosts) as load:
                    hosts.call(HOSTS[1], "sh", "-c", work, limit_s=_LIMIT_S)
                taken.append(load.seconds)
                loads.append(load)
            requests = statistics.median(one.requests for one in loads)
            cells = [shown, str(workers), f"{statistics.median(taken):.1f} s", f"{requests:,.0f}"]
            found.append([*cells, loads[-1].shown(1).replace(".00", "")])
            print(*found[-1], sep=" | ", file=sys.stderr, flush=True)
    return found


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--rounds", type=number, default=3, help="of each way; medians are shown")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if os.geteuid() != 0:
        given.error("only root can mount filesystems")
    try:
        with tempfile.TemporaryDirectory(prefix="stage-env-", ignore_cleanup_errors=True) as base:
            found, of_workers, made_of = rows(Path(base), options.rounds)
    except HostsError as error:
        sys.exit(f"error: {error}\nhint: .ci/system installs what is needed")
    heads = ["", "processes", "seconds", "sum", "requests", "by kind, last round"]
    lines = [
        facts(),
        "",
        f"One host imports {_MODULE} with empty caches. {made_of}",
        "Python's standard library is local.",
        "The server and the hosts are kernels of their own (user-mode Linux) on one busy machine,",
        "without a network: take numbers of requests from here, and times from a cluster.",
        "",
        *table(heads, found),
        "",
        f"Workers of one command, an item each, whose module imports {_MODULE}, empty caches:",
        "",
        *table(["", "workers", "seconds", "requests", "by kind, last round"], of_workers),
    ]
    print("\n".join(lines))
    if options.write:
        write_section(f"Staging the environment, {NFS42.name}", lines)


if __name__ == "__main__":
    main()
