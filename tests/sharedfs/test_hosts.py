"""The hosts of the tests themselves: separate, and gone without a trace, however the tests end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sharedfs.filesystems import Bindfs
from tests.sharedfs.hosts import HOSTS, SERVER, Namespaces, processes_in

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("filesystems")  # skips where there can be none

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
