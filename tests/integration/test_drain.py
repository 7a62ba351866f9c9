"""Asking workers to leave by a file (rule R16)."""

from __future__ import annotations

import json

from tests.integration.realrun import Hpctk, wait_until


def test_drain_lets_the_workers_of_now_leave_and_later_ones_finish(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(400, 0.1)
    work = hpctk.start("work", "run", "--workers", 2)
    wait_until(lambda: run.status().workers.alive == 2, "both workers")
    wait_until(lambda: run.status().stages["items"].done, "the first item")

    assert run.drain() == 2

    assert work.ended().code == 75
    status = run.status()
    assert 0 < status.stages["items"].done < 400
    assert status.workers.finished == 2
    assert status.deaths == 0
    (request,) = run.paths.control.iterdir()
    assert json.loads(request.read_text())["request"] == "drain"
    assert hpctk("work", "run", "--workers", 8).code == 0
    assert [row["attempts"] for row in run.results()] == [1] * 400
