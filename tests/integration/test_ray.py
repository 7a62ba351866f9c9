"""Ranks as actors of a real Ray: a local one, and one that runs already."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
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

# Not the program beside the interpreter, which does not start from every path.
RAY = (sys.executable, "-m", "ray.scripts.scripts")
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


class Cluster:
    """A Ray with two GPUs that do not exist, which only those reach who know its token."""

    def __init__(self, hpctk: Hpctk, root: str) -> None:
        self._token = secrets.token_hex(32)
        self._environ = hpctk.environment(
            {
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self._token,
            }
        )
        port_file = Path(root) / "port"
        argv = [*RAY, "start", "--head", "--port=0", "--num-cpus=2", "--num-gpus=2", "--block"]
        argv += [f"--temp-dir={root}", "--include-dashboard=false", "--node-ip-address=127.0.0.2"]
        argv += ["--object-store-memory=100000000"]
        with port_file.open("wb") as printed:
            self.process = subprocess.Popen(
                argv, env=self._environ, stdout=printed, stderr=subprocess.STDOUT
            )
        self.address = wait_until(
            lambda: next(
                (
                    word.strip("'\",.")
                    for word in port_file.read_text().split()
                    if "127.0.0.2:" in word
                ),
                "",
            ),
            "a Ray that listens",
        ).removeprefix("--address='")

    @property
    def of_members(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}

    def down(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def cluster(hpctk: Hpctk, short_dir: str) -> Iterator[Cluster]:
    started = Cluster(hpctk, short_dir)
    try:
        yield started
    finally:
        started.down()


@pytest.mark.soak  # tests/slurm/test_ray.py joins a Ray that runs and drains from it
def test_a_cluster_that_runs_already_is_joined_drained_from_and_left_running(
    hpctk: Hpctk, cluster: Cluster
) -> None:
    items = hpctk.cwd / "items.jsonl"
    items.write_text("".join(f'{{"n": {number}}}\n' for number in range(30)))
    script = hpctk.cwd / "where"
    script.write_text(
        "#!/bin/sh\nsleep 0.2\n"
        'echo "{\\"gpu\\": \\"$CUDA_VISIBLE_DEVICES\\", \\"rank\\": \\"$RANK/$WORLD_SIZE\\"}"\n'
    )
    script.chmod(0o755)
    assert hpctk("init", "run", "--command", "./where", "--items", items).code == 0
    words = ("work", "run", "--engine", "ray", "--ray-address", cluster.address)

    driver = hpctk.start(*words, env=cluster.of_members)
    wait_until(
        lambda: Run.open(hpctk.cwd / "run").status().stages["items"].done > 2,
        "results",
        of=driver,
    )
    driver.send(signal.SIGTERM)
    drained = driver.ended()
    assert drained.code == 75, drained.err

    finished = hpctk(*words, env=cluster.of_members)
    assert finished.code == 0, finished.err
    assert cluster.process.poll() is None
    gathered = hpctk("gather", "run", "-o", "rows.jsonl")
    assert gathered.code == 0, gathered.err
    rows = [json.loads(line) for line in (hpctk.cwd / "rows.jsonl").read_text().splitlines()]
    assert {row["state"] for row in rows} == {"done"}
    assert {row["attempts"] for row in rows} == {1}
    # One worker per GPU, each with a GPU of its own.
    assert {row["value"]["gpu"] for row in rows} == {"0", "1"}
    assert {row["value"]["rank"] for row in rows} == {"0/2", "1/2"}


@pytest.mark.soak
def test_a_cluster_refuses_who_does_not_know_its_token(hpctk: Hpctk, cluster: Cluster) -> None:
    """Ray itself tries for a minute or two."""
    hpctk.make([{}])
    words = ("work", "run", "--engine", "ray", "--ray-address", cluster.address)

    stranger = hpctk(*words, env={"RAY_AUTH_MODE": "disabled"})

    assert stranger.code == 1
    assert f"error: no Ray cluster answers at {cluster.address}" in stranger.err
    assert "hint: " in stranger.err


def test_a_program_whose_ray_does_not_start_fails(hpctk: Hpctk) -> None:
    (hpctk.cwd / "program").write_text("#!/bin/sh\n: >begun\n")
    (hpctk.cwd / "program").chmod(0o755)
    words = ("ray", "symmetric-run", "--address", "127.0.0.1:20999", "--num-cpus=none")
    done = subprocess.run(
        (sys.executable, "-m", "hpc_toolkit.engines.ray.node", *words, "--", "./program"),
        cwd=hpctk.cwd,
        env=hpctk.environment({"RAY_USAGE_STATS_ENABLED": "0"}),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert not (hpctk.cwd / "begun").exists()
    assert "'none' is not a valid integer" in done.stderr
    assert "error: Ray did not start on the first node" in done.stderr
