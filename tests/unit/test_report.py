"""The report of a run: every second counted once, bounded, harmless and complete in itself."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.cli.gathering import read_facts, report_of
from hpc_toolkit.report.figures import number_ticks, span_ticks
from hpc_toolkit.report.runreport import sections
from hpc_toolkit.results import activity as states
from hpc_toolkit.results.activity import Activity, Lane, Timeline, read_activity
from hpc_toolkit.results.history import Attempt, Claim, History, Release
from hpc_toolkit.results.sums import ranges_of
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import RunPaths
from tests.hostile import HOSTILE
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun, tree

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def disturbed(fast_dir: Path) -> ToyRun:
    """Worker wa dies in its second unit and wakes up; wb takes over; wc is drained."""
    toy = ToyRun(fast_dir / "run", 6, unit=3, group_by="id")
    first = toy.worker("wa", host="n1", job="77", started=90.0, at=120.0)
    second = toy.worker("wb", host="n2", job="78", restart=1, started=100.0, at=310.0)
    third = toy.worker("wc", host="n2", started=100.0, at=140.0)
    assert first.claim(toy.unit_name(0))
    first.attempt(0, at=103.0, seconds=2.0)
    first.attempt(1, "failed", at=104.0, seconds=1.0)
    first.attempt(2, at=106.0, seconds=2.0)
    first.release(106.0, seconds=8.0)
    assert first.claim(toy.unit_name(3))
    first.attempt(3, at=110.0, seconds=2.0)
    assert second.claim(toy.unit_name(3), 2)
    second.death(4, generation=1, worker="wa", host="n1", evidence="lease", at=300.0)
    second.begin(toy.unit_name(3), 2)
    second.attempt(4, at=302.0, seconds=1.0)
    second.death(5, at=303.0)
    second.attempt(5, at=305.0, seconds=1.5)
    second.release(305.0, seconds=5.0)
    second.presence.update(state="finished")
    third.presence.update(state="finished", note="asked to leave")
    return toy


def test_every_second_of_a_worker_is_counted_once(disturbed: ToyRun) -> None:
    found = read_activity(History(disturbed.view()), ManualClock(10_000.0))

    assert sum(found.seconds.values()) == pytest.approx(found.lives_s)
    assert found.lives_s == 30.0 + 210.0 + 40.0
    assert found.seconds == {
        states.WORK: pytest.approx(2 + 2 + 2 + 1 + 1.5),
        # Up to the first item, between the items, and up to the release.
        # The time of wa's second claim is known by another clock alone.
        states.LOAD: pytest.approx((101 - 98) + (108 - 106) + (301 - 300) + 0.5),
        # wa and wb before their first claim, and wc.
        states.WAIT: pytest.approx((98 - 90) + (300 - 100) + 40),
        states.TAIL: pytest.approx(310 - 305),
        # One failure; wa's last item until its last heartbeat; an executor that was killed.
        states.FAILED: pytest.approx(1 + (120 - 110) + 1),
        states.DUPLICATE: 0.0,
        states.RUNNING: 0.0,
    }
    lanes = found.timeline.lanes
    spent = sum(sum(cells.values()) for lane in lanes for cells in lane.spent.values())
    assert spent == pytest.approx(found.lives_s)


times = st.floats(0.0, 500.0)


@settings(max_examples=60)
@given(
    lines=st.lists(
        st.tuples(
            st.sampled_from(["claim", "done", "failed", "killed", "lost", "release"]), times, times
        ),
        max_size=20,
    ),
    started=times,
    at=times,
)
def test_seconds_add_up_whatever_clocks_and_journals_say(
    lines: list[tuple[str, float, float]], started: float, at: float
) -> None:
    lane = Lane("n1")
    found = Activity(timeline=Timeline(0.0, 500.0, [lane]))
    reader = states._Reader(found, {}, {"w": lane})
    for kind, end, seconds in [("claim", started, 0.0), *lines, ("release", at, 0.0)]:
        reader.take(record_of(kind, end, seconds))
    reader.finish(set())

    assert sum(found.seconds.values()) == pytest.approx(found.lives_s)
    assert all(one >= 0 for one in found.seconds.values())


def record_of(kind: str, end: float, seconds: float) -> Claim | Attempt | Release:
    common: dict[str, Any] = {"stage": "items", "unit": "u", "generation": 1, "worker": "w"}
    if kind == "claim":
        return Claim(**common, at=end, is_exact=True)
    if kind == "release":
        return Release(worker="w", at=end)
    place: dict[str, Any] = {
        "entry": 1,
        "position": 0,
        "item": 0,
        "group": None,
        "number": 1,
        "host": "n1",
    }
    ends = None if kind == "lost" else end
    begin = None if kind == "killed" else end - seconds
    return Attempt(**common, **place, begin=begin, end=ends, outcome=kind, error="")


def busy_run(root: Path, texts: tuple[str, ...] = ("plain",)) -> ToyRun:
    """A run whose items, errors, names and notes are ``texts``, with samples of a monitor."""
    texts = tuple(text.encode(errors="replace").decode() for text in texts)
    toy = ToyRun(root, 0, sealed=False, group_by="name", max_attempts=1)
    toy.add([{"name": text, "id": number} for number, text in enumerate(texts)])
    toy.log().seal()
    worker = toy.worker("wa", host=texts[0][:40], started=1_000.0, at=1_100.0)
    for number, text in enumerate(texts):
        unit = toy.stage().log.segments[1].unit_of(number).name
        if worker.unit != f"items/{unit}":
            if worker.unit:
                worker.release(1_000.0 + number)
            assert worker.claim(unit)
        kind = "failed" if number % 2 else "done"
        loss = {
            "validation_loss_of_the_last_epoch": -1_234_567.0 * (number + 1),
            "at": {"lr": 3e-05},
        }
        given = {"error": f"ValueError: {text}"} if number % 2 else {"value": loss}
        worker.attempt(number, kind, at=1_001.0 + number, seconds=0.5, **given)
    worker.release(1_090.0)
    worker.presence.update(state="finished", note=texts[-1][:100])
    lines = [
        {"type": "header", "host": texts[0][:40], "started": 1_000.0, "gpus": [{}]},
        *(
            {
                "type": "sample",
                "t_s": float(second),
                "cpu_percent": 50.0,
                "rss_bytes": 1 << 30,
                "gpus": [{"busy_percent": 80.0, "memory_used_bytes": 1 << 31}],
            }
            for second in range(90)
        ),
    ]
    data = "\n".join([*map(json.dumps, lines), '{"type": "sam'])
    toy.paths.monitor_log("n1", 7).write_text(data)
    return toy


def test_hostile_text_is_shown_as_text(fast_dir: Path) -> None:
    markup = ("<script>alert(1)</script>", "</svg><img src=x onerror=alert(1)>", "-", "\x1b[31mred")
    toy = busy_run(fast_dir / "run", (*markup, *HOSTILE))

    page = report_of(Run.open(toy.root))
    assert all(one.isprintable() or one == "\n" for one in page)
    assert "<img" not in page
    assert page.count("<script>") == 1
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.outside == []
    assert "alert(1)" in parsed.words
    assert "red" in parsed.words


class Page(HTMLParser):
    """The tags of a page, those that are not closed, and what they refer to outside of it."""

    EMPTY = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.open: list[str] = []
        self.outside: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))
        if tag not in self.EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            if name.startswith("on") or tag in ("link", "iframe", "object", "img", "base", "use"):
                self.outside.append(f"{tag} {name}")
            if name in ("src", "href", "action", "data") and not (value or "").startswith("#"):
                self.outside.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def figures_of(page: str) -> list[ET.Element]:
    return [ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def assert_texts_are_inside(figure: ET.Element) -> None:
    for one in figure.iter(f"{SVG}text"):
        assert 0 <= float(one.attrib["x"]) <= float(figure.attrib["width"])
        assert 0 <= float(one.attrib["y"]) <= float(figure.attrib["height"])


@given(high=st.floats(1e-3, 1e8))
def test_marks_of_an_axis_are_few_in_order_and_written_without_exponents(high: float) -> None:
    for ticks in (number_ticks(0.0, high), span_ticks(high)):
        values = [value for value, _ in ticks]
        assert values == sorted(set(values))
        assert len(values) <= 10
        assert all(0 <= value <= high * 1.001 for value in values)
        labels = [label for _, label in ticks]
        assert len(set(labels)) == len(labels)
        assert not any(re.search("[0-9]e", label) or len(label) > 10 for label in labels)


def job_record(run: RunPaths) -> None:
    run.jobs.mkdir()
    (run.jobs / "12.json").write_text('{"job": ["x"], "submitted": {}}')


MONITOR = b"\xff\n[1]\n" + b'{"type":"header"}\n' * 3
DAMAGES: dict[str, Callable[[RunPaths], object]] = {
    "torn journal": lambda run: os.truncate(
        run.journal("wa"), run.journal("wa").stat().st_size - 30
    ),
    "binary journal": lambda run: run.journal("wa").write_bytes(b"\0\xff" * 1000),
    "no journal": lambda run: run.journal("wa").unlink(),
    "torn worker file": lambda run: run.worker("wa").write_bytes(b"{"),
    "no segment": lambda run: next(run.stage("items").items.iterdir()).unlink(),
    "no control": lambda run: run.control.rmdir(),
    "job record": job_record,
    "monitor": lambda run: run.monitor_log("n1", 8).write_bytes(MONITOR),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_run_has_a_report(fast_dir: Path, what: str) -> None:
    toy = busy_run(fast_dir / "run", ("a", "b"))
    DAMAGES[what](toy.paths)
    before = tree(toy.root)

    page = report_of(Run.open(toy.root))

    assert "Outcome" in page
    assert Page(page).open == []
    assert tree(toy.root) == before  # reading writes nothing


@pytest.mark.slow
def test_the_page_opens_in_a_browser_without_errors_and_without_requests(
    fast_dir: Path, tmp_path: Path
) -> None:
    """Needs chromium, which .ci/system installs."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or "chromium"
    toy = busy_run(fast_dir / "run", ("a", "b", "<b>", "d"))
    # The page sorts a table by its second column, and reports widths and errors in its title. A
    # frame as wide as a phone has the page again: a window is at least 500 pixels wide.
    probe = """<script>addEventListener("load", () => {
      const table = document.querySelector("#s4 table"), frame = document.createElement("iframe");
      table.tHead.querySelectorAll("button")[1].click();
      const values = [...table.tBodies[0].rows].map(row => +row.cells[1].dataset.v);
      frame.width = 390;
      frame.srcdoc = document.documentElement.outerHTML.replaceAll(/<script[^]*?<.script>/g, "");
      frame.onload = () => {
        const wide = frame.contentDocument.body.scrollWidth;
        const dark = getComputedStyle(document.body).color;
        document.title = JSON.stringify({wide, values, dark});
      };
      document.body.append(frame);
    });</script>"""
    page = report_of(Run.open(toy.root))
    (tmp_path / "page.html").write_text(page)
    freed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    (tmp_path / "probe.html").write_text(freed.replace("</head>", f"{probe}</head>"))

    def chromium(file: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(program, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--no-first-run", "--disable-background-networking"),
                *("--enable-logging=stderr", "--virtual-time-budget=2000", "--window-size=390,900"),
                *(
                    f"--user-data-dir={tmp_path / 'profile'}",
                    "--host-resolver-rules=MAP * ~NOTFOUND",
                ),
                *("--blink-settings=preferredColorScheme=0", *words, f"file://{tmp_path / file}"),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )

    printed = chromium(
        "page.html", f"--print-to-pdf={tmp_path / 'page.pdf'}", f"--log-net-log={tmp_path / 'net'}"
    )
    dumped = chromium("probe.html", "--dump-dom")

    assert "CONSOLE" not in printed.stderr + dumped.stderr
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    hosts = set(re.findall(r'"url":"https?://([^/"]*)', (tmp_path / "net").read_text()))
    own = re.compile(r"(.*\.)?(google(apis)?\.com|gvt1\.com)")  # services of the browser
    assert not {host for host in hosts if not own.fullmatch(host)}
    found = json.loads(re.findall(r"<title>({.*?})</title>", dumped.stdout)[0])
    assert found["values"] == sorted(found["values"], reverse=True)
    assert found["wide"] <= 390
    assert found["dark"] == "rgb(230, 237, 243)"


def test_the_first_screen_has_the_range_of_each_numeric_result_and_then_the_failures(
    fast_dir: Path,
) -> None:
    toy = ToyRun(fast_dir / "run", 5, unit=5, max_attempts=1)
    worker = toy.worker("wa", started=1_000.0, at=1_100.0)
    assert worker.claim(toy.unit_name(0))
    for number, loss in enumerate((0.25, 1e300, float(-(10**6)), 0.5)):
        value = {"loss": loss, "name": "x", "fine": True, "at": {"step": number}, "rare": None}
        worker.attempt(number, value={**value, **({"rare": 7} if number == 2 else {})}, at=1_001.0)
    worker.attempt(4, "failed", error="ValueError: no", at=1_002.0)
    worker.release(1_003.0)
    before = tree(toy.root)

    outcome, failures = sections(read_facts(Run.open(toy.root)))[:2]

    (table,) = outcome.tables
    assert (outcome.title, failures.title) == ("Outcome", "Failures")
    assert outcome.paragraphs[0].startswith("The run is complete: 4 of 5 items are done")
    assert table.columns == ("result", "minimum", "median", "maximum", "items")
    rows = [[one if isinstance(one, str) else one.text for one in row] for row in table.rows]
    assert rows == [
        ["loss", "-1,000,000", "0.375", "1e+300", "4"],
        ["at.step", "0", "1.5", "3", "4"],
        ["rare", "7", "7", "7", "1"],
    ]
    assert tree(toy.root) == before  # no table was published


@given(st.lists(st.integers(-(10**400), 10**400) | st.floats(), max_size=40))
def test_ranges_are_those_of_the_finite_numbers(values: list[float]) -> None:
    rows = [{"value": {"a": {"b": one}}} for one in values] + [{"value": None}]

    found = ranges_of(rows, most=1).get("a.b")

    known = []
    for one in values:
        with suppress(OverflowError):
            known += [float(one)] if math.isfinite(float(one)) else []
    assert (found is not None) == bool(known)
    if found is not None:
        assert (found.least, found.most, found.count) == (min(known), max(known), len(known))
        assert statistics.median(found.some) == statistics.median(known)
