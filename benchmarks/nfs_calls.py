"""What does one file operation of a worker cost on NFS: requests at the server, and milliseconds.

    python benchmarks/nfs_calls.py [--names 4096] [--write]

The server and two hosts that mount its export are kernels of their own (user-mode Linux). One host
writes files and names; the other one repeats each operation of the queue on them. The simulation of
a file server (simulation/fileserver.py) charges what is measured here.

Takes about two minutes. Needs root and the packages that ``.ci/system`` installs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import number, parser
from nfs_load import measured
from resultsfile import facts, table, write_section

from tests.sharedfs.filesystems import mounted
from tests.sharedfs.hosts import HOSTS, HostsError
from tests.sharedfs.nfs import NFS42

if TYPE_CHECKING:
    from tests.sharedfs.hosts import Hosts

_TIMES = 200
_MAKE = """
for n in range(names):
    os.symlink("worker", root / f"claims/{n}")
for n in range(times):
    (root / f"workers/{n}").write_bytes(bytes(1024))
"""
_CALLS = {
    "create a name": "os.symlink('worker', root / f'claims/own-{n}')",
    "read a name's target": "os.readlink(root / f'claims/{n}')",
    "look for a missing name": "os.path.lexists(root / f'claims/missing-{n}')",
    "open, read and close a file of another host": "(root / f'workers/{n}').read_bytes()",
    "the same again, unchanged": "(root / f'workers/{n}').read_bytes()",
    "append to a journal and sync it": "os.write(journal, bytes(200)); os.fdatasync(journal)",
    "rewrite a presence file and sync it": "os.pwrite(presence, bytes(1024 + n), 0); "
    "os.fdatasync(presence)",
}
_LISTED = "list {:,} names"
_CALL = """
import json, os, pathlib, sys, time
root, times, names = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
journal = os.open(root / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND)
presence = os.open(root / "presence", os.O_RDWR | os.O_CREAT)
began = time.monotonic()
{}
print(json.dumps(time.monotonic() - began))
"""

_SEEN = """
import os, pathlib, sys, time
root, name, what = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def seen():
    return name in os.listdir(root) if what == "listed" else os.path.lexists(root / name)
print(seen(), flush=True)
sys.stdin.readline()
began = time.monotonic()
while not seen():
    time.sleep(0.1)
print(time.monotonic() - began)
"""


def delay(hosts: Hosts, root: Path, what: str) -> list[str]:
    """How long a name stays hidden from a host that has looked for it before."""
    name = f"late-{what}"
    argv = hosts.command(HOSTS[1], [sys.executable, "-c", _SEEN, str(root), name, what])
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        hosts.call(HOSTS[0], "ln", "-s", "worker", root / name)
        process.stdin.write("\n")
        process.stdin.flush()
        after_s = float(process.stdout.readline())
    return [f"a name made by another host, first missing, is {what}", f"{after_s:.1f} s", "-", ""]


def rows(base: Path, names: int) -> list[list[str]]:
    found = []
    with mounted(base, (NFS42,)) as filesystems:
        filesystem = filesystems[NFS42.name]
        hosts = filesystem.hosts
        root = filesystem.shared / "calls"

        def run(host: str, code: str, times: int = _TIMES) -> float:
            argv = [sys.executable, "-c", _CALL.format(code), str(root), str(times), str(names)]
            return float(json.loads(hosts.call(host, *argv, limit_s=300.0).splitlines()[-1]))

        hosts.call(HOSTS[0], "mkdir", "-p", root / "claims", root / "workers")
        run(HOSTS[0], _MAKE)
        with measured(hosts) as nothing:
            run(HOSTS[1], "pass")
        loops = {what: f"for n in range(times): {call}" for what, call in _CALLS.items()}
        once = "len(os.listdir(root / 'claims'))"
        for what, code in {_LISTED.format(names): once, **loops}.items():
            times = 1 if code is once else _TIMES
            with measured(hosts) as load:
                took_s = run(HOSTS[1], code)
            load.kinds.subtract(nothing.kinds)
            cells = [
                f"{took_s / times * 1000:.2f} ms",
                f"{(load.requests - nothing.requests) / times:.2f}",
            ]
            found.append([what, *cells, load.shown(times)])
            print(*found[-1], sep=" | ", file=sys.stderr, flush=True)
        found += [delay(hosts, root, what) for what in ("listed", "found by its name")]
    return found


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--names", type=number, default=4096, help="names in the listed directory")
    given.add_argument("--write", action="store_true", help="into benchmarks/results.md")
    options = given.parse_args()
    if os.geteuid() != 0:
        given.error("only root can mount filesystems")
    try:
        with tempfile.TemporaryDirectory(prefix="nfs-calls-", ignore_cleanup_errors=True) as base:
            found = rows(Path(base), options.names)
    except HostsError as error:
        sys.exit(f"error: {error}\nhint: .ci/system installs what is needed")
    lines = [
        facts(),
        "",
        f"{_TIMES} times each on a host that saw none of the files before; the listing once. The",
        "server and the hosts are kernels of their own (user-mode Linux) on one busy machine,",
        "without a network: take numbers of requests from here, and times from a cluster.",
        "",
        *table(["operation", "takes", "requests", "by kind"], found),
    ]
    print("\n".join(lines))
    if options.write:
        write_section(f"File operations of a worker, {NFS42.name}", lines)


if __name__ == "__main__":
    main()
