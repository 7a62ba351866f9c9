"""The template ``ray`` on a real Slurm: a cluster inside the allocation, and a driver that drains.

One node only: all nodes of a lab are this machine, with one address, and symmetric-run tells the
first node from the others by their addresses.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.onlyray import only_ray, skip_beside_foreign_ray
from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import ODD, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.slurm.reallab import LabUnderTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def site(lab: LabUnderTest, tmp_path: Path) -> Iterator[Site]:
    cwd = tmp_path / "it's a site"
    cwd.mkdir()
    with only_ray():
        skip_beside_foreign_ray()
        yield Site(lab, cwd)


def test_a_driver_that_was_warned_drains_and_the_next_start_finishes_the_run(site: Site) -> None:
    site.init(40, 0.2)
    driver = ("hpctk", "work", ODD, "--engine", "ray", "--workers", "2")
    job = site.submit(
        "ray",
        nodes=1,
        ntasks_per_node=None,
        cpus_per_task=2,
        mem="1G",
        run=None,
        command=driver,
    )
    site.wait_for_workers(2)
    wait_until(lambda: "done" in site.hpctk("status", ODD), "a first result")

    site.warn(job)
    ended = site.end_of(job, limit_s=240)

    assert ended == ("COMPLETED", 0, 1), site.said(job)
    assert "requeueing" in site.said(job)
    assert site.finished()["done"] == 40
    assert len(site.hosts()) == 4
    assert set(site.hosts()) <= set(site.lab.nodes)
    assert not list(Path("/tmp").glob(f"hpctk-ray-{job}.*"))
