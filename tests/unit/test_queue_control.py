"""Requests and notices: new files that everybody reads once."""

from __future__ import annotations

import json

import pytest

from hpc_toolkit.queue.control import (
    ControlReader,
    DeathNotice,
    FreeUnit,
    Request,
    give_free,
    give_notice,
    may_ask,
)
from hpc_toolkit.rundir.layout import RunPaths
from tests.replacedcalls import CountedCalls

NOTICE = DeathNotice(worker="n3-1-a", heartbeat=7, explained="node failure")


def test_i5_a_notice_of_a_death_is_read_once_and_asks_nobody_to_leave(paths: RunPaths) -> None:
    """Its worker may live after all, and must not take it for a request."""
    reader = ControlReader(paths)
    give_notice(paths, [NOTICE])

    assert reader.poll() == ([], [NOTICE])
    assert reader.poll() == ([], [])


@pytest.mark.parametrize("explained", ["", "node failure", "end of its pool", "out of memory"])
def test_a_free_unit_is_read_from_its_name_alone(paths: RunPaths, explained: str) -> None:
    owner = DeathNotice(worker="n3-1-a.0002", heartbeat=7, explained=explained, evidence="lock")
    free = FreeUnit("my_stage-2", "000001-24", 3, owner)
    reader = ControlReader(paths)
    for by in "ab":
        give_free(paths, free, by)

    with CountedCalls() as counted:
        reader.poll()

    assert reader.free == [free]
    assert counted.opened() == []
    reader.poll()
    assert reader.free == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, "") for name in ("free,a", "free,a,b,c,d,e,f,g", "free,a,b,1,w,2,lease,x,y")),
        ("new-0.json", '{"request": "of a later version", "workers": []}'),
        ("notes.txt", "drain"),
    ],
)
def test_other_requests_and_names_of_another_form_are_passed_over(
    paths: RunPaths, name: str, text: str
) -> None:
    (paths.control / name).write_text(text)
    reader = ControlReader(paths)

    assert reader.poll() == ([], [])
    assert reader.free == []


def test_a_question_to_slurm_is_no_news_for_workers_that_do_not_ask(paths: RunPaths) -> None:
    """Each of thousands of workers would list the directory for each question."""
    reader = ControlReader(paths)
    assert may_ask(paths, "alpha", 0, "w")

    reader.poll()

    assert (reader.asked["alpha"], reader.news) == (1, False)
    give_notice(paths, [NOTICE])
    reader.poll()
    assert reader.news


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"request": "drain"}',
        '{"request": "deaths", "workers": ["a"]}',
        '{"request": "deaths", "workers": {"a": {"heartbeat": "x", "explained": ""}}}',
        '{"request": "drain", "workers": 3}',
    ],
)
def test_a_file_that_cannot_be_read_yet_is_read_when_it_can(paths: RunPaths, text: str) -> None:
    path = paths.control / "drain-0.json"
    path.write_text(text)
    reader = ControlReader(paths)
    assert reader.poll() == ([], [])

    path.write_text(json.dumps({"request": "drain", "workers": ["a"]}))

    assert reader.poll() == ([Request("drain-0.json", frozenset({"a"}))], [])
