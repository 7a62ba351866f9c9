"""CephFS, mounted by its client in user space."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

from tests.sharedfs.filesystems import Filesystem
from tests.sharedfs.hosts import ADDRESS, SERVER, HostsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.sharedfs.hosts import Namespaces
    from tests.sharedfs.rehearsal import Size

_CONFIGURATION = """\
[global]
fsid = {fsid}
mon_host = v2:{address}:3300
public_addr = {address}
ms_bind_ipv6 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
keyring = /dev/null
run_dir = {data}
mon_data = {data}/mon
osd_data = {data}/osd
mds_data = {data}/mds
crash_dir = {data}
log_file = {data}/$name.$pid.log
mon_cluster_log_file = {data}/cluster.log
admin_socket =
mon_allow_pool_size_one = true
osd_pool_default_size = 1
osd_pool_default_pg_num = 8
osd_crush_chooseleaf_type = 0
osd_objectstore = {store}
bluestore_block_size = 2147483648
# With its own cache, ceph-fuse 16.2.15 gives wrong bytes of a file to which another host appends,
# and at times no answer for ever.
client_oc = false
# With the kernel's, 1 % of files that are rewritten three times at once look as before for 10 s.
fuse_disable_pagecache = true
# ceph-fuse closes its standard error when it has mounted. libfuse reads requests through a pipe
# that gets this number, so an error written there displaces requests, and nobody answers these.
err_to_stderr = false
# The defaults suit a cluster: 8 s more until it serves.
bdev_aio_poll_ms = 10
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
"""
_SESSION_S = 60
"""The default, see Size.eviction_s."""
_TICK_S = 5
"""How often the metadata server looks for clients to evict; the default."""


def _writes_directly(path: Path) -> bool:
    """Whether a file can be opened as the storage daemon does; on a tmpfs since Linux 6.6."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


class CephFS(Filesystem):
    """CephFS with one daemon of each kind, which are one server, and one copy of everything.

    A manager is not needed; without one the filesystem reports no free space.
    """

    hosts: Namespaces
    name = "CephFS"
    programs = ("ceph", "monmaptool", "ceph-mon", "ceph-osd", "ceph-mds", "ceph-fuse", "pkill")
    hangs = True
    loses_power = True

    _DAEMONS = ("ceph-mon", "ceph-osd", "ceph-mds")
    _on_disk: bool
    """Whether the data outlives a storage daemon that is killed, and not only one that ends."""

    def serve(self) -> None:
        data, fsid = self.hosts.data, uuid.uuid4()
        at = self.hosts.seen_from(SERVER, data)
        self._on_disk = _writes_directly(at / "direct")
        store = "bluestore" if self._on_disk else "memstore"
        configuration = _CONFIGURATION.format(fsid=fsid, address=ADDRESS, data=data, store=store)
        (at / "ceph.conf").write_text(configuration)
        for name in ("mon", "osd", "mds"):
            (at / name).mkdir()
        address = ("--addv", "a", f"[v2:{ADDRESS}:3300]")
        self.hosts.call(SERVER, "monmaptool", "--create", "--fsid", fsid, *address, data / "monmap")
        self._daemon("ceph-mon", "--mkfs", "--monmap", data / "monmap")
        self._daemon("ceph-mon")
        osd = uuid.uuid4()
        self._ceph("osd", "new", osd)
        self._daemon("ceph-osd", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd")
        for pool in ("metadata", "data"):
            self._ceph("osd", "pool", "create", pool)
        self._ceph("fs", "new", "fs", "metadata", "data")
        self._daemon("ceph-mds")
        self._until(f"ceph {' '.join(self._configured)} mds stat | grep up:active")

    def adapt(self, size: Size) -> None:
        option = "mds_cap_revoke_eviction_timeout"
        self._ceph("config", "set", "mds", option, size.eviction_s)

    def holds_up_s(self, size: Size) -> float:
        return (size.eviction_s or _SESSION_S) + 2 * _TICK_S

    def mount(self, host: str) -> None:
        self.hosts.call(host, "ceph-fuse", *self._configured, self.hosts.shared)

    def wait_for(self, host: str) -> None:
        # A host that the server evicted has to mount it again.
        try:
            self.hosts.call(host, "ls", self.hosts.shared)
        except HostsError:
            self._mount_again(host)

    def crash(self) -> None:
        self._end("KILL", [one for one in self._DAEMONS if one != "ceph-osd" or self._on_disk])

    def restart(self) -> None:
        for program in self._DAEMONS:
            if not self.hosts.processes(program):
                self._daemon(program)

    def restart_in_order(self) -> None:
        # A daemon says goodbye to the monitor, and waits for it if that has ended.
        for program in reversed(self._DAEMONS):
            self._end("TERM", [program])
        self.restart()

    def power_off(self, host: str) -> None:
        self.cut(host)
        self._end_on(host, "python.*|ceph-fuse")

    def power_on(self, host: str) -> None:
        self.heal(host)
        self._mount_again(host)

    @property
    def _configured(self) -> tuple[str, ...]:
        return ("-c", f"{self.hosts.data}/ceph.conf")

    def _ceph(self, *words: object) -> None:
        self.hosts.call(SERVER, "ceph", *self._configured, *words)

    def _daemon(self, program: str, *words: object) -> None:
        name = "0" if program == "ceph-osd" else "a"
        self.hosts.call(SERVER, program, *self._configured, "-i", name, *words)

    def _end(self, signal_name: str, programs: Sequence[str]) -> None:
        names = "|".join(programs)
        self.hosts.call(SERVER, "pkill", f"-{signal_name}", "-x", names)
        self._until(f"! pgrep -x '{names}'")

    def _mount_again(self, host: str) -> None:
        self._end_on(host, "ceph-fuse")
        self.hosts.call(host, "umount", "--lazy", self.hosts.shared)
        self.mount(host)

    def _end_on(self, host: str, names: str) -> None:
        # All hosts share the process ids; each has a network of its own.
        kill = f"pkill -KILL --ns $$ --nslist net -x '{names}' || true"
        self.hosts.call(host, "sh", "-c", kill)
