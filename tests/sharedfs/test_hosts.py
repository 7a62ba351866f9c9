"""The hosts of the tests themselves: separate, and gone without a trace, however the tests end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sharedfs.filesystems import Bindfs, Filesystem
from tests.sharedfs.hosts import HOSTS, SERVER, Namespaces, processes_in
from tests.sharedfs.nfs import NFS42, NFS3Cached

REPOSITORY = Path(__file__).parents[2]

of_namespaces = pytest.mark.usefixtures("filesystems")  # skips where there can be none

_KILLED = """
import sys, time
from pathlib import Path
from tests.sharedfs.filesystems import Bindfs
from tests.sharedfs.hosts import HOSTS, Namespaces

hosts = Namespaces(Path(sys.argv[1]))
hosts.open()
filesystem = Bindfs(hosts)
filesystem.start()
filesystem.cut(HOSTS[0])
print(hosts.namespace, flush=True)
time.sleep(1000)
"""


@of_namespaces
def test_hosts_have_a_network_and_mounts_of_their_own(tmp_path: Path) -> None:
    hosts = Namespaces(tmp_path)
    hosts.open()
    try:
        Bindfs(hosts).start()
        hosts.call(HOSTS[0], "touch", hosts.shared / "file")

        assert (hosts.seen_from(HOSTS[1], hosts.shared) / "file").exists()
        assert os.listdir(hosts.seen_from(SERVER, hosts.shared)) == []
        assert os.listdir(tmp_path) == []
        networks = {hosts.call(host, "readlink", "/proc/self/ns/net") for host in (SERVER, *HOSTS)}
        assert len({*networks, os.readlink("/proc/self/ns/net") + "\n"}) == 4
    finally:
        hosts.close()


@of_namespaces
def test_hosts_of_tests_that_were_killed_leave_nothing_behind(tmp_path: Path) -> None:
    """Kernels run in a PID namespace as well, and end with it in the same way."""
    tests = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tests.stdout is not None
    namespace = tests.stdout.readline().strip()
    assert {one.name for one in processes_in(namespace)} == {"cat", "sleep", "bindfs"}

    tests.kill()
    tests.communicate()

    end = time.monotonic() + 10
    while processes_in(namespace) and time.monotonic() < end:
        time.sleep(0.01)
    assert processes_in(namespace) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_mounts_have_the_options_of_their_kind(nfs: dict[str, Filesystem]) -> None:
    """A kind that were another one by mistake would find nothing."""
    kinds = {name: one.hosts.call(HOSTS[1], "grep", one.shared.parent, "/proc/mounts")
             for name, one in nfs.items()}  # fmt: skip

    assert "vers=4.2" in kinds[NFS42.name]
    assert "vers=3," in kinds[NFS3Cached.name]
    assert "acregmin=60" in kinds[NFS3Cached.name]
