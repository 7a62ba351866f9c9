"""Filesystems that two hosts share, each with what can happen to it."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from tests.sharedfs.hosts import ADDRESS, HOSTS, SERVER, Hosts, HostsError, Namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sharedfs.rehearsal import Size

_READY_S = 30.0


class Filesystem:
    """One filesystem in its hosts, mounted on both."""

    name: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    """What must be installed."""
    hangs: ClassVar[bool] = False
    """Whether users wait while the server is down; otherwise they get an error at once."""
    locks_reach: ClassVar[bool] = True
    """Whether a lock that one host holds is refused to the other."""
    loses_power: ClassVar[bool] = False
    """Whether its hosts are kernels, which can end with everything that they did not write."""
    lost_locks_are_freed: ClassVar[bool] = True
    """Whether the server frees the locks of a host that it hears nothing of."""
    machines: ClassVar[type[Hosts]] = Namespaces
    set_of: ClassVar[str] = ""
    """The filesystem whose hosts mount it as well; "" if it has hosts of its own."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def adapt(self, size: Size) -> None:
        """Set what depends on how much is rehearsed."""

    def holds_up_s(self, size: Size) -> float:
        """For how long a lost host can keep the other one from making names and reading files."""
        return 0.0

    @property
    def shared(self) -> Path:
        """Where each host mounts it."""
        return self.hosts.shared

    def start(self) -> None:
        """Serve it and mount it on both hosts."""
        self.serve()
        for host in HOSTS:
            self.mount(host)

    def serve(self) -> None:
        """Start the server, for the first time."""

    def mount(self, host: str) -> None:
        """Mount it on a host."""
        raise NotImplementedError

    def cut(self, host: str) -> None:
        """Part a host from the server: what it asks of the filesystem hangs."""
        self.hosts.link(host, "down")

    def heal(self, host: str) -> None:
        """Let the host reach the server again."""
        self.hosts.link(host, "up")

    def wait_for(self, host: str) -> None:
        """Wait until the host reaches the server, which may be a while after it can."""
        self._until(f"ls {self.hosts.shared}", host=host)

    def crash(self) -> None:
        """End the server by SIGKILL."""
        raise NotImplementedError

    def restart(self) -> None:
        """Start the server again."""
        raise NotImplementedError

    def restart_in_order(self) -> None:
        """End the server as its administrator would, and start it again."""
        raise NotImplementedError

    def power_off(self, host: str) -> None:
        """Cut a host's power: neither the host nor its processes can do anything more."""
        raise NotImplementedError

    def power_on(self, host: str) -> None:
        """Start a host whose power was cut, with its mounts."""
        raise NotImplementedError

    def _kill(self, program: str) -> None:
        pids = [one.inner for one in self.hosts.processes(program)]
        self.hosts.signal(SERVER, pids, signal.SIGKILL)

    def _until(self, condition: str, *, host: str = SERVER) -> None:
        """Wait until a shell's condition holds on a host. Raises HostsError: it never does."""
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                self.hosts.call(host, "sh", "-c", condition)
            except HostsError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return


# glusterd goes into the background only after it has started a Python program for each setting of
# replication between sites, one after the other, which takes long on a busy machine.
_NO_REPLICATION = """
for program in /usr/lib*/glusterfs/gsyncd /usr/lib/*/glusterfs/gsyncd /usr/libexec/glusterfs/gsyncd
do
  [ -e "$program" ] || continue
  printf '#!/bin/sh\necho gsyncd\n' >/run/gsyncd
  chmod +x /run/gsyncd
  mount --bind /run/gsyncd "$program"
done
"""


class GlusterFS(Filesystem):
    """GlusterFS with default options: a volume of one brick."""

    hosts: Namespaces

    name = "GlusterFS"
    programs = ("glusterd", "gluster", "glusterfs")

    def serve(self) -> None:
        brick = self.hosts.data / "brick"
        self.hosts.call(SERVER, "mkdir", brick)
        self.hosts.call(SERVER, "sh", "-ec", _NO_REPLICATION)
        self.hosts.call(SERVER, "glusterd")
        self._until("gluster --mode=script volume list")
        self._gluster("create", "vol", f"{ADDRESS}:{brick}", "force")
        self._gluster("start", "vol")

    def mount(self, host: str) -> None:
        log = self.hosts.data / f"{host}.log"
        volume = (f"--volfile-server={ADDRESS}", "--volfile-id=vol")
        self.hosts.call(host, "glusterfs", f"--log-file={log}", *volume, self.hosts.shared)
        self._until(f"mountpoint -q {self.hosts.shared} && ls {self.hosts.shared}", host=host)

    def crash(self) -> None:
        self._kill("glusterfsd")

    def restart(self) -> None:
        # Until glusterd has noticed that the brick is gone it starts none.
        start = "gluster --mode=script volume start vol force"
        self._until(f"{start} && sleep 0.2 && pidof glusterfsd")

    def _gluster(self, *words: object) -> None:
        self.hosts.call(SERVER, "gluster", "--mode=script", "volume", *words)


class MooseFS(Filesystem):
    """MooseFS with default options, which keep two copies: two chunk servers."""

    hosts: Namespaces
    name = "MooseFS"
    programs = ("mfsmaster", "mfschunkserver", "mfsmount")
    hangs = True

    _CHUNK_PORTS = (9422, 9522)

    def serve(self) -> None:
        data = self.hosts.data
        self._write("master.cfg", DATA_PATH=data / "master", EXPORTS_FILENAME=data / "exports",
                    MATOML_LISTEN_HOST=ADDRESS, MATOCS_LISTEN_HOST=ADDRESS,
                    MATOCL_LISTEN_HOST=ADDRESS)  # fmt: skip
        (self._data / "exports").write_text("* / rw,alldirs,maproot=0\n")
        (self._data / "master").mkdir()
        # What mfsmaster(8) takes for a filesystem that was never used.
        (self._data / "master" / "metadata.mfs").write_bytes(b"MFSM NEW")
        self._start_master()
        for port in self._CHUNK_PORTS:
            self._start_chunks(port)

    def _start_master(self) -> None:
        self.hosts.call(SERVER, "mfsmaster", "-c", self.hosts.data / "master.cfg", "-a", "start")

    def _start_chunks(self, port: int) -> None:
        name, data = f"chunk-{port}", self.hosts.data
        for directory in (name, f"{name}-disk"):
            (self._data / directory).mkdir()
        (self._data / f"{name}-disks").write_text(f"{data / name}-disk\n")
        self._write(f"{name}.cfg", DATA_PATH=data / name, HDD_CONF_FILENAME=f"{data / name}-disks",
                    MASTER_HOST=ADDRESS, BIND_HOST=ADDRESS, CSSERV_LISTEN_HOST=ADDRESS,
                    CSSERV_LISTEN_PORT=port)  # fmt: skip
        self.hosts.call(SERVER, "mfschunkserver", "-c", data / f"{name}.cfg", "start")

    @property
    def _data(self) -> Path:
        return self.hosts.seen_from(SERVER, self.hosts.data)

    def _write(self, name: str, **keys: object) -> None:
        keys |= {"WORKING_USER": "root", "WORKING_GROUP": "root", "SYSLOG_IDENT": name}
        text = "".join(f"{key} = {value}\n" for key, value in keys.items())
        (self._data / name).write_text(text)

    def mount(self, host: str) -> None:
        shared = self.hosts.shared
        self.hosts.call(host, "mfsmount", shared, "-H", ADDRESS)
        # Until the chunk servers are known there is no space; a moment longer they tell of none.
        probe = f"{shared}/.probe-{host}"
        space = f'test "$(stat -f -c %a {shared})" -gt 0'
        self._until(f"mountpoint -q {shared} && echo >{probe} && rm {probe} && {space}", host=host)

    def crash(self) -> None:
        self._kill("mfsmaster")
        self._until("! pidof mfsmaster")

    def restart(self) -> None:
        self._start_master()


class Bindfs(Filesystem):
    """One directory behind a bindfs on each host: locks are local to a host, as with many mounts.

    There is no server between them. What is cut is the process that answers for a mount, and what
    is restarted as well: its users are thrown out.
    """

    hosts: Namespaces
    name = "bindfs"
    programs = ("bindfs",)
    locks_reach = False

    def serve(self) -> None:
        self.hosts.call(SERVER, "mkdir", self.hosts.data / "directory")

    def mount(self, host: str) -> None:
        shared = self.hosts.shared
        self.hosts.call(
            host, "bindfs", "-o", f"fsname={host}", self.hosts.data / "directory", shared
        )
        self._until(f"mountpoint -q {shared}", host=host)

    def cut(self, host: str) -> None:
        self._signal(host, signal.SIGSTOP)

    def heal(self, host: str) -> None:
        self._signal(host, signal.SIGCONT)

    def crash(self) -> None:
        self._signal(HOSTS[0], signal.SIGKILL)

    def restart(self) -> None:
        host = HOSTS[0]
        self.hosts.call(host, "umount", "--lazy", self.hosts.shared)
        self.mount(host)

    def _signal(self, host: str, number: signal.Signals) -> None:
        self.hosts.call(host, "pkill", f"-{number.name[3:]}", "-xf", f"bindfs -o fsname={host} .*")


@contextmanager
def mounted(
    directory: Path, kinds: tuple[type[Filesystem], ...]
) -> Iterator[dict[str, Filesystem]]:
    """All of them by name, started at the same time and taken down at the end.

    Raises:
        NoHostsError: this machine does not let us have them.
        HostsError: one of them does not start, or leaves something behind.
    """
    all_hosts: dict[str, Hosts] = {}
    for kind in kinds:
        if not kind.set_of:
            (directory / kind.name).mkdir()
            all_hosts[kind.name] = kind.machines(directory / kind.name)
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda hosts: hosts.open(), all_hosts.values()))
            found = {kind.name: kind(all_hosts[kind.set_of or kind.name]) for kind in kinds}
            list(threads.map(Filesystem.start, found.values()))
        yield found
    finally:
        for hosts in all_hosts.values():
            hosts.close()
