"""The stream of events: every kind, once, in the order of time, and harmless on a terminal."""

from __future__ import annotations

import json
import math
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.cli.reading import _since
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.control import HealthNotice, ask_to_drain, give_health_notice
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.events import EventReader, event_line
from hpc_toolkit.results.history import History
from hpc_toolkit.results.records import Submission
from hpc_toolkit.run import Run
from tests.hostile import HOSTILE
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun
from tests.unit.playedcampaign import Played, toy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Event = dict[str, Any]


def reader_of(root: Path, jobs: Callable[[], Iterable[Submission]] = lambda: ()) -> EventReader:
    run = Run.open(root)
    view = RunView(run.paths, run.manifest)
    return EventReader(History(view, ManualClock(280.0), jobs))


def events_of(root: Path) -> list[Event]:
    return [event for _, event in reader_of(root).poll()]


def kinds(events: Iterable[Event]) -> list[str]:
    return [event["event"] for event in events]


@pytest.fixture
def busy(fast_dir: Path) -> ToyRun:
    """A run with a takeover, a retry, a drain, a sick host and a table."""
    run = ToyRun(fast_dir / "run", 2, unit=2)
    for number in (1, 2):
        os.utime(run.stage_paths.entry(number), (50.0 + number,) * 2, follow_symlinks=False)
    first = run.worker("wa", host="n1", job="77", restart=2, started=60.0, at=70.0)
    second = run.worker("wb", host="n2", started=61.0, at=90.0)
    first.claim(run.unit_name(0))
    first.attempt(0, "failed", at=69.0)
    second.claim(run.unit_name(0), 2)
    second.death(0, generation=1, worker="wa", host="n1", evidence="lease", at=80.0)
    second.begin(run.unit_name(0), 2)
    second.attempt(0, at=83.0)
    second.attempt(1, "failed", at=84.0)
    second.release(84.0, seconds=5.0)
    second.finish()
    return run


def test_events_are_in_the_order_of_time_with_their_facts(busy: ToyRun) -> None:
    claims = busy.stage_paths.claims
    os.utime(claims / "000001-0.1.lock", (65.0, 65.0), follow_symlinks=False)

    found = events_of(busy.root)

    assert [(event["at"], event["event"]) for event in found] == [
        (51.0, "add"),
        (52.0, "seal"),
        (60.0, "worker-start"),
        (61.0, "worker-start"),
        (65.0, "claim"),
        (69.0, "failed"),
        (70.0, "worker-end"),
        (79.0, "claim"),
        (80.0, "death"),
        (83.0, "done"),
        (84.0, "failed"),
        (84.0, "release"),
        (90.0, "worker-end"),
    ]
    start, end, claim, death, done = (found[number] for number in (2, 6, 7, 8, 9))
    assert (start["worker"], start["job"], start["requeues"]) == ("wa", "77", 2)
    assert (end["worker"], end["end"]) == ("wa", "died")
    assert (claim["generation"], claim["worker"], claim["taken_from"]) == (2, "wb", "wa")
    assert (death["worker"], death["by"], death["evidence"]) == ("wa", "wb", "lease")
    assert (done["item"], done["attempt"], done["outcome"]) == (0, 2, "done")


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ("stages/items/claims", 13),  # the journals show the claims as well
        ("journals", 8),
        ("workers", 9),
        ("control", 13),
        ("stages/items/items", 4),  # without its segment, a stage has no items
    ],
)
def test_a_damaged_run_gives_the_events_that_are_left(busy: ToyRun, lost: str, left: int) -> None:
    shutil.rmtree(busy.root / lost)
    for journal in busy.paths.journals.glob("*"):
        with journal.open("ab") as file:
            file.write(b"\xff\x00damaged\n{torn")

    assert len(events_of(busy.root)) == left


def test_each_poll_gives_what_is_new(busy: ToyRun) -> None:
    jobs: list[Submission] = []
    reader = reader_of(busy.root, lambda: jobs)
    assert len(list(reader.poll())) == 13
    assert list(reader.poll()) == []

    busy.log().add_retry([(1, 1, 2)])
    third = busy.worker("wc", at=200.0)
    third.claim(busy.unit_name(0), 3)
    third.attempt(1, at=101.0)
    third.release(101.0, seconds=1.0)
    ask_to_drain(busy.paths, ["wc"])
    notice = HealthNotice(host="n1", worker="wa", whole=True, sure=True, at=1.0, reason="all fail")
    give_health_notice(busy.paths, notice)
    jobs.append(Submission(name="7 1.0", at=None, job={"job": "7"}))

    found = [event for _, event in reader.poll()]
    assert sorted(kinds(found)) == sorted(
        ["retry", "worker-start", "claim", "done", "release", "drain", "sick", "job"]
    )
    by_kind = {event["event"]: event for event in found}
    assert by_kind["drain"]["workers"] == ["wc"]
    assert by_kind["sick"]["reason"] == "all fail"
    assert by_kind["retry"]["items"] == 1
    assert found[-1] == {"at": None, "event": "job", "job": "7"}  # its time is not known
    third.finish()
    busy.run.results()
    assert sorted(kinds(event for _, event in reader.poll())) == ["gather", "worker-end"]
    assert list(reader.poll()) == []


def test_events_of_a_campaign_have_its_asks_and_tells(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = toy({"policy": "random", "budget": 4, "pending": 2})
    played = Played(fast_dir / "run", campaign, monkeypatch)
    decisions = played.coordinate()

    found = events_of(played.root)

    asks = [event for event in found if event["event"] == "ask"]
    tells = [event for event in found if event["event"] == "tell"]
    assert [event["arms"] for event in asks] == [
        [pull.arm for pull in decision.pulls] for decision in decisions
    ]
    assert {event["policy"] for event in asks} == {"random"}
    assert [event["decision"] for event in asks] == [decision.number for decision in decisions]
    told = [(one.arm, dict(one.scores)) for decision in decisions for one in decision.tells]
    assert [(event["arm"], event["scores"]) for event in tells] == told
    assert told
    assert all(event["at"] is not None for event in asks + tells)


@given(st.recursive(st.none() | st.floats() | st.text() | st.sampled_from(HOSTILE), st.lists))
@settings(max_examples=50)
def test_a_line_is_strict_json_in_printable_ascii(value: object) -> None:
    line = event_line({"at": None, "event": "x", "value": value})

    assert line.isascii()
    assert line[:-1].isprintable()
    assert line.endswith("\n")
    json.loads(line, parse_constant=pytest.fail)
    if isinstance(value, str):
        assert json.loads(line)["value"] == value


def test_texts_of_a_run_stay_data(fast_dir: Path) -> None:
    run = ToyRun(fast_dir / "run", 1)
    worker = run.worker("wa")
    worker.claim(run.unit_name(0))
    worker.attempt(0, "failed", error="\x1b]0;owned\x07\u202eevil\x7f")
    worker.presence.update(state="finished", note="\x1b[2J\u202e")

    text = "".join(map(event_line, events_of(run.root)))

    assert text.replace("\n", "").isprintable()
    assert text.isascii()
    assert "\\u202eevil\\u007f" in text


def test_since_is_a_duration_ago_a_date_or_an_epoch_second() -> None:
    assert _since("10min", 1000.0) == 400.0
    assert _since("@12.5", 1000.0) == 12.5
    assert _since("1970-01-01T01:00:00+01:00", 1000.0) == 0.0
    assert math.isfinite(_since("2026-11-25", 1000.0))


@pytest.mark.parametrize("text", ["@soon", "2026-13-45", "yesterday", "10", "-5min", "@"])
def test_since_refuses_other_texts(text: str) -> None:
    with pytest.raises(ConfigError, match="--since"):
        _since(text, 1000.0)
