"""What people see of a run: rows, one line, a terminal of any kind, a full screen, and HTML."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.report.panel import Row, headline, host_rows, one_line, panel
from hpc_toolkit.report.terminal import Look, draw, status_html
from hpc_toolkit.results.explain import Failures
from hpc_toolkit.results.progress import NO_WORKER, OPEN, PAUSED, StageCounts, WorkerCounts
from hpc_toolkit.results.status import Status
from hpc_toolkit.results.workers import HostLine
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.system.terminal import columns, cut, pad, printable, wrap
from tests.unit.test_report import Page


def status(**changes: Any) -> Status:
    counts = StageCounts(total=100, pending=77, running=4, claimed=3, done=15, failed=1)
    fields: dict[str, Any] = {
        "run": "runs/x",
        "stages": {"items": counts},
        "workers": WorkerCounts(alive=4, dead=1),
        "rate_per_s": 3.2,
        "eta_s": 28.0,
        "eta_low_s": 25.0,
        "eta_high_s": 32.0,
        "complete": False,
        "deaths": 0,
        "published": False,
        "reason": "",
    }
    return Status(**{**fields, **changes})


def failures(error: str, items: int = 1, **changes: Any) -> dict[str, Any]:
    found = Failures(error, items, item=17, example={"n": 1}, hosts={"n1": items})
    return {**found.to_json(), **changes}


def test_a_line_tells_counts_workers_and_what_is_left() -> None:
    assert one_line(status()) == (
        "15 of 100 done, 1 failed; 4 workers, 1 died, 3.2 items/s, 25.0 s to 32.0 s left"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "working, 25.0 s to 32.0 s left"),
        ({"eta_low_s": 28.0, "eta_high_s": 28.0}, "working, about 28.0 s left"),
        ({"eta_s": None, "eta_high_s": None}, "working, more than 25.0 s left"),
        ({"eta_s": None, "eta_low_s": None, "eta_high_s": None}, "working"),
        ({"eta_low_s": None, "reason": "no worker is alive"}, "nothing moves"),
        (
            {
                "eta_low_s": None,
                "halt": OPEN,
                "reason": "every item is finished, the list is open: add some",
            },
            "every item is finished, the list is open, 1 failed",
        ),
        ({"halt": PAUSED, "reason": "paused: the first 25 items all failed"}, "paused"),
        (
            {"eta_low_s": None, "halt": NO_WORKER, "reason": "x, the list is open: y"},
            "nothing moves",
        ),
        ({"complete": True, "elapsed_s": 61.0}, "complete after 1 min 01 s, 1 failed"),
    ],
)
def test_a_headline_says_how_a_run_stands(changes: dict[str, Any], words: str) -> None:
    assert headline(status(**changes)) == words


@pytest.mark.parametrize(
    ("shares", "unicode", "drawn"),
    [
        ((0.5, 0.1, 0.1), False, "#####x=..."),
        ((0.999, 0.0, 0.0), False, "#########."),
        ((0.999, 0.001, 0.0), False, "#########x"),
        ((0.0, 0.001, 0.001), True, "▓▒────────"),
        ((1.0, 0.0, 0.0), True, "██████████"),
    ],
)
def test_a_bar_hides_no_share(
    shares: tuple[float, float, float], unicode: bool, drawn: str
) -> None:
    row = Row("items", "x" * 50, bar=shares)

    (line,) = draw([row], Look(columns=71, unicode=unicode))

    assert line.split()[1] == drawn


WIDE = "日本e\u0301\U0001f600"


def width(line: str) -> int:
    return sum((2 if c in "日本\U0001f600" else c != "\u0301") for c in line)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize("unicode", [False, True])
def test_no_line_is_wider_than_the_terminal(columns: int, unicode: bool) -> None:
    long = status(
        reason="no worker is alive: " + "start some with this or that " * 5,
        failures=[failures("Error: " + "long " * 40)],
        throughput={"done": [1.0, 2.0, 5.0, 3.0] * 20},
        run=f"runs/{WIDE * 9}",
        warnings=[f"w {WIDE * 30}", f"w {WIDE} " * 20],
    )

    lines = draw(panel(long), Look(columns=columns, unicode=unicode))

    assert max(map(width, lines)) <= columns
    assert not any(word in line for line in lines for word in "\x1b")
    text = "".join("".join(line.split()) for line in lines)
    assert "startsomewiththisorthat" * 5 in text


@pytest.mark.parametrize("bad", ["\x1b[2J", "\u202e", "\x9b2J", "\r"])
def test_no_value_of_a_run_controls_the_terminal(bad: str) -> None:
    hostile = status(
        run=f"r{bad}",
        stages={f"s{bad}": StageCounts(total=1)},
        reason=bad,
        warnings=[bad],
        failures=[failures(bad, example={bad: bad}, hosts={bad: 1})],
    )

    for look in (Look(), Look(unicode=False)):
        assert bad not in "".join(draw(panel(hostile), look))


@settings(max_examples=40)
@given(st.text(), st.text(), st.text())
def test_no_value_of_a_run_becomes_a_tag(name: str, reason: str, error: str) -> None:
    plain = Page(status_html(status(reason="r", failures=[failures("e")])))

    found = status_html(
        status(
            run=f"<i>{name}",
            stages={f"<b>{name}": status().stages["items"]},
            reason=f"<script>{reason}",
            failures=[failures(f"<img onerror=x>{error}")],
        )
    )

    assert Page(found).tags == plain.tags
    assert printable(f"<script>{reason}") in Page(found).words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((text, text) for text in ("plain", "näive 日本", 'it\'s "quoted" $5 \\n')),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb", r"a\nb"),
        ("\x9b31m", r"\x9b31m"),
        ("right\u202eleft", r"right\u202eleft"),
        ("\x7f", r"\x7f"),
    ],
)
def test_what_does_not_print_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


COMBINED = "e\u0301"


@pytest.mark.parametrize(
    ("text", "count"),
    [("plain", 5), ("日本", 4), ("\U0001f600", 2), (COMBINED, 1), ("a日" + COMBINED, 4)],
)
def test_a_text_takes_the_columns_of_its_characters(text: str, count: int) -> None:
    assert columns(text) == count
    assert pad(text, 8) == text + " " * (8 - count)


def test_a_cut_text_keeps_to_its_columns_and_a_letter_keeps_its_accent() -> None:
    assert cut("日本語", 6) == "日本語"
    assert cut("日本語.", 6) == "日..."
    assert cut(COMBINED * 9, 5) == COMBINED * 2 + "..."


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("one two  three", ["one two", "  three"]),
        ("    kept in front", ["    kept", "  in", "  front"]),
        ("a 0123456789", ["a 012345", "  6789"]),
        ("日本 語日本", ["日本", "  語日本"]),
        ("x日本語日本語", ["x日本語", "  日本語"]),
    ],
)
def test_a_text_is_wrapped_by_columns(text: str, lines: list[str]) -> None:
    assert wrap(text, 8, indent="  ") == lines


BAD = "\x1b[2J\u202e\r\n日本e\u0301\U0001f600"


def host(name: str, **changes: Any) -> HostLine:
    facts = {"alive": 8, "busy": 8, "died": 0, "deaths": 0, "rate_per_s": 4.0}
    return HostLine(name, **{**facts, **changes})


def many(text: str = "") -> list[Row]:
    """The rows of a run with three kinds of failures, and eight workers on each of many hosts."""
    errors = ("CUDA out of memory", "loss is nan at step", "[Errno #] Input/output error: 'PATH'")
    failures = [
        Failures(f"RuntimeError: {error}{text}", 200, item=17, example={"n": 1}, hosts={"n1": 200})
        for error in errors
    ]
    counts = StageCounts(total=1000, pending=300, running=90, done=400, failed=210)
    facts: dict[str, Any] = {"run": f"runs/bench{text}", "stages": {"items": counts}}
    facts |= {"workers": WorkerCounts(alive=495, dead=1), "elapsed_s": 3600.0}
    facts["throughput"] = {"done": [1.0, 2.0, 5.0, 3.0] * 20}
    now = status(**facts, failures=[one.to_json() for one in failures])
    hosts = [host("broken", alive=0, busy=0, died=1, deaths=1, rate_per_s=0.0)]
    hosts += [host(f"gpu{number:03}{text}") for number in range(61)]
    jobs = [JobRecord(id="4711", state="RUNNING", nodes="gpu[001-062]")]
    return [*panel(now, jobs), *host_rows(hosts)]


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (40, 20)])
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("unicode", [False, True])
def test_rows_fit_a_screen_and_nothing_controls_the_terminal(
    columns: int, rows: int, colour: bool, unicode: bool
) -> None:
    look = Look(columns=columns, colour=colour, unicode=unicode)

    lines = draw(many(BAD), look, most=rows)

    assert len(lines) == rows
    assert max(width(plain(line)) for line in lines) <= columns
    assert all(plain(line).isprintable() for line in lines)
    assert colour or lines == [plain(line) for line in lines]


def test_at_80x24_all_that_is_important_fits_and_hosts_give_way() -> None:
    lines = draw(many(), Look(columns=80), most=23)

    text = "\n".join(lines)
    assert lines[0] == "runs/bench: working, 25.0 s to 32.0 s left"
    for error in ("CUDA out of memory", "loss is nan", "[Errno #] Input/output error"):
        assert f"200 x RuntimeError: {error}" in text
    assert "495 alive, 1 dead" in text
    assert "job 4711  RUNNING on gpu[001-062]" in text
    assert re.search(r"hosts +broken +0 workers", text)  # the worst first
    assert re.search(r"\.\.\. \d+ more lines$", lines[-1])
