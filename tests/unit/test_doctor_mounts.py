"""Mounts as the kernel lists them, and what their options mean for a queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.doctor.filesystem import check_mount
from hpc_toolkit.doctor.sides import Side, Verdict, are_apart, side_of
from hpc_toolkit.rundir.mounts import Mount, parse_mount

NFS_LINE = (
    "42 25 0:45 / /scratch/my\\040lab rw,noatime shared:9 - nfs4 nas:/export/my\\040lab "
    "rw,vers=4.2,hard,local_lock=none\n"
)


def mount(kind: str, *options: str) -> Mount:
    return Mount("/scratch", kind, "nas:/export", options)


def test_a_line_of_mountinfo_gives_point_type_source_and_both_sets_of_options() -> None:
    options = ("rw", "noatime", "vers=4.2", "hard", "local_lock=none")
    found = parse_mount(NFS_LINE)

    assert found == Mount("/scratch/my lab", "nfs4", "nas:/export/my lab", options)


@pytest.mark.parametrize(
    ("kind", "value", "verdict"),
    [("nfs4", "Y", Verdict.SLOWER), ("nfs4", "N", Verdict.FINE), ("nfs", "Y", Verdict.FINE)],
)
def test_directory_delegations_of_the_nfs_client_are_found(
    kind: str, value: str, verdict: Verdict, tmp_path: Path
) -> None:
    parameters = tmp_path / "nfsv4" / "parameters"
    parameters.mkdir(parents=True)
    (parameters / "directory_delegations").write_text(f"{value}\n")

    found = check_mount(mount(kind, "hard"), tmp_path)

    assert found.verdict == verdict
    assert ("modprobe.d" in found.means) == (verdict is not Verdict.FINE)


@pytest.mark.parametrize(
    ("kind", "option", "verdict"),
    [
        *(("nfs4", one, Verdict.FINE) for one in ("hard", "actimeo=30")),
        *(("nfs", one, Verdict.SLOWER) for one in ("local_lock=all", "local_lock=posix", "nolock")),
        *(("nfs4", one, Verdict.SLOWER) for one in ("nocto", "actimeo=600")),
        *(("lustre", "localflock", Verdict.SLOWER), ("ext4", "nosymfollow", Verdict.SLOWER)),
        *(("nfs", "soft", Verdict.UNSAFE), ("ext4", "soft", Verdict.FINE)),
        *(("ext4", "ro", Verdict.UNSAFE), ("cifs", "cache=loose", Verdict.UNSAFE)),
    ],
)
def test_an_option_has_the_verdict_that_its_manual_gives_it(
    kind: str, option: str, verdict: Verdict
) -> None:
    found = check_mount(mount(kind, "rw", option))

    assert found.verdict is verdict
    assert option in found.found
    assert bool(found.means) == (verdict is not Verdict.FINE)


def test_the_worst_option_gives_the_verdict_and_all_are_named() -> None:
    found = check_mount(mount("nfs", "nolock", "soft"))

    assert found.verdict is Verdict.UNSAFE
    assert found.found == "soft, nolock"


@pytest.mark.parametrize(
    ("option", "local"),
    [("local_lock=flock", True), ("localflock", True), ("local_lock=posix", False), ("rw", False)],
)
def test_flock_is_local_where_the_options_say_so(option: str, local: bool) -> None:
    assert mount("nfs", option).locks_are_local is local


def test_two_kernels_or_two_mounts_are_apart_and_two_names_of_one_are_not(tmp_path: Path) -> None:
    def side(**changes: object) -> Side:
        return Side.from_json({**side_of(tmp_path).to_json(), **changes})

    assert are_apart(side(boot="a"), side(boot="b"))
    assert are_apart(side(device=1), side(device=2))
    assert not are_apart(side(host="a", path="/a"), side(host="b", path="/b"))
