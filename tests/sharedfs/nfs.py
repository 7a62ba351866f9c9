"""The kernel's NFS between kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tests.sharedfs.filesystems import Filesystem
from tests.sharedfs.hosts import SERVER
from tests.sharedfs.kernels import PROGRAMS, Kernels

if TYPE_CHECKING:
    from tests.sharedfs.rehearsal import Size


class NFS(Filesystem):
    """An export of the server's guest, which the hosts' guests mount."""

    hosts: Kernels
    machines = Kernels
    programs = PROGRAMS
    hangs = True
    loses_power = True

    options: ClassVar[str]
    source: ClassVar[str]

    @property
    def _at(self) -> Path:
        return Path("/run/nfs") / self.name.replace(" ", "-")

    @property
    def shared(self) -> Path:
        # A directory of its own, since one export may be mounted as several filesystems.
        return self._at / self._at.name

    def mount(self, host: str) -> None:
        self.hosts.mount(host, self._at, self.options, self.source)
        self.hosts.call(host, "mkdir", "-p", self.shared)

    def adapt(self, size: Size) -> None:
        self.hosts.serve(size.server_lease_s, size.server_grace_s)

    def crash(self) -> None:
        self.hosts.power_off(SERVER)

    def restart(self) -> None:
        self.hosts.reboot(SERVER)

    def restart_in_order(self) -> None:
        self.hosts.restart_server()

    def power_off(self, host: str) -> None:
        self.hosts.power_off(host)

    def power_on(self, host: str) -> None:
        self.hosts.reboot(host)


class NFS3(NFS):
    """Version 3: locks belong to another protocol, which keeps those of a lost client for ever."""

    name = "NFSv3"
    lost_locks_are_freed = False
    options = "vers=3"
    source = "/srv/export"


class NFS3Cached(NFS3):
    """The same with caches that are asked anew as seldom as administrators make it."""

    name = "NFSv3 actimeo=60"
    set_of = NFS3.name
    options = "vers=3,actimeo=60,lookupcache=all,nosharecache"


class NFS42(NFS):
    """Version 4.2: the server keeps what a lost client had for a lease, and delegates files."""

    name = "NFSv4.2"
    options = "vers=4.2"
    source = "/"

    def holds_up_s(self, size: Size) -> float:
        """From Linux 6.6 on, a server delegates writing, and later directories too.

        It asks a lost host to give that up for as long as its lease, and then ends the lease.
        """
        major, minor = self.hosts.call(SERVER, "uname", "-r").split(".")[:2]
        return 2.0 * size.server_lease_s if (int(major), int(minor)) >= (6, 6) else 0.0
