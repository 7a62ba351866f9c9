"""Two hosts and a file server on this machine, each with a network and mounts of its own.

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
from typing import TYPE_CHECKING

from hpc_toolkit.lab.packages import search_path

if TYPE_CHECKING:
    import signal

ADDRESS = "10.77.0.1"
"""The server's. Neither GlusterFS nor MooseFS takes a loopback address."""
SERVER = "server"
HOSTS = ("node1", "node2")
PROGRAMS = ("unshare", "nsenter", "ip", "mount")

LEAVING_S = 10.0
_START_S = 30.0
_ENVIRONMENT = {"PATH": search_path(), "LC_ALL": "C.UTF-8"}

# Argument: a directory for all mounts. Covered as well is what daemons would leave on the machine.
# The first process takes in orphans; one that ignores SIGCHLD leaves none of them as a zombie, for
# which glusterd would wait.
_INIT = f"""
set -eu
for covered in "$1" /run /var/lib/glusterd /var/log/glusterfs; do
  if [ -d "$covered" ]; then mount -t tmpfs -o size=4g tmpfs "$covered"; fi
done
mkdir "$1/server" "$1/shared"
ip link set lo up
ip address add {ADDRESS}/32 dev lo
number=0
for host in {" ".join(HOSTS)}; do
  number=$((number + 1))
  unshare --net --mount sh -c 'echo $0 >"$1"; exec sleep infinity' $host "$1/$host" </dev/null &
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
    """The namespaces; they end with :meth:`close` or with this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._holders: dict[str, int] = {}
        self.namespace = ""
        """The PID namespace of all, as in /proc/PID/ns/pid."""

    @property
    def shared(self) -> Path:
        """Where each host mounts the filesystem."""
        return self.directory / "shared"

    @property
    def data(self) -> Path:
        """The server's directory; the hosts see it as well, and must not look."""
        return self.directory / "server"

    def open(self) -> None:
        """Make the hosts.

        Raises:
            NoHostsError: this machine does not let us.
        """
        command = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--mount"]
        self._process = subprocess.Popen(
            [*command, "sh", "-c", _INIT, "hosts", str(self.directory)],
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
        (init,) = _children(self._process.pid)
        self.namespace = os.readlink(f"/proc/{init}/ns/pid")
        self._holders = {SERVER: init, **dict(zip(HOSTS, _children(init), strict=True))}

    def command(self, host: str, argv: list[str]) -> list[str]:
        """``argv`` as a command that runs on a host, in the directory ``/``."""
        enter = ["nsenter", "--target", str(self._holders[host]), "--pid", "--net", "--mount"]
        return [*enter, "--", *argv]

    def call(self, host: str, *words: object, limit_s: float = _START_S) -> str:
        """Run a program on a host to its end; what it printed.

        Raises:
            HostsError: it failed, or did not end.
        """
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

    def seen_from(self, host: str, path: Path) -> Path:
        """A path on a host as one that this process can open. It hangs where the host's would."""
        return Path(f"/proc/{self._holders[host]}/root{path}")

    def link(self, host: str, state: str) -> None:
        """Plug a host's cable out (``down``) or in (``up``), at the server's end."""
        self.call(SERVER, "ip", "link", "set", host, state)

    def processes(self, name: str = "") -> list[Process]:
        """What lives in the namespaces, all or those of one name."""
        return [one for one in processes_in(self.namespace) if name in ("", one.name)]

    def signal(self, inner: int, number: signal.Signals) -> bool:
        """Send a signal to the process that has this number inside; whether it lives."""
        for one in self.processes():
            if one.inner == inner:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, number)
                    return True
        return False

    def close(self) -> None:
        """End everything.

        Raises:
            HostsError: something is left.
        """
        if not self.namespace:
            return
        self._process.communicate(timeout=LEAVING_S)
        deadline = time.monotonic() + LEAVING_S
        while left := [*map(str, self.processes()), *self._mounts()]:
            if time.monotonic() > deadline:
                message = f"the hosts left behind: {left}"
                raise HostsError(message)
            time.sleep(0.05)

    def _mounts(self) -> list[str]:
        """Mounts of the directory that this process sees; there is none if all is well."""
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if f" {self.directory}" in line]


def processes_in(namespace: str) -> list[Process]:
    """What lives in a PID namespace, which is named as in /proc/PID/ns/pid; no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = _status(int(entry.name))
            if os.readlink(entry / "ns/pid") == namespace and status["State"][0] != "Z":
                inner = int(status["NSpid"].split()[-1])
                found.append(Process(int(entry.name), inner, status["Name"]))
    return found


def _children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
