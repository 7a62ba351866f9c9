"""The template ``ray`` on a real Slurm: a cluster inside the allocation, and a driver that drains.

One node only: all nodes of a lab are this machine, with one address, and symmetric-run tells the
first node from the others by their addresses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.run import Run
from tests.onlyray import only_ray, skip_beside_foreign_ray
from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import ODD, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.slurm.reallab import LabUnderTest

pytestmark = [pytest.mark.slow]

psutil = pytest.importorskip("psutil")


@pytest.fixture
def site(lab: LabUnderTest, tmp_path: Path) -> Iterator[Site]:
    cwd = tmp_path / "it's a site"
    cwd.mkdir()
    with only_ray():
        skip_beside_foreign_ray()
        yield Site(lab, cwd)


def listening(*names: str) -> set[str]:
    """Where programs of these names listen."""
    found = set()
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in names:
            ports = process.net_connections(kind="inet")
            found |= {one.laddr.ip for one in ports if one.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}


@pytest.mark.soak  # tests/integration/test_ray.py kills workers and nodes of a real Ray
def test_a_driver_that_was_warned_drains_and_the_next_start_finishes_the_run(site: Site) -> None:
    script = site.cwd / "hold"
    # Slurm tells every process of the step, and this one would be ended by it.
    hold = "until [ -e go ]; do sleep 0.1; done"
    script.write_text(f"#!/bin/sh\ntrap '' USR1\n[ $1 -lt 4 ] || {{ : >held-$1; {hold}; }}\n")
    script.chmod(0o755)
    items = "".join(f'{{"n": {number}}}\n' for number in range(20))
    (site.cwd / "items.jsonl").write_text(items, encoding="utf-8")
    site.hpctk("init", ODD, "--command", "./hold {n}", "--items", "items.jsonl")
    driver = (sys.executable, "-m", "hpc_toolkit", "work", ODD, "--engine", "ray", "--workers", "2")
    job = site.submit(
        "ray",
        nodes=1,
        ntasks_per_node=None,
        cpus_per_task=2,
        mem="1G",
        run=None,
        command=driver,
    )

    run = Run.open(site.cwd / ODD)

    def said() -> str:
        return f"what did not come:\n{site.said(job)}"

    # Leases would not tell: a worker may have two items before the other has begun.
    def both_hold() -> bool:
        return len(list(site.cwd.glob("held-*"))) == 2

    wait_until(both_hold, said)
    assert listening("gcs_server", "raylet") == {"127.0.0.1"}
    assert Path(f"/tmp/hpctk-ray-{job}.0").stat().st_mode & 0o077 == 0
    site.warn(job)
    wait_until(lambda: run.status().draining == 2, said)
    (site.cwd / "go").touch()
    ended = site.end_of(job)

    assert ended == ("COMPLETED", 0, 1), site.said(job)
    assert "requeueing" in site.said(job)
    assert site.finished()["done"] == 20
    assert len(site.hosts()) == 4
    assert set(site.hosts()) <= set(site.lab.nodes)
    assert not list(Path("/tmp").glob(f"hpctk-ray-{job}.*"))
