"""Which root 'hpctk lab up --slurm' takes, when it builds one, and what it refuses."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.lab import roots
from hpc_toolkit.lab.commands import check_programs
from hpc_toolkit.lab.roots import entering, find_root


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root on a machine with debootstrap, which knows two releases; its programs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("debootstrap", "apt-get"):
        (programs / name).write_text("#!/bin/sh\necho 'E: no mirror answers' >&2; exit 1\n")
        (programs / name).chmod(0o755)
    for name in ("unshare", "setpriv", "mount"):
        (programs / name).symlink_to(shutil.which(name) or "/bin/true")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "sid").touch()
    (scripts / "trixie").symlink_to("sid")
    (scripts / "debian-common").touch()
    monkeypatch.setattr(roots, "_SCRIPTS", scripts)
    monkeypatch.setattr(roots, "search_path", lambda: str(programs))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return programs


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("trixi", "'trixi' is not a Debian release that debootstrap", "did you mean 'trixie'"),
        ("debian-common", "'debian-common' is not a Debian release", "known: sid, trixie"),
        ("programs", "'programs' is not a Debian release", "write the directory as './programs'"),
        ("./nowhere", "--slurm: ./nowhere is not a directory", "unpack an image"),
        ("/usr/..", "--slurm: /usr/.. is the root of this machine", "leave out --slurm"),
    ],
)
def test_an_unknown_release_or_directory_is_refused_with_a_way_out(
    given: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=message) as caught:
        find_root(given, print)

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
