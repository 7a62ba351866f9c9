"""Workers that take the filesystem for a shared one: fewer looks, the same end."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.integration.realrun import journal_lines, wait_until, workers_of

if TYPE_CHECKING:
    from tests.integration.realrun import Hpctk

SHARED = {"HPCTK_FILESYSTEM": "shared"}


def shared(host: str) -> dict[str, str]:
    return {**SHARED, "HPCTK_HOST": host}


@pytest.mark.slow
def test_death_on_another_host_is_seen_by_the_lease_on_a_shared_filesystem(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(8, 0.2)
    first = hpctk.start("work", "run", "--lease", "1s", env=shared("node-a"))
    _, _, _, worker, _ = wait_until(lambda: hpctk.noted("start"), "an item to start")[0]
    first.send(signal.SIGKILL)
    os.kill(int(worker), signal.SIGKILL)

    second = hpctk("work", "run", "--lease", "1s", env=shared("node-b"))

    (death,) = journal_lines(run, "death")
    assert second.code == 0
    assert (death["evidence"], death["host"]) == ("lease", "node-a")
    assert {row["attempts"] for row in run.results()} == {1}


@pytest.mark.slow
def test_a_killed_worker_is_seen_by_its_node_long_before_the_next_look(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(12, 0.5)
    work = hpctk.start("work", "run", "--workers", 3, env=shared("node-a"))
    _, _, _, worker, _ = wait_until(lambda: hpctk.noted("start"), "an item to start")[0]
    watched = wait_until(
        lambda: [one for one in workers_of(run) if one["node"] == 3], "the observer of three"
    )
    killed_at = time.time()
    os.kill(int(worker), signal.SIGKILL)

    assert work.ended().code == 0
    (death,) = journal_lines(run, "death")
    assert (death["evidence"], death["host"]) == ("lock", "node-a")
    assert death["at"] - killed_at < 20, "a look at other workers comes every 30 s"
    assert len(watched) == 1
