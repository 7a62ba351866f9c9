"""Metrics for Prometheus: its text format, a file that is complete at any time, a dashboard."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.cli import load_commands
from hpc_toolkit.cli.export import METRICS, metric_lines
from hpc_toolkit.results.progress import StageCounts, WorkerCounts
from hpc_toolkit.results.status import Status
from hpc_toolkit.system.clock import SystemClock
from tests.documents import REPOSITORY
from tests.hostile import HOSTILE
from tests.toyrun import ToyRun

if TYPE_CHECKING:
    from collections.abc import Iterable

Sample = tuple[str, frozenset[tuple[str, str]]]
Found = dict[Sample, float]
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\[\\"n])*)"(?:,|$)')


def parsed(text: str) -> Found:
    """Read the text format as strictly as its definition; a sample that is there twice fails."""
    found: Found = {}
    kinds: dict[str, str] = {}
    current = ""
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            assert what in ("HELP", "TYPE")
            assert what == "HELP" or rest == "gauge"
            assert name == current or name not in kinds, "a metric is described once"
            current = kinds.setdefault(name, name)
            continue
        match = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{(.*)\} (\S+)", line, re.DOTALL)
        assert match is not None, line
        assert match[1] == current, "samples of one metric follow each other"
        labels = _LABEL.findall(match[2])
        assert "".join(f'{key}="{raw}",' for key, raw in labels) == match[2] + ","
        plain = {
            key: re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), raw) for key, raw in labels
        }
        sample = (match[1], frozenset(plain.items()))
        assert sample not in found
        found[sample] = float(match[3])
    return found


def status_of(run: str = "/runs/a", **changes: object) -> Status:
    facts = {
        "run": run,
        "stages": {
            "items": StageCounts(total=9, pending=2, running=1, claimed=0, done=5, failed=1)
        },
        "workers": WorkerCounts(3, 1, 2, 4),
        "rate_per_s": 1e-9,
        "eta_s": 12.5,
        "eta_low_s": 9.0,
        "eta_high_s": 20.0,
        "complete": False,
        "deaths": 4,
        "published": False,
        "reason": "",
        **changes,
    }
    return Status(**facts)  # type: ignore[arg-type]


def lines(found: Iterable[Status]) -> str:
    return "".join(metric_lines(found, 1795243470.2134))


def test_every_number_of_a_status_is_a_sample_with_its_labels() -> None:
    best = {"arm": 'm"1\\', "reward": 0.5}
    found = parsed(lines([status_of(best=best), status_of("/runs/b", eta_s=None)]))

    def value(name: str, **labels: str) -> float | None:
        return found.get((name, frozenset({"run": "/runs/a", **labels}.items())))

    by_state = [value("hpctk_items", stage="items", state=one) for one in ("pending", "running")]
    assert by_state == [2.0, 1.0]
    assert value("hpctk_items", stage="items", state="failed") == 1.0
    assert value("hpctk_workers", state="dead") == 2.0
    assert value("hpctk_workers", state="unreadable") == 4.0
    assert value("hpctk_rate_items_per_second") == 1e-9
    assert value("hpctk_eta_seconds") == 12.5
    assert value("hpctk_best_reward", arm='m"1\\') == 0.5
    assert value("hpctk_status_timestamp_seconds") == 1795243470.213
    assert {name for name, _ in found} == set(METRICS)
    assert value("hpctk_eta_seconds", run="/runs/b") is None


@given(st.text() | st.sampled_from(HOSTILE), st.text() | st.sampled_from(HOSTILE))
def test_any_name_is_one_label_and_nothing_else(run: str, arm: str) -> None:
    text = lines([status_of(run, best={"arm": arm, "reward": 1.0})])

    found = parsed(text.encode(errors="replace").decode())

    wanted = frozenset({("run", run), ("arm", arm)})
    shown = {
        (key, value.encode(errors="replace").decode()) for key, value in wanted
    }  # half of a surrogate pair is no text
    assert found["hpctk_best_reward", frozenset(shown)] == 1.0


def test_the_command_replaces_a_file_that_others_can_read(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fast_dir)
    toy = ToyRun(fast_dir / "runs" / "one")
    toy.worker("wa").work(toy.unit_name(0), 1, i0="done", i1="failed")
    ToyRun(fast_dir / "runs" / "two")
    (fast_dir / "h.prom").write_text("old")
    before = os.umask(0o077)
    try:
        ended = CliRunner().invoke(load_commands("status"), ["status", "--prometheus", "h.prom"])
    finally:
        os.umask(before)

    assert (ended.exit_code, ended.output) == (0, "")
    assert (fast_dir / "h.prom").stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in fast_dir.iterdir()) == ["h.prom", "runs"]
    found = parsed((fast_dir / "h.prom").read_text())
    done = frozenset(
        {"run": str(fast_dir / "runs" / "one"), "stage": "items", "state": "done"}.items()
    )
    assert found["hpctk_items", done] == 1.0
    assert sum(name == "hpctk_complete" for name, _ in found) == 2
    (written,) = {value for (name, _), value in found.items() if name.endswith("timestamp_seconds")}
    assert abs(written - SystemClock().wall()) < 600


@pytest.mark.parametrize("file", ["h.txt", "missing/h.prom"])
def test_a_file_that_node_exporter_would_not_read_is_refused(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.chdir(toy.root.parent)

    words = ["status", str(toy.root), "--prometheus", file]
    ended = CliRunner().invoke(load_commands("status"), words)

    assert re.search("unknown format|there is no directory", str(ended.exception))
    assert not Path(file).exists()


def test_a_training_has_no_metrics(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fast_dir)
    (fast_dir / "train" / "jobs").mkdir(parents=True)

    words = ["status", "train", "--prometheus", "h.prom"]
    ended = CliRunner().invoke(load_commands("status"), words)

    assert "directory of a training: --prometheus is for runs" in str(ended.exception)
    assert not Path("h.prom").exists()


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads((REPOSITORY / "examples" / "grafana.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [*targets, *(one["query"]["query"] for one in dashboard["templating"]["list"][1:])]

    names = {name for query in queries for name in re.findall(r"\bhpctk_\w+", query)}

    assert names == set(METRICS)
    positions = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(positions)) == len(positions)
