"""Ranks that run from a copy of their environment on the node's disk, and what is left of it."""

from __future__ import annotations

import json
import re
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import ODD, Site

pytestmark = [pytest.mark.slow]

CHECKOUT = Path(__file__).parents[2]
WHERE = """
import os, pathlib, shutil, sys, time
def run(item):
    import thing
    node = os.environ["SLURMD_NODENAME"]
    pathlib.Path(f"at-{node}").touch()
    while len(list(pathlib.Path().glob("at-*"))) < 2:  # so that both nodes have an item
        time.sleep(0.05)
    return {"node": node, "prefix": sys.prefix, "file": thing.__file__,
            "python": shutil.which("python"), "venv": os.environ.get("VIRTUAL_ENV")}
"""
COMMAND = """
import os, sys, thing
print("prefix", sys.prefix, "in", os.environ["VIRTUAL_ENV"], flush=True)
"""


@pytest.fixture
def site(lab: LabUnderTest, tmp_path: Path) -> Site:
    """A site with an environment of its own, to which hpctk is added as by an editable install."""
    cwd = tmp_path / "it's a site"
    venv.create(cwd / "env", symlinks=True)
    packages = packages_of(cwd / "env")
    (packages / "thing.py").write_text("")
    paths = (str(CHECKOUT), sysconfig.get_path("purelib"))
    (packages / "editable.pth").write_text("\n".join(paths))
    (cwd / "where.py").write_text(WHERE)
    (cwd / "say.py").write_text(COMMAND)
    return Site(lab, cwd)


def packages_of(env: Path) -> Path:
    (found,) = env.glob("lib/python*/site-packages")
    return found


def init(site: Site) -> None:
    site.hpctk("init", ODD, "--workload", "where:run", "--count", "2")


def start(site: Site, disk: Path, template: str = "work-queue", **fields: Any) -> str:
    given = {"ntasks_per_node": 1, "stage_env": True, "stage_dir": str(disk), **fields}
    return site.submit(template, python=str(site.cwd / "env/bin/python"), **given)


def rows(site: Site) -> list[dict[str, str]]:
    site.hpctk("gather", ODD, "-o", "rows.jsonl")
    lines = (site.cwd / "rows.jsonl").read_text().splitlines()
    return [json.loads(line)["value"] for line in lines]


def archives(site: Site) -> list[Path]:
    return list(site.cwd.glob(".hpctk-environments-*/*"))


def test_ranks_run_from_the_copies_on_their_nodes(site: Site, tmp_path: Path) -> None:
    init(site)
    disk = tmp_path / "disk"

    job = start(site, disk)

    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    found = rows(site)
    assert len({row["node"] for row in found}) == 2
    for row in found:
        copy = disk / f"hpctk-{job}.0" / row["node"] / ".environment"
        assert row["prefix"] == row["venv"] == str(copy)
        assert Path(row["file"]).is_relative_to(copy)
        assert row["python"] == str(copy / "bin/python")
    assert site.said(job).count("staged the environment: ") == 2
    assert list(disk.iterdir()) == []
    assert len(archives(site)) == 1


def test_tasks_of_a_program_use_the_archive_that_is_there(site: Site, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    words = ("python", "say.py")
    first = start(site, disk, "command", nodes=1, ntasks_per_node=2, command=words)
    assert site.end_of(first)[0] == "COMPLETED", site.said(first)
    (archive,) = site.cwd.glob("runs/.hpctk-environments-*/*")
    made = archive.stat().st_ino

    job = start(site, disk, "command", nodes=1, ntasks_per_node=2, command=words)

    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    said = re.findall(rf"prefix ({disk}/hpctk-{job}.0/n\d/.environment) in \1", site.said(job))
    assert len(said) == 2
    assert archive.stat().st_ino == made
    assert list(disk.iterdir()) == []


def test_a_warned_job_starts_again_with_new_copies(site: Site, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    site.init_held(4)
    job = start(site, disk)
    site.wait_for_held(2)

    site.warn(job)
    site.wait_for_text(job, "asking the ranks to finish")
    site.release()

    assert site.end_of(job) == ("COMPLETED", 0, 1), site.said(job)
    assert site.said(job).count("staged the environment: ") == 4
    assert list(disk.iterdir()) == []


def test_a_cancelled_job_leaves_no_copy(site: Site, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    site.init_held(2)
    job = start(site, disk)
    site.wait_for_held(2)
    copies = list(disk.glob("*/*/.environment"))

    site.lab.run("scancel", job)

    assert site.end_of(job)[0] == "CANCELLED"
    assert len(copies) == 2
    wait_until(lambda: not any(disk.iterdir()), "the removal of the copies")


def test_a_job_whose_nodes_have_no_disk_goes_on_where_its_environment_is(site: Site) -> None:
    init(site)

    job = start(site, Path("/proc/nowhere"))

    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    assert {row["prefix"] for row in rows(site)} == {str(site.cwd / "env")}
    assert "error: cannot make /proc/nowhere" in site.said(job)
    assert "warning: a node uses the environment where it is: see above" in site.said(job)
