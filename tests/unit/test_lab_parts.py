"""Ports, packages, processes, directories and jobs of a lab, without a lab."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.lab.daemons import (
    free_block,
    is_free,
)
from hpc_toolkit.lab.directory import (
    make_directory,
)
from hpc_toolkit.lab.lab import Lab
from hpc_toolkit.lab.members import Member, member_node, members
from hpc_toolkit.lab.programs import ask, environment
from hpc_toolkit.lab.settings import LabPaths, lab_token
from tests.integration.realrun import lives, wait_until

SHARED_GROUP = 100
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, as only root can")


@pytest.fixture
def paths(tmp_path: Path) -> LabPaths:
    return LabPaths(tmp_path / "lab")


def look_only_at(monkeypatch: pytest.MonkeyPatch, span: range) -> None:
    monkeypatch.setattr("hpc_toolkit.lab.daemons.port_spans", lambda: [span])


class TestPorts:
    def test_a_port_with_a_listener_at_another_address_is_not_free(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or that listener would be taken for a daemon that can be reached from elsewhere."""
        with socket.create_server(("127.0.0.2", 0)) as other:
            port = other.getsockname()[1]
            assert is_free(port)
            look_only_at(monkeypatch, range(port, port + 1))

            with pytest.raises(ConfigError, match="no 1 consecutive free ports between"):
                free_block(1, seed=0)


class Processes:
    """The directories of processes in a /proc that a test makes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, pid: str, *, mount: str = "", environ: dict[str, str] | None = None, uid: int = -1
    ) -> Path:
        directory = self.root / pid
        directory.mkdir(parents=True)
        words = (environ or {}).items()
        for name, text in {
            "mountinfo": f"1 2 3:4 / / rw\n{mount}",
            "environ": "".join(f"{name}={value}\0" for name, value in words if value),
            "comm": "sleep\n",
            "status": f"Name:\tsleep\nUid:\t{os.geteuid() if uid < 0 else uid}\t0\t0\t0\n",
        }.items():
            (directory / name).write_text(text)
        return directory


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    monkeypatch.setattr("hpc_toolkit.lab.members.PROC", str(tmp_path / "proc"))
    return Processes(tmp_path / "proc")


def hosts_mount(token: str) -> str:
    return f"1 2 3:4 /hosts/{token}.0a.n1 /etc/hosts rw\n"


def of_a_job(paths: LabPaths) -> dict[str, str]:
    """The environment of a job of the lab."""
    return {
        "SLURM_CONF": str(paths.slurm_conf),
        "SLURM_JOB_ID": "7",
        "SLURM_CLUSTER_NAME": "hpctklab",
        "SLURMD_NODENAME": "n2",
    }


class TestMembers:
    def test_a_process_of_another_user_is_no_member_to_an_ordinary_user(
        self, paths: LabPaths, proc: Processes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or anybody who makes a mount with the token could keep a lab from ending."""
        for pid, uid in (("11", 1000), ("12", 1001), ("13", 0)):
            proc.add(pid, mount=hosts_mount(paths.token), uid=uid)
        found = {}

        for user in (1000, 0):
            monkeypatch.setattr(os, "geteuid", lambda user=user: user)
            found[user] = sorted(one.pid for one in members(paths.token))

        assert found == {1000: [11, 13], 0: [11, 12, 13]}

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ({}, True),
            # A user's shell after 'hpctk lab env', alone and inside a job of a real cluster.
            ({"SLURM_JOB_ID": "", "SLURM_CLUSTER_NAME": "", "SLURMD_NODENAME": ""}, False),
            ({"SLURM_CLUSTER_NAME": "site", "SLURMD_NODENAME": "gpu017"}, False),
            # The shell that salloc starts where it was called.
            ({"SLURMD_NODENAME": ""}, False),
            ({"SLURM_CONF": "/another/lab/etc/slurm.conf"}, False),
        ],
    )
    def test_without_the_mount_only_the_environment_of_a_job_makes_a_member(
        self, changes: dict[str, str], found: bool, paths: LabPaths, proc: Processes
    ) -> None:
        environ = {**of_a_job(paths), **changes}
        proc.add("11", environ=environ)
        # One that another lab's mount tells to be that lab's.
        proc.add("12", environ=environ, mount=hosts_mount(lab_token(proc.root)))

        assert members(paths.token) == ([Member(11, "n2", "sleep")] if found else [])

    def test_another_labs_mount_and_a_mere_mention_tell_nothing(self, paths: LabPaths) -> None:
        other = LabPaths(Path(f"{paths.root}2"))

        assert other.token != paths.token
        assert member_node(f"1 2 3:4 /{other.token}.0a.n1 /etc/hosts rw", paths.token) is None
        assert member_node(f"1 2 3:4 /x /mnt/{paths.token} rw", paths.token) is None
        assert member_node("", paths.token) is None

    def test_a_copy_of_a_labs_directory_does_not_name_its_processes(self, paths: LabPaths) -> None:
        inside = lab_token(paths.root, paths.root.parent)  # as a process in the lab's root has it
        for one in (paths, copy := LabPaths(Path(f"{paths.root}2"))):
            one.hosts.mkdir(parents=True)
            (one.hosts / f"{inside}.0a.n1").touch()

        assert paths.token == inside
        assert copy.token == lab_token(copy.root)
        assert copy.token[-8:] != paths.token[-8:]  # by which labs choose their ports


class TestDirectory:
    @pytest.mark.parametrize("locked", [False, True])
    @pytest.mark.parametrize("looks", [1, 2])
    def test_a_directory_that_another_up_begins_at_the_same_moment_is_accepted(
        self, paths: LabPaths, monkeypatch: pytest.MonkeyPatch, looks: int, locked: bool
    ) -> None:
        listed, look = [], os.listdir
        unfinished = paths.root / ".lab.json.1.tmp"

        def look_before_the_other(path: Path) -> list[str]:
            names = look(path)
            listed.append(names)
            if len(listed) == looks:
                paths.lock.touch()
                if unfinished.exists():
                    unfinished.rename(paths.record)
            return names

        paths.root.mkdir(mode=0o700)
        if locked:
            paths.lock.touch()
            unfinished.write_text('{"format": 1, "settings": {}, "start": ""}')
        monkeypatch.setattr("os.listdir", look_before_the_other)

        make_directory(paths)

        assert listed

    @pytest.mark.parametrize("mode", [0o775, 0o757])
    def test_a_directory_that_others_may_write_is_refused(self, paths: LabPaths, mode: int) -> None:
        paths.root.mkdir()
        paths.root.chmod(mode)

        with pytest.raises(ConfigError, match="other users can write to it"):
            make_directory(paths)

    def test_a_directory_below_one_open_to_all_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)

        with pytest.raises(ConfigError, match="other users can replace it, since all can write to"):
            make_directory(LabPaths(tmp_path / "open/lab"))

    @as_root
    def test_a_directory_below_one_of_a_shared_group_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "shared").mkdir()
        os.chown(tmp_path / "shared", -1, SHARED_GROUP)
        (tmp_path / "shared").chmod(0o775)

        with pytest.raises(ConfigError, match=f"group {SHARED_GROUP} can write to .*/shared"):
            make_directory(LabPaths(tmp_path / "shared/lab"))
        (tmp_path / "shared").chmod(0o1775)
        make_directory(LabPaths(tmp_path / "shared/lab"))

    def test_directories_above_are_made_for_this_user_alone_to_write(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            make_directory(LabPaths(tmp_path / "state/labs/lab"))
        finally:
            os.umask(before)

        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o755

    @pytest.mark.parametrize(
        "text",
        ['{"name": "the experiments lab"}', "null", '{"format": 1, "set', "\xff"],
    )
    def test_a_foreign_lab_json_makes_no_lab(self, paths: LabPaths, text: str) -> None:
        paths.root.mkdir()
        paths.record.write_text(text, encoding="latin-1")
        (paths.root / "db").mkdir()
        (paths.root / "thesis.tex").touch()
        before = paths.root.stat().st_mode

        with pytest.raises(
            ConfigError, match="contains files that do not belong to a lab, such as db"
        ):
            make_directory(paths)
        assert Lab(paths).down() == 0
        assert {one.name for one in paths.root.iterdir()} == {"lab.json", "db", "thesis.tex"}
        assert paths.root.stat().st_mode == before


def test_a_daemon_that_does_not_answer_is_an_error_not_a_wait(
    paths: LabPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the question started is killed: a wrapper's child would keep the pipe open."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nsleep 3600 &\necho $! > {tmp_path}/pid\nwait\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    for limit_s in (0.3, 3.0, 30.0, 300.0):
        monkeypatch.setattr("hpc_toolkit.lab.programs.ANSWER_S", limit_s)
        message = f"^squeue did not answer within {re.escape(f'{limit_s:g}')} s"
        with pytest.raises(HpcToolkitError, match=message) as caught:
            ask(paths, "squeue")
        assert str(paths.logs) in caught.value.hint
        # On a busy machine the program may have been killed before it started its child.
        if (tmp_path / "pid").exists():
            break

    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not lives(child), "the child to end")


def test_a_lab_is_asked_without_the_variables_of_another_slurm(
    paths: LabPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HOME", "/home/ada")

    told = environment(paths)

    assert {key: told[key] for key in told if key.startswith(("SLURM", "SBATCH", "SRUN"))} == {
        "SLURM_CONF": str(paths.slurm_conf)
    }
    assert told["HOME"] == "/home/ada"
