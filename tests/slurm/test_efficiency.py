"""The share of CPUs and memory that a job used, as a real accounting tells it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.lab.commands import install_command, missing_programs
from hpc_toolkit.lab.settings import LabSettings
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until
from tests.slurm.templatesite import ODD, Site

pytestmark = [pytest.mark.slow]


def test_status_report_and_plan_say_what_a_finished_job_used(
    lab_directory: Path, tmp_path: Path
) -> None:
    if missing := missing_programs(accounting=True):
        pytest.skip(f"no accounting here: {install_command(missing)}")
    own = LabUnderTest(lab_directory / "used", LabSettings(2, 0, accounting=True))
    own.up()
    try:
        site = Site(own, tmp_path)
        site.init(40, 0.8)  # longer than the accounting's interval, 5 s
        job = site.submit(mem="600M", cpus_per_task=2)
        assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)

        def used() -> dict[str, Any] | None:
            found: dict[str, Any] = json.loads(site.hpctk("status", ODD, "--json"))
            said: dict[str, Any] = found.get("efficiency") or {}
            return said if said.get("memory") else None

        found = wait_until(used, lambda: site.hpctk("status", ODD, "--json"), limit_s=60)
        plain = site.hpctk("status", ODD)
        page = tmp_path / "report.html"
        site.hpctk("report", ODD, "-o", str(page))
        # A complete run has nothing to plan, but its jobs tell what the next one needs.
        done = own.run(sys.executable, "-m", "hpc_toolkit", "plan", ODD, cwd=tmp_path, check=False)
    finally:
        own.down()

    assert found is not None
    # Items that sleep leave the CPUs idle, and each rank is a Python of some megabytes.
    assert 0 < found["cpu"] < 0.9
    assert found["of_memory"] == 600 << 20
    assert 20 << 20 < found["memory"] < 600 << 20
    assert found["cpus_per_task"] == 1
    for text in (plain, page.read_text(encoding="utf-8"), done.stderr):
        assert "of the CPUs, " in text, text
        assert "--cpus-per-task=1" in text
