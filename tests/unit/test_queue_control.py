"""Requests and notices: new files that everybody reads once."""

from __future__ import annotations

import json

import pytest

from hpc_toolkit.queue.control import (
    ControlReader,
    DeathNotice,
    Request,
    ask_to_drain,
    give_notice,
)
from hpc_toolkit.rundir.layout import RunPaths

NOTICE = DeathNotice(worker="n3-1-a", heartbeat=7, explained="node failure")


def test_a_notice_is_read_as_it_was_given_and_once(paths: RunPaths) -> None:
    reader = ControlReader(paths)
    give_notice(paths, [NOTICE])

    assert reader.poll() == ([], [NOTICE])
    assert reader.poll() == ([], [])


def test_i5_a_notice_of_a_death_asks_nobody_to_leave(paths: RunPaths) -> None:
    """Its worker may live after all, and must not take it for a request."""
    give_notice(paths, [NOTICE])

    requests, _ = ControlReader(paths).poll()

    assert requests == []


def test_a_request_names_its_workers(paths: RunPaths) -> None:
    ask_to_drain(paths, ["a", "b"])

    (request,), notices = ControlReader(paths).poll()

    assert isinstance(request, Request)
    assert request.workers == {"a", "b"}
    assert notices == []


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


def test_other_requests_and_other_files_are_ignored(paths: RunPaths) -> None:
    (paths.control / "new-0.json").write_text('{"request": "of a later version", "workers": []}')
    (paths.control / "notes.txt").write_text("drain")

    assert ControlReader(paths).poll() == ([], [])
