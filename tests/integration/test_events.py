"""``hpctk events`` beside workers that run, and with a reader that leaves."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.integration.realrun import Hpctk, wait_until

if TYPE_CHECKING:
    from tests.integration.realrun import Started


def seen(followed: Started) -> list[dict[str, Any]]:
    lines = followed.printed().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_follow_gives_the_same_events_as_a_look_afterwards_and_ends(hpctk: Hpctk) -> None:
    run = hpctk.make([{}, {"how": "memory"}, {}], max_attempts=2)
    followed = hpctk.start("events", "run", "--follow")
    wait_until(lambda: [one["event"] for one in seen(followed)] == ["add", "seal"], "the log")

    assert hpctk("work", "run", "--workers", "2").code == 0
    ended = followed.ended()
    later = [json.loads(line) for line in hpctk("events", "run").out.splitlines()]

    assert (ended.code, ended.err) == (0, "")
    # When a claim was seen may differ: its time is only known when the unit is released.
    first, second = (
        Counter((e["event"], e.get("item"), e.get("unit"), e.get("worker")) for e in found)
        for found in (seen(followed), later)
    )
    assert first == second
    counts = run.status().stages["items"]
    assert sum(one.get("outcome") == "done" for one in later) == counts.done == 2
    assert sum(one["event"] == "failed" for one in later) == 2
    assert [one["at"] for one in later] == sorted(one["at"] for one in later)
    assert {one["end"] for one in later if one["event"] == "worker-end"} == {"finished"}


def test_events_of_a_run_that_is_removed_end_with_an_error(hpctk: Hpctk) -> None:
    run = hpctk.make([{}])
    followed = hpctk.start("events", "run", "--follow", "--since", "1d")
    wait_until(lambda: len(seen(followed)) == 2, "the log")

    os.rename(run.root, run.root.with_name("moved"))

    ended = followed.ended()
    assert ended.code == 1
    assert "the run was removed or moved" in ended.err
