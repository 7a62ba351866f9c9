"""Ranks as actors of a real, local Ray."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import Hpctk, journal_lines, wait_until, workers_of
from tests.onlyray import only_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow]

psutil = pytest.importorskip("psutil")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with only_ray():
        yield


@pytest.fixture
def short_dir() -> Iterator[str]:
    """Ray's sockets lie far below it, and their paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as name:
        yield name


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def listening(pid: int) -> set[str]:
    """Where a process and all below it listen."""
    found = set()
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            open_ports = process.net_connections(kind="inet")
            found |= {one.laddr.ip for one in open_ports if one.status == psutil.CONN_LISTEN}
    return found


def test_a_killed_worker_and_a_killed_actor_are_replaced_and_nothing_is_lost(
    hpctk: Hpctk, short_dir: str
) -> None:
    script = hpctk.cwd / "hold"
    script.write_text("#!/bin/sh\necho start $1 >>trace\nuntil [ -e go ]; do sleep 0.05; done\n")
    script.chmod(0o755)
    run = Run.create("run", [{"n": number} for number in range(12)], command="./hold {n}")
    words = ("work", "run", "--engine", "ray", "--ray-address", "local", "--workers", 2)
    work = hpctk.start(*words, env={"TMPDIR": short_dir})

    def wait_for(count: int) -> None:
        """Every worker so far holds an item, and there were so many."""
        wait_until(
            lambda: len(hpctk.noted("start")) >= count and len(workers_of(run)) >= count,
            f"{count} workers",
            of=work,
        )

    wait_for(2)
    assert listening(work.pid)
    assert {address.removeprefix("::ffff:") for address in listening(work.pid)} == {"127.0.0.1"}
    (root,) = Path(short_dir).iterdir()
    assert root.stat().st_mode & 0o077 == 0, "others reach Ray's sockets"
    killed, other = (worker["pid"] for worker in workers_of(run))
    os.kill(killed, signal.SIGKILL)
    wait_for(3)
    # What is left of an actor that Ray kills; its worker is asked to finish its item.
    os.kill(parent_of(other), signal.SIGKILL)
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
    assert os.listdir(short_dir) == []
