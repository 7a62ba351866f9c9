"""A run's status as text and as HTML."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.results.progress import StatusDisplay, status_html, status_line
from hpc_toolkit.results.status import StageCounts, Status, WorkerCounts

if TYPE_CHECKING:
    import pytest

    from tests.toyrun import ToyRun


def status(**changes: Any) -> Status:
    counts = StageCounts(total=100, pending=80, leased=4, done=15, failed=1)
    fields: dict[str, Any] = {
        "run": "runs/x",
        "stages": {"items": counts},
        "workers": WorkerCounts(alive=4, dead=1),
        "rate_per_s": 3.2,
        "eta_s": 28.0,
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


def test_a_line_tells_counts_workers_and_what_is_left() -> None:
    assert status_line(status()) == (
        "15 of 100 done, 1 failed, 4 leased; 4 workers, 1 died, 3.2 items/s, about 28.0 s left"
    )


def test_stages_are_named_where_there_are_several() -> None:
    stages = {"metrics": StageCounts(total=2, done=2), "tasks": StageCounts(total=3)}

    line = status_line(status(stages=stages, complete=True))

    assert line == "metrics: 2 of 2 done; tasks: 0 of 3 done; complete"


def test_a_bar_shows_the_finished_items() -> None:
    found = Tags(status_html(status()))

    assert ("progress", [("max", "100"), ("value", "16")]) in found.tags


@given(st.text(), st.text(), st.text())
def test_no_value_of_a_run_becomes_a_tag(name: str, reason: str, error: str) -> None:
    plain = Tags(status_html(status(reason="r", failures=[{"error": "e", "items": 1}])))

    found = status_html(
        status(
            run=f"<i>{name}",
            stages={f"<b>{name}": StageCounts(total=100, done=15, failed=1)},
            reason=f"<script>{reason}",
            failures=[{"error": f"<img onerror=x>{error}", "items": 1}],
        )
    )

    assert Tags(found).tags == plain.tags
    assert f"<script>{reason}".strip() in Tags(found).text


def test_a_run_shows_itself_in_a_notebook(toy: ToyRun) -> None:
    assert "0 of 4 done" in toy.run._repr_html_()


def test_a_terminal_gets_a_line_when_something_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = StatusDisplay()

    for one in (status(), status(), status(rate_per_s=4.0)):
        display.show(one)

    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_terminal_is_told_why_nothing_moves_when_that_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = StatusDisplay()

    for reason in ("", "it waits", "it waits", "it \x1b[2J starts", ""):
        display.show(status(reason=reason))

    assert capsys.readouterr().out.splitlines()[1:] == ["it waits", r"it \x1b[2J starts"]


def test_a_notebook_gets_one_piece_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[str, str]] = []
    handle = SimpleNamespace(update=lambda piece: shown.append(("update", piece)))

    def display(piece: str, *, display_id: bool) -> Any:
        shown.append((f"display {display_id}", piece))
        return handle

    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    parts = SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", parts)
    one = StatusDisplay()

    one.show(status())
    one.show(status(rate_per_s=4.0))
    one.show(status(rate_per_s=4.0, reason="it waits"))

    assert [what for what, _ in shown] == ["display True", "update", "update"]
    assert "4 items/s" in shown[1][1]
    assert "it waits" in shown[2][1]
    assert capsys.readouterr().out == ""
