"""The full-screen view of a run: which lines stand on a screen of a given size."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpc_toolkit.report.live import Choices, Live, screen_lines
from hpc_toolkit.report.terminal import Look
from hpc_toolkit.results.explain import Failures
from hpc_toolkit.results.progress import StageCounts, WorkerCounts
from hpc_toolkit.results.status import Status
from hpc_toolkit.results.workers import ALIVE, DIED, HostLine, WorkerLine
from hpc_toolkit.slurm.records import JobRecord

SIZES = [(80, 24), (200, 50), (40, 20)]
BAD = "\x1b[2J\u202e\r\n日本e\u0301\U0001f600"


def worker(name: str, state: str = ALIVE, **changes: Any) -> WorkerLine:
    facts = {"is_busy": True, "rate_per_s": 0.5, "done": 9, "failed": 0, "deaths": 0, "note": ""}
    return WorkerLine(name=name, state=state, **{**facts, **changes})


def live(hosts: int = 62, text: str = "", **changes: Any) -> Live:
    """A run with three kinds of failures, and eight workers on each of many hosts."""
    errors = ("CUDA out of memory", "loss is nan at step", "[Errno #] Input/output error: 'PATH'")
    failures = [
        Failures(f"RuntimeError: {error}{text}", 200, item=17, example={"n": 1}, hosts={"n1": 200})
        for error in errors
    ]
    counts = StageCounts(total=1000, pending=300, running=90, done=400, failed=210)
    facts: dict[str, Any] = {"run": f"runs/bench{text}", "stages": {"items": counts}}
    facts |= {"workers": WorkerCounts(alive=hosts * 8 - 1, dead=1), "elapsed_s": 3600.0}
    facts |= {"rate_per_s": 3.2, "eta_s": 28.0, "eta_low_s": 25.0, "eta_high_s": 32.0}
    facts |= {"complete": False, "deaths": 0, "published": False, "reason": ""}
    facts["throughput"] = {"done": [1.0, 2.0, 5.0, 3.0] * 20}
    status = Status(**facts, failures=[one.to_json() for one in failures])
    lines = [
        HostLine(f"gpu{host:03}", tuple(worker(f"gpu{host:03}-{n}{text}") for n in range(8)))
        for host in range(hosts - 1)
    ]
    lines.insert(0, HostLine("broken", (worker("broken-1", DIED, is_busy=False),)))
    jobs = [JobRecord(id="4711", state="RUNNING", nodes="gpu[001-062]")]
    return Live(status, **{"jobs": jobs, "hosts": lines, **changes})


def width(line: str) -> int:
    return sum((2 if c in "日本\U0001f600" else c != "\u0301") for c in line)


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", line)


@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("unicode", [False, True])
@pytest.mark.parametrize(
    "chosen",
    [Choices(), Choices(expanded=True, offset=40), Choices(message=BAD)],
    ids=["all", "expanded", "message"],
)
def test_a_screen_is_filled_and_nothing_controls_the_terminal(
    columns: int, rows: int, colour: bool, unicode: bool, chosen: Choices
) -> None:
    look = Look(columns=columns, colour=colour, unicode=unicode)

    lines = screen_lines(live(text=BAD), chosen, look, rows)

    assert len(lines) == rows
    assert max(width(plain(line)) for line in lines) <= columns
    assert all(plain(line).isprintable() for line in lines)
    assert colour or lines == [plain(line) for line in lines]


def test_at_80x24_all_that_is_important_fits_and_hosts_give_way() -> None:
    lines = screen_lines(live(), Choices(), Look(columns=80), 24)

    text = "\n".join(lines)
    assert lines[0] == "runs/bench: working, 25.0 s to 32.0 s left"
    for error in ("CUDA out of memory", "loss is nan", "[Errno #] Input/output error"):
        assert f"200 x RuntimeError: {error}" in text
    assert "495 alive, 1 dead, 62 hosts" in text
    assert "job 4711  RUNNING on gpu[001-062]" in text
    assert re.search(r"hosts +broken +0 workers", text)  # the worst first
    assert re.search(r"and \d+ more hosts \(w shows all\)", text)
    assert "more lines" not in text
    assert lines[-1].startswith("w workers")
