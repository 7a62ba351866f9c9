"""Hosts that are kernels: each with its own boot, trace and mounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sharedfs.hosts import HOSTS, SERVER
from tests.sharedfs.nfs import NFS42, NFS3Cached

if TYPE_CHECKING:
    from tests.sharedfs.filesystems import Filesystem

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nfs")]  # skips where there can be none


def test_each_host_is_a_kernel_with_a_trace_of_its_own(nfs: dict[str, Filesystem]) -> None:
    filesystem = nfs[NFS42.name]
    hosts = filesystem.hosts
    boot = "/proc/sys/kernel/random/boot_id"

    boots = {hosts.call(host, "cat", boot) for host in (SERVER, *HOSTS)}
    for host in HOSTS:
        hosts.call(host, "sh", "-c", f"echo {host} >>/run/rehearsal/trace/own/mine")
    hosts.call(HOSTS[0], "touch", filesystem.shared / "seen")

    assert len(boots) == 3
    assert [hosts.traced("mine", host) for host in HOSTS] == [f"{host}\n" for host in HOSTS]
    assert hosts.traced("mine") == "".join(f"{host}\n" for host in HOSTS)
    assert list(hosts.read(HOSTS[1], filesystem.shared, "seen")) == ["seen"]


def test_mounts_have_the_options_of_their_kind(nfs: dict[str, Filesystem]) -> None:
    """A kind that were another one by mistake would find nothing."""
    kinds = {name: one.hosts.call(HOSTS[1], "grep", one.shared.parent, "/proc/mounts")
             for name, one in nfs.items()}  # fmt: skip

    assert "vers=4.2" in kinds[NFS42.name]
    assert "vers=3," in kinds[NFS3Cached.name]
    assert "acregmin=60" in kinds[NFS3Cached.name]
