"""What people see of a run: rows, one line, a terminal of any kind, and HTML."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.report.live import status_html
from hpc_toolkit.report.panel import Bar, Row, headline, one_line, panel
from hpc_toolkit.report.terminal import Look, draw
from hpc_toolkit.results.explain import Failures
from hpc_toolkit.results.progress import NO_WORKER, OPEN, PAUSED, StageCounts, WorkerCounts
from hpc_toolkit.results.status import Status
from hpc_toolkit.system.terminal import printable


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


class Tags(HTMLParser):
    """The tags of a text, and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


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
    row = Row("items", "x" * 50, bar=Bar(*shares))

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


@given(st.text(), st.text(), st.text())
def test_no_value_of_a_run_becomes_a_tag(name: str, reason: str, error: str) -> None:
    plain = Tags(status_html(status(reason="r", failures=[failures("e")])))

    found = status_html(
        status(
            run=f"<i>{name}",
            stages={f"<b>{name}": status().stages["items"]},
            reason=f"<script>{reason}",
            failures=[failures(f"<img onerror=x>{error}")],
        )
    )

    assert Tags(found).tags == plain.tags
    assert printable(f"<script>{reason}") in Tags(found).text
