"""A lab's settings, directories and processes, without a lab, and the roots that it takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.lab import Lab
from hpc_toolkit.lab.commands import check_programs, entering, find_root
from hpc_toolkit.lab.settings import MAX_SOCKET_BYTES, LabPaths, LabSettings, lab_token
from hpc_toolkit.lab.state import Member, make_directory, members


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nodes": 0}, "--nodes: 0 is outside 1..256"),
        ({"gpus_per_node": -1}, "--gpus-per-node: -1 is outside 0..64"),
        ({"gpu_type": "l40s:4\nSlurmUser=x"}, "--gpu-type: .* is not a valid GPU type"),
        ({"gpu_type": ""}, "--gpu-type: '' is not"),
        ({"root": "/a,b"}, "'/a,b' is not a directory that mount can name"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LabSettings(**settings)  # type: ignore[arg-type] # what a test gives is not checked


def test_a_directory_that_slurm_or_a_socket_cannot_name_is_refused() -> None:
    for directory in ("/tmp/a b", "/tmp/%n", "lab", "/tmp/é", "/a\nb"):
        with pytest.raises(ConfigError, match="a directory that Slurm's configuration can name"):
            LabPaths(Path(directory))
    longest = Path("/" + "d" * (MAX_SOCKET_BYTES - len("/munge/socket") - 1))

    assert len(str(LabPaths(longest).munge_socket)) == MAX_SOCKET_BYTES
    with pytest.raises(ConfigError, match="1 bytes too long for its sockets"):
        LabPaths(Path(f"{longest}d"))


@pytest.fixture
def paths(tmp_path: Path) -> LabPaths:
    return LabPaths(tmp_path / "lab")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc whose processes a test adds."""
    monkeypatch.setattr("hpc_toolkit.lab.state.PROC", str(tmp_path / "proc"))
    return tmp_path / "proc"


def add_process(directory: Path, uid: int, mount: str = "", **environ: str) -> None:
    directory.mkdir(parents=True)
    words = [f"{name}={value}\0" for name, value in environ.items() if value]
    (directory / "mountinfo").write_text(f"1 2 3:4 / / rw\n{mount}")
    (directory / "environ").write_text("".join(words))
    (directory / "comm").write_text("sleep\n")
    (directory / "status").write_text(f"Name:\tsleep\nUid:\t{uid}\t0\t0\t0\n")


def hosts_mount(token: str) -> str:
    return f"1 2 3:4 /hosts/{token}.0a.n1 /etc/hosts rw\n"


def test_a_process_of_another_user_is_no_member_to_an_ordinary_user(
    paths: LabPaths, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or anybody who makes a mount with the token could keep a lab from ending."""
    for pid, uid in (("11", 1000), ("12", 1001), ("13", 0)):
        add_process(proc / pid, uid, hosts_mount(paths.token))
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
    changes: dict[str, str], found: bool, paths: LabPaths, proc: Path
) -> None:
    job = {"SLURM_CONF": str(paths.slurm_conf), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n2"}
    environ = {**job, "SLURM_CLUSTER_NAME": "hpctklab", **changes}
    add_process(proc / "11", os.geteuid(), **environ)
    # One that another lab's mount tells to be that lab's.
    add_process(proc / "12", os.geteuid(), hosts_mount(lab_token(proc)), **environ)

    assert members(paths.token) == ([Member(11, "n2", "sleep")] if found else [])


@pytest.mark.parametrize(
    ("mode", "below", "why"),
    [
        (0o775, "", "other users can write to it"),
        (0o757, "", "other users can write to it"),
        (0o777, "lab", "other users can replace it, since all can write to"),
    ],
)
def test_a_directory_that_others_may_write_or_replace_is_refused(
    tmp_path: Path, mode: int, below: str, why: str
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)

    with pytest.raises(ConfigError, match=why):
        make_directory(LabPaths(tmp_path / "open" / below))


@pytest.mark.parametrize(
    "text", ['{"name": "the experiments lab"}', "null", '{"format": 1, "set', "\xff"]
)
def test_a_foreign_lab_json_makes_no_lab(paths: LabPaths, text: str) -> None:
    paths.root.mkdir()
    paths.record.write_text(text, encoding="latin-1")
    (paths.root / "db").mkdir()
    (paths.root / "thesis.tex").touch()
    before = paths.root.stat().st_mode

    with pytest.raises(ConfigError, match="files that do not belong to a lab, such as db"):
        make_directory(paths)
    assert Lab(paths).down() == 0
    assert {one.name for one in paths.root.iterdir()} == {"lab.json", "db", "thesis.tex"}
    assert paths.root.stat().st_mode == before


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("./nowhere", "--slurm: ./nowhere is not a directory", "unpack an image"),
        ("/usr/..", "--slurm: /usr/.. is the root of this machine", "leave out --slurm"),
    ],
)
def test_a_directory_that_cannot_be_a_root_is_refused_with_a_way_out(
    given: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    with pytest.raises(ConfigError, match=message) as caught:
        find_root(given)

    assert hint in caught.value.hint


def test_a_root_without_slurm_and_a_link_that_leads_out_of_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    (tmp_path / "usr/bin").mkdir(parents=True)
    # Of an image's own /opt: on this machine the link leads nowhere.
    (tmp_path / "usr/bin/slurmctld").symlink_to("/opt/slurm/sbin/slurmctld")

    message = f"programs that are not in {tmp_path}: slurmd, sbatch, sinfo, scontrol, munged"
    with pytest.raises(ConfigError, match=message) as caught:
        check_programs(accounting=False, root=str(tmp_path))

    assert "a directory with usr, etc and an installed Slurm" in caught.value.hint
    (tmp_path / "home").symlink_to("/elsewhere")
    with pytest.raises(ConfigError, match="a symbolic link at /home/ada leads out of this"):
        entering(tmp_path, [Path("/home/ada")])
