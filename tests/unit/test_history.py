"""The records of a run: the right numbers, times only where a file has them, any damage."""

from __future__ import annotations

import json
import os
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.cli.reading import life_lines
from hpc_toolkit.errors import ItemsError
from hpc_toolkit.queue.control import SILENT_NODE
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results import workers as journals
from hpc_toolkit.results.explain import explain, find_item
from hpc_toolkit.results.history import Attempt, Claim, Death, History, Release
from hpc_toolkit.run import create_run
from hpc_toolkit.rundir.journal import (
    JournalReader,
    encode_line,
    next_release,
    read_lines,
    release_line,
)
from hpc_toolkit.rundir.layout import Manifest
from tests.toyrun import ToyRun, spec_of
from tests.unit.test_queue_state import ITEMS, UNIT, PassPlan, plans, write


def history_of(toy: ToyRun) -> History:
    return History(RunView(toy.paths, toy.run.manifest))


def attempts(history: History) -> list[Attempt]:
    return [one for one in history.work() if isinstance(one, Attempt)]


def test_attempts_have_times_hosts_numbers_and_outcomes(fast_dir: Path) -> None:
    """Worker wa dies in its second unit, wb takes over, an item is retried, wa wakes up."""
    toy = ToyRun(fast_dir / "run", 6, unit=3)
    first = toy.worker("wa", host="n1", job="77", rank=1, started=99.0, at=120.0)
    second = toy.worker("wb", host="n2", place={"cpus": "0-3", "gpus": ["2"]}, started=100.0)
    assert first.claim(toy.unit_name(0))
    for item, end in enumerate((103.0, 104.0, 106.0)):
        first.attempt(item, "failed" if item == 1 else "done", at=end, seconds=1.0)
    first.release(106.0, seconds=5.0)
    assert first.claim(toy.unit_name(3))
    first.attempt(3, at=110.0, seconds=2.0)
    assert second.claim(toy.unit_name(0), 2)
    second.attempt(1, at=112.0, seconds=1.5)
    second.release(112.0, seconds=2.0)
    assert second.claim(toy.unit_name(3), 2)
    second.death(4, generation=1, worker="wa", host="n1", evidence="lease", at=300.0)
    second.begin(toy.unit_name(3), 2)
    second.attempt(4, at=302.0, seconds=1.0)
    second.attempt(5, at=303.0, seconds=1.0)
    second.release(303.0, seconds=4.0)
    first.attempt(4, at=310.0, seconds=9.0)
    second.finish()

    fields = ("item", "generation", "number", "worker", "host", "begin", "end", "outcome")
    found = list(map(attrgetter(*fields), attempts(history_of(toy))))

    # An item's first result of the lowest generation counts, even if it arrives last.
    assert found == [
        (0, 1, 1, "wa", "n1", 102.0, 103.0, "done"),
        (1, 1, 1, "wa", "n1", 103.0, 104.0, "failed"),
        (2, 1, 1, "wa", "n1", 105.0, 106.0, "done"),
        (3, 1, 1, "wa", "n1", 108.0, 110.0, "done"),
        (1, 2, 2, "wb", "n2", 110.5, 112.0, "done"),
        (4, 1, 1, "wa", "n1", 310.0, None, "lost"),
        (4, 2, 1, "wb", "n2", 301.0, 302.0, "duplicate"),
        (5, 2, 1, "wb", "n2", 302.0, 303.0, "done"),
        (4, 1, 1, "wa", "n1", 301.0, 310.0, "done"),
    ]


def test_a_lost_attempt_begins_where_the_last_one_of_its_unit_run_ended(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "run", 4)
    first, second = toy.worker("wa"), toy.worker("wb")
    first.claim(toy.unit_name(0))
    first.attempt(0, at=110.0)
    second.claim(toy.unit_name(0), 2)
    second.death(1, generation=1, worker="wa", evidence="lock", explained="drain", at=300.0)
    second.death(1, generation=1, worker="wa", evidence="lock", explained="drain", at=301.0)

    found = list(history_of(toy).work())

    lost = [one for one in found if isinstance(one, Attempt) and one.outcome == "lost"]
    assert [(one.begin, one.end, one.seconds) for one in lost] == [(110.0, None, None)]
    assert lost[0].error == "worker died: lock"
    deaths = [one for one in found if isinstance(one, Death)]
    assert [(one.worker, one.by, one.at) for one in deaths] == [("wa", "wb", 300.0)]


def test_records_come_in_the_order_of_time_and_a_clock_set_back_changes_no_journals_order(
    fast_dir: Path,
) -> None:
    toy = ToyRun(fast_dir / "run", 8)
    for name, unit, times in (("wa", 0, (10.0, 5.0, 30.0)), ("wb", 4, (7.0, 20.0, 40.0))):
        worker = toy.worker(name)
        worker.claim(toy.unit_name(unit))
        for item, at in enumerate(times, unit):
            worker.attempt(item, at=at, seconds=0.5)

    found = attempts(history_of(toy))

    assert [one.end for one in found] == [7.0, 10.0, 5.0, 20.0, 30.0, 40.0]


@pytest.mark.parametrize("seconds", [0.0016, 0.0])
def test_a_claim_lies_between_the_lines_around_it_although_times_are_rounded(
    fast_dir: Path, seconds: float
) -> None:
    toy = ToyRun(fast_dir / "run", 8)
    worker = toy.worker("wa")
    worker.claim(toy.unit_name(0))
    worker.attempt(0, at=10.085, seconds=0.0)
    worker.release(10.085, seconds=0.0)
    worker.claim(toy.unit_name(4))
    worker.attempt(4, at=10.085, seconds=0.0)
    worker.release(10.086, seconds=seconds)

    times = [one.end if isinstance(one, Attempt) else one.at for one in history_of(toy).work()]

    assert times == sorted(times, key=lambda at: at or 0.0)


@settings(max_examples=50)
@given(passes=plans(), floors=st.dictionaries(st.integers(0, ITEMS - 1), st.integers(1, 5)))
def test_counts_agree_with_the_status_for_arbitrary_journals(
    fast_dir: Path, passes: list[PassPlan], floors: dict[int, int]
) -> None:
    toy = ToyRun(fast_dir / os.urandom(6).hex(), ITEMS, unit=UNIT, sealed=False)
    told = write(toy, passes)
    if floors:
        toy.log().add_retry([(1, item, floor) for item, floor in floors.items()])
    status = toy.reopen().status()
    counts = status.stages["items"]

    found = list(history_of(toy).work())

    ended = [one for one in found if isinstance(one, Attempt)]
    outcomes = Counter(one.outcome for one in ended)
    assert outcomes["done"] == counts.done
    assert outcomes["duplicate"] == counts.duplicates
    assert outcomes["killed"] + outcomes["lost"] == status.deaths
    assert outcomes["failed"] + outcomes["permanent"] == sum(
        one.kind != "done" for lines in told.values() for one in lines
    )
    done = {one.item: one for one in ended if one.outcome == "done"}
    for row in toy.rows():
        if row["state"] == "done":
            assert done[row["item"]["id"]].worker == row["worker"]
    assert sum(isinstance(one, Release) for one in found) == sum(one.released for one in passes)
    runs = {(one.unit, one.generation) for one in found if isinstance(one, Claim)}
    assert {(one.unit, one.generation) for one in ended if one.outcome != "lost"} <= runs


def _records(count: int, *, size: int = 5) -> list[dict[str, Any]]:
    place = {"type": "done", "unit": "items/000001-0", "generation": 1, "at": 0.0, "seconds": 0.0}
    value = {"text": "x" * size}
    return [{**place, "item": number, "value": value} for number in range(count)]


@pytest.mark.parametrize("chunk", [1, 40, 64, 100, 1 << 20])
def test_lines_are_the_same_for_every_size_of_the_chunk(tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "journal"
    lines = [encode_line(one) for one in (*_records(3), *_records(1, size=500), *_records(2))]
    lines[1] = b"damaged\n"
    facts = {"unit": "items/000001-0", "generation": 1, "at": 0.0, "seconds": 0.0}
    release = release_line(0, b"", lines=0, done=0, failed=0, **facts)
    data = b"".join([*lines, release, *lines[:1]])
    path.write_bytes(data + b"torn")

    wanted = [line for line in data.splitlines(keepends=True) if line != b"damaged\n"]

    found = list(read_lines(path, 0, len(data) + 4, chunk))

    assert [one.record for one in found] == list(map(json.loads, wanted))
    assert [data[one.start : one.end] for one in found] == wanted
    got = next_release(path, 0, len(data), chunk)
    assert got is not None
    assert got["type"] == "release"
    assert next_release(path, found[-1].start, len(data), chunk) is None


def test_memory_is_a_share_of_a_fixed_number_of_bytes_and_files_are_closed_between_reads(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = ToyRun(fast_dir / "run", 40, unit=1)
    monkeypatch.setattr(journals, "_MEMORY", 0)
    for number in range(40):
        worker = toy.worker(f"w{number:02d}")
        worker.work(toy.unit_name(number), 1, **{f"i{number}": "done"})
        worker.presence.close()
        worker.journal.close()
    history = history_of(toy)
    before = len(os.listdir("/proc/self/fd"))

    stream = history.work()
    next(stream)

    assert len(os.listdir("/proc/self/fd")) == before
    assert sum(isinstance(one, Attempt) for one in stream) == 40
    assert isinstance(history.view.readers["w00"], JournalReader)


def life_of(toy: ToyRun, text: str) -> dict[str, Any]:
    view = toy.view()
    return explain(view, find_item(view, text))


def test_an_item_is_found_by_its_number_its_json_or_a_part(fast_dir: Path) -> None:
    items = [{"name": "ab", "g": 1}, {"name": "a", "g": 0}, {"name": "xyz", "g": 1}]
    manifest = Manifest(run="r", stages=(spec_of(group_by="g"),))
    run = create_run(fast_dir / "r", manifest, {"items": items}, sealed=True)

    assert [find_item(run.view, str(number)).item for number in range(3)] == items
    assert find_item(run.view, '{"g": 0, "name": "a"}').item["name"] == "a"
    assert find_item(run.view, '"xy').item["name"] == "xyz"
    assert find_item(run.view, '"name":"a"').item["name"] == "a"


def test_a_text_that_means_no_item_or_several_is_refused(toy: ToyRun) -> None:
    view = toy.view()

    for text in ("nothing", "4", "9" * 5000):
        with pytest.raises(ItemsError, match=f"no item is or contains '{text[:99]}"):
            find_item(view, text)
    with pytest.raises(ItemsError, match="'id' matches 4 items") as caught:
        find_item(view, "id")
    assert "more of its JSON" in caught.value.hint


def test_a_life_names_claims_attempts_and_deaths_by_generation(toy: ToyRun) -> None:
    first, second = toy.worker("first"), toy.worker("second")
    first.work(toy.unit_name(0), 1, i0="done", i1="failed", i2="done", i3="done")
    first.claim(toy.unit_name(0), 2)
    second.claim(toy.unit_name(0), 3)
    second.death(1, generation=2, worker="first", evidence="lease")
    second.attempt(1, value={"x": 1})
    second.release()

    life = life_of(toy, "1")

    assert life["item"] == {"id": 1}
    assert life["unit"] == "000001-0"
    assert life["state"] == "done"
    assert [(one["generation"], one["worker"], one["released"]) for one in life["claims"]] == [
        (1, "first", True),
        (2, "first", False),
        (3, "second", True),
    ]
    assert [(one["type"], one["generation"], one["worker"]) for one in life["attempts"]] == [
        ("failed", 1, "first"),
        ("done", 3, "second"),
    ]
    assert life["attempts"][1]["value"] == {"x": 1}
    assert life["deaths"] == [
        {"generation": 2, "worker": "first", "evidence": "lease", "explained": "", "suspect": True}
    ]
    assert life["counting_attempts"] == 1


def test_i3_a_life_says_whether_the_item_is_suspected_of_the_silence_of_its_nodes(
    toy: ToyRun,
) -> None:
    taker, said = toy.worker("taker"), []
    for generation, host in enumerate(["n1", "n2"], 1):
        taker.claim(toy.unit_name(0), generation)
        facts = {"worker": "w", "host": host, "evidence": "lease", "explained": SILENT_NODE}
        taker.death(1, generation=generation, **facts)
        said.append([line for line in life_lines(life_of(toy, "1")) if "death" in line])

    (alone,), several = said
    assert alone == "    death of w: lease, explained by silent node"
    assert several == [f"{alone}, this item is suspected"] * 2


def test_i8_a_life_passes_over_damaged_lines(toy: ToyRun) -> None:
    worker = toy.worker("w")
    worker.claim(toy.unit_name(0))
    worker.journal.append(b'{"type":"done","item":1\n')
    worker.attempt(1, "failed")
    worker.journal.append(b'{"type":"done"')

    assert [one["type"] for one in life_of(toy, "1")["attempts"]] == ["failed"]
