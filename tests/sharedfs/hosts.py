"""Two hosts and a file server on this machine: namespaces here, kernels in kernels.py.

One PID namespace holds them all (pid_namespaces(7)). When its first process ends, the kernel kills
every other process in it; with the last of them go the mounts and the network links. That first
process reads from a pipe whose other end is held here: however the tests end, it reads the end of
the file. On disk there is only an empty directory, for what is written is in memory.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hpc_toolkit.lab.commands import search_path
from tests.sharedfs.agent import age, contents, is_marked, stack

if TYPE_CHECKING:
    import signal

ADDRESS = "10.77.0.1"
"""The server's. Neither GlusterFS nor MooseFS takes a loopback address."""
SERVER = "server"
HOSTS = ("node1", "node2")
PROGRAMS = ("unshare", "nsenter", "ip", "mount")

LEAVING_S = 10.0
_START_S = 120.0
_ENVIRONMENT = {"PATH": search_path(), "LC_ALL": "C.UTF-8"}

TRACES = Path("/run/rehearsal/trace")
"""Where each host has a directory for what its processes say of themselves."""
OWN = TRACES / "own"
"""The directory in it that a process writes to: that of its own host."""

# Argument: a directory for all mounts. Covered as well is what daemons would leave on the machine.
_COVER = f"""
set -eu
for covered in "$1" /run /var/lib/glusterd /var/log/glusterfs; do
  if [ -d "$covered" ]; then mount -t tmpfs -o size=4g tmpfs "$covered"; fi
done
mkdir "$1/shared"
mkdir -p {OWN}
ip link set lo up
"""
# The first process takes in orphans; one that ignores SIGCHLD leaves none of them as a zombie, for
# which glusterd would wait.
_NAMESPACES = f"""
mkdir "$1/server"
ip address add {ADDRESS}/32 dev lo
number=0
for host in {" ".join(HOSTS)}; do
  number=$((number + 1))
  mkdir {TRACES}/$host
  unshare --net --mount sh -c 'mount --bind {TRACES}/$0 {OWN} && echo $0 >"$1"
    exec sleep infinity' $host "$1/$host" </dev/null &
  pid=$!
  until [ -s "$1/$host" ]; do sleep 0.01; done
  ip link add $host type veth peer name eth0 netns $pid
  ip address add 10.77.$number.1/24 dev $host
  ip link set $host up
  nsenter --target $pid --net sh -ec "
    ip link set lo up
    ip address add 10.77.$number.2/24 dev eth0
    ip link set eth0 up
    ip route add default via 10.77.$number.1
    until ip -brief link show eth0 | grep -q ' UP '; do sleep 0.01; done"
done
echo ready
exec env --ignore-signal=CHLD cat >/dev/null
"""


class HostsError(Exception):
    """Something does not work on our hosts, or they leave something behind."""


class NoHostsError(HostsError):
    """The machine does not let us have hosts of our own."""


@dataclass(frozen=True)
class Process:
    """A process in the namespaces, as seen from outside."""

    pid: int
    inner: int
    """Its number in the PID namespace, by which a worker knows itself."""
    name: str


class Hosts:
    """What scenarios need of two hosts and a server; they end with :meth:`close` or this process.

    Process ids are those that a process knows of itself, on its host.
    """

    script: ClassVar[str]
    """Makes what the hosts are made of, says ``ready``, and ends with its standard input."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namespace = ""
        """The PID namespace of all, as in /proc/PID/ns/pid."""
        self._init = 0

    @property
    def shared(self) -> Path:
        """Where each host mounts the filesystem."""
        return self.directory / "shared"

    def open(self) -> None:
        """Make the hosts. Raises NoHostsError: this machine does not let us."""
        command = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--mount"]
        self._process = subprocess.Popen(
            [*command, "sh", "-c", _COVER + self.script, "hosts", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=_ENVIRONMENT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            why = " ".join(self._process.communicate()[1].split())
            message = f"no hosts can be made here: {why}"
            raise NoHostsError(message)
        (self._init,) = children(self._process.pid)
        self.namespace = os.readlink(f"/proc/{self._init}/ns/pid")

    def command(self, host: str, argv: list[str]) -> list[str]:
        """``argv`` as a command that runs on a host, in the directory ``/``.

        It takes its environment and its standard input from the process that starts it.
        """
        raise NotImplementedError

    def call(self, host: str, *words: object, limit_s: float = _START_S) -> str:
        """What a program printed on a host. Raises HostsError: it failed, or did not end."""
        argv = [str(word) for word in words]
        shown = shlex.join(argv)
        try:
            done = subprocess.run(
                self.command(host, argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=_ENVIRONMENT,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"{shown} on {host} did not end within {limit_s:g} s"
            raise HostsError(message) from None
        if done.returncode != 0:
            message = f"{shown} on {host} ended with {done.returncode}: {done.stdout}"
            raise HostsError(message)
        return done.stdout

    def read(self, host: str, root: Path, pattern: str) -> dict[str, bytes]:
        """The files below a directory that match, as a host sees them, by their relative paths.

        Symlinks give their target, directories nothing. Raises OSError: the filesystem does not
        answer. It may also hang, where the host's would.
        """
        raise NotImplementedError

    def traced(self, name: str, host: str = "") -> str:
        """What the processes of a host, or of all, wrote to the file of this name in :data:`OWN`.

        After a host's restart, what it wrote before is not its own any more.
        """
        raise NotImplementedError

    def living(self, host: str) -> set[int]:
        """The processes of a host; with namespaces those of all hosts, whose ids differ."""
        raise NotImplementedError

    def family(self, host: str, mark: str) -> list[int]:
        """The processes whose environment has this :data:`MARK`; parents before children."""
        raise NotImplementedError

    def signal(self, host: str, pids: list[int], number: signal.Signals) -> list[int]:
        """Send a signal to processes, in this order; those of them that were there."""
        raise NotImplementedError

    def stacks(self, host: str, pids: list[int]) -> list[str]:
        """What each process waits for in its kernel."""
        raise NotImplementedError

    def link(self, host: str, state: str) -> None:
        """Part a host from the server (``down``), or join them again (``up``)."""
        raise NotImplementedError

    def seen_inside(self, path: Path) -> Path:
        """A path of the first process as one that this process can open."""
        return Path(f"/proc/{self._init}/root{path}")

    def processes(self, name: str = "") -> list[Process]:
        """What lives in the PID namespace, all or those of one name."""
        return [one for one in processes_in(self.namespace) if name in ("", one.name)]

    def close(self) -> None:
        """End everything. Raises HostsError: something is left."""
        if not self.namespace:
            return
        self._process.communicate(timeout=LEAVING_S)
        deadline = time.monotonic() + LEAVING_S
        while left := [*map(str, self.processes()), *self._mounts()]:
            if time.monotonic() > deadline:
                message = f"the hosts left behind: {left}"
                raise HostsError(message)
            time.sleep(0.05)

    def _enter(self, pid: int, *namespaces: str) -> list[str]:
        return ["nsenter", "--target", str(pid), *(f"--{one}" for one in namespaces), "--"]

    def _mounts(self) -> list[str]:
        """Mounts of the directory that this process sees; there is none if all is well."""
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if f" {self.directory}" in line]


class Namespaces(Hosts):
    """Hosts of one kernel: they differ in their network and their mounts."""

    script = _NAMESPACES

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._holders: dict[str, int] = {}
        self._seen: dict[int, int] = {}

    @property
    def data(self) -> Path:
        """The server's directory; the hosts see it as well, and must not look."""
        return self.directory / "server"

    def open(self) -> None:
        super().open()
        hosts = zip(HOSTS, children(self._init), strict=True)
        self._holders = {SERVER: self._init, **dict(hosts)}

    def command(self, host: str, argv: list[str]) -> list[str]:
        return [*self._enter(self._holders[host], "pid", "net", "mount"), *argv]

    def seen_from(self, host: str, path: Path) -> Path:
        """A path on a host as one that this process can open. It hangs where the host's would."""
        return Path(f"/proc/{self._holders[host]}/root{path}")

    def read(self, host: str, root: Path, pattern: str) -> dict[str, bytes]:
        return contents(self.seen_from(host, root), pattern)

    def traced(self, name: str, host: str = "") -> str:
        # Beside those of the hosts there is the directory that each covers by its own.
        return joined(self.seen_inside(TRACES), f"{host or 'node*'}/{name}")

    def living(self, host: str) -> set[int]:
        return {one.inner for one in self.processes()}

    def family(self, host: str, mark: str) -> list[int]:
        found = [(age(_of(one.pid)), one.inner) for one in self.processes()
                 if is_marked(_of(one.pid), mark)]  # fmt: skip
        return [inner for _, inner in sorted(found)]

    def signal(self, host: str, pids: list[int], number: signal.Signals) -> list[int]:
        # To find all processes takes longer than an item where others use this machine as well.
        if not all(self._is(inner, self._seen.get(inner, 0)) for inner in pids):
            self.processes()
        found = []
        for inner in pids:
            with suppress(ProcessLookupError, KeyError):
                os.kill(self._seen[inner], number)
                found.append(inner)
        return found

    def processes(self, name: str = "") -> list[Process]:
        every = super().processes()
        self._seen = {one.inner: one.pid for one in every}
        return [one for one in every if name in ("", one.name)]

    def _is(self, inner: int, pid: int) -> bool:
        """Whether a process of this machine is the one that has this id in the namespace."""
        with suppress(OSError):
            ours = os.readlink(f"/proc/{pid}/ns/pid") == self.namespace
            return ours and _inner(_status(pid)) == inner
        return False

    def stacks(self, host: str, pids: list[int]) -> list[str]:
        outer = {one.inner: one.pid for one in self.processes()}
        return [stack(_of(outer[inner])) if inner in outer else "gone" for inner in pids]

    def link(self, host: str, state: str) -> None:
        # The cable's end at the server.
        self.call(SERVER, "ip", "link", "set", host, state)


def _of(pid: int) -> Path:
    return Path(f"/proc/{pid}")


def joined(root: Path, pattern: str) -> str:
    """The text of all files that match, one after the other."""
    return b"".join(contents(root, pattern).values()).decode()


def processes_in(namespace: str) -> list[Process]:
    """What lives in a PID namespace, which is named as in /proc/PID/ns/pid; no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(entry / "ns/pid") != namespace:
                continue
            status = _status(int(entry.name))
            if status["State"][0] != "Z":
                found.append(Process(int(entry.name), _inner(status), status["Name"]))
    return found


def children(pid: int) -> list[int]:
    """The processes that a process started and that have not ended."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _inner(status: dict[str, str]) -> int:
    return int(status["NSpid"].split()[-1])


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
