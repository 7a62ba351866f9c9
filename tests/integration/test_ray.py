"""Ranks as actors of a real Ray on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from hpc_toolkit.run import Run
from hpc_toolkit.system.processes import parent_of
from tests.integration.realrun import Hpctk, journal_lines, wait_until, workers_of

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Wait until Rays of other tests on this machine have ended."""
    pytest.importorskip("ray")
    with FileLock(Path(tempfile.gettempdir()) / "hpctk-ray-tests.lock", timeout=240.0):
        yield


AUTHENTICATED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture
def address() -> Iterator[str]:
    """A cluster of this machine, where paths of its sockets have at most 107 bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = "127.0.0.1:{1}".format(*listener.getsockname())
    words = ["--head", "--block", "--num-cpus=2", "--include-dashboard=false"]
    words += ["--node-ip-address=127.0.0.1", f"--port={found.rpartition(':')[2]}"]
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start", *words)
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp", ignore_cleanup_errors=True) as name:
        environ = {**os.environ, **AUTHENTICATED, "RAY_USAGE_STATS_ENABLED": "0"}
        with subprocess.Popen([*ray, f"--temp-dir={name}/r"], env=environ) as head:
            wait_until(lambda: accepts(found), "Ray to listen")
            yield found
            head.terminate()


def accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True


def test_a_killed_worker_and_a_killed_actor_are_replaced_and_nothing_is_lost(
    hpctk: Hpctk, address: str
) -> None:
    script = hpctk.cwd / "hold"
    script.write_text("#!/bin/sh\necho start $1 >>trace\nuntil [ -e go ]; do sleep 0.05; done\n")
    script.chmod(0o755)
    run = Run.create("run", [{"n": number} for number in range(12)], command="./hold {n}")
    words = ("work", "run", "--engine", "ray", "--ray-address", address, "--workers", 2)
    work = hpctk.start(*words, env=AUTHENTICATED)

    def wait_for(count: int) -> None:
        """Every worker so far holds an item, and there were so many."""
        wait_until(
            lambda: len(hpctk.noted("start")) >= count and len(workers_of(run)) >= count,
            f"{count} workers",
            of=work,
        )

    wait_for(2)
    killed, other = (worker["pid"] for worker in workers_of(run))
    os.kill(killed, signal.SIGKILL)
    wait_for(3)
    # What is left of an actor that Ray kills; its worker is asked to finish its item.
    os.kill(parent_of(other)[0], signal.SIGKILL)
    wait_for(4)
    (hpctk.cwd / "go").touch()
    ended = work.ended()

    assert ended.code == 0, ended.err
    assert ended.out == ""
    assert "starts again: its worker was killed by SIGKILL" in ended.err
    rows = run.results()
    assert [row["state"] for row in rows] == ["done"] * 12
    assert {row["attempts"] for row in rows} == {1}
    assert len(journal_lines(run, "death")) == 1
    assert sorted(worker["rank"] for worker in workers_of(run)) == [0, 0, 1, 1]
