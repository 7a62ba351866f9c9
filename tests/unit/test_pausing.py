"""When a run stops by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.worker.pausing import FIRST_ITEMS, parse_max_failures, pause_reason
from tests.toyrun import ToyRun


@pytest.mark.parametrize(
    ("text", "limit"),
    [("0", (0, False)), ("50", (50, False)), ("5%", (5.0, True)), ("0.5%", (0.5, True))],
)
def test_parse_max_failures_reads_counts_and_shares(text: str, limit: tuple[float, bool]) -> None:
    assert parse_max_failures(text) == limit


@pytest.mark.parametrize("text", ["", "%", "-1", "101%", "nan%", "5 %%", "half", "1.5"])
def test_parse_max_failures_refuses_the_rest(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither a count nor a share"):
        parse_max_failures(text)


def run_of(fast_dir: Path, kinds: str, *, total: int = 40, **spec: Any) -> ToyRun:
    """A run whose first items ended as ``kinds`` says: d(one), f(ailed), p(ermanent)."""
    toy = ToyRun(fast_dir / "r", total, unit=total, **spec)
    worker = toy.worker("w")
    worker.claim(toy.unit_name(0))
    for item, kind in enumerate(kinds):
        worker.attempt(item, {"d": "done", "f": "failed", "p": "permanent"}[kind])
    worker.release()
    return toy


@pytest.mark.parametrize(
    ("kinds", "limit", "reason"),
    [
        # Fewer failures, or one result, let it go on.
        *((kinds, None, "") for kinds in ("", "d" + "f" * 30, "f" * 30 + "d")),
        ("f" * (FIRST_ITEMS - 1), None, ""),
        ("ppp", "3", ""),
        ("pppp", "3", "4 items of stage 'items' failed; the limit is 3"),
        ("p", "0", "1 item of stage 'items' failed; the limit is 0"),
        ("pppp", "10%", ""),
        ("ppppp", "10%", "5 items of stage 'items' failed; the limit is 10%"),
        ("p" * 40, "100%", ""),
        ("f" * 30, "3", ""),
    ],
)
def test_too_many_failures_at_the_begin_or_beyond_a_limit_are_a_reason_to_pause(
    fast_dir: Path, kinds: str, limit: str | None, reason: str
) -> None:
    assert pause_reason(run_of(fast_dir, kinds, max_failures=limit).stage()) == reason
