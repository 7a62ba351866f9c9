"""The hosts of the tests themselves: separate, and gone without a trace, however the tests end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sharedfs import hosts as module
from tests.sharedfs.agent import MARK
from tests.sharedfs.filesystems import Bindfs
from tests.sharedfs.hosts import HOSTS, SERVER, HostsError, Namespaces
from tests.sharedfs.ranks import Ranks
from tests.sharedfs.rehearsal import wait_until

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
    tests = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tests.stdout is not None
    namespace = tests.stdout.readline().strip()
    before = module.processes_in(namespace)

    tests.kill()
    tests.communicate()

    assert {"cat", "sleep", "bindfs"} == {one.name for one in before}
    end = time.monotonic() + 10
    while module.processes_in(namespace) and time.monotonic() < end:
        time.sleep(0.01)
    assert module.processes_in(namespace) == []
    assert os.listdir(tmp_path) == []


def test_hosts_end_with_a_user_that_waits_for_a_dead_mount(tmp_path: Path) -> None:
    hosts = Namespaces(tmp_path)
    hosts.open()
    filesystem = Bindfs(hosts)
    filesystem.start()
    filesystem.cut(HOSTS[0])
    waiting = subprocess.Popen(hosts.command(HOSTS[0], ["touch", str(hosts.shared / "file")]))
    while not hosts.processes("touch"):
        time.sleep(0.01)

    hosts.close()

    assert waiting.wait(10) == -signal.SIGKILL
    assert hosts.processes() == []


def test_a_mount_that_is_left_behind_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVING_S", 0.2)
    hosts = Namespaces(tmp_path)
    hosts.open()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True)
    try:
        with pytest.raises(HostsError, match=f"left behind: .*{tmp_path.name}"):
            hosts.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_machine_that_allows_no_mounts_is_told(tmp_path: Path) -> None:
    hosts = Namespaces(tmp_path / "absent")

    with pytest.raises(HostsError, match=r"no hosts can be made here: .*absent"):
        hosts.open()

    hosts.close()


def test_what_does_not_end_is_shown_at_the_place_where_it_waits(tmp_path: Path) -> None:
    program = "import threading; print('up', flush=True); threading.Event().wait()"
    out, err = tmp_path / "out", tmp_path / "err"
    (tmp_path / "hosts").mkdir()
    hosts = Namespaces(tmp_path / "hosts")
    hosts.open()
    argv = [sys.executable, "-X", "faulthandler", "-c", program]
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            hosts.command(HOSTS[0], argv),
            env={**os.environ, MARK: "waits"},
            stdout=out_file,
            stderr=err_file,
        )
    wait_until(out.read_text, "a process that is up", limit_s=30.0)

    with pytest.raises(AssertionError, match=r"(?s)still run after 0.01 s.*futex.*threading.py"):
        Ranks(hosts, HOSTS[0], "waits", process, out, err).ended(limit_s=0.01)

    assert process.returncode == -signal.SIGABRT
    hosts.close()
