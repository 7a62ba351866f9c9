"""What follows a status: commands at the end of a run, and metrics for Prometheus."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.cli.hooks import METRICS, Hooks, metric_lines
from hpc_toolkit.results.progress import PAUSED, StageCounts, WorkerCounts
from hpc_toolkit.results.status import Status
from hpc_toolkit.system.clock import SystemClock
from tests.documents import REPOSITORY
from tests.hostile import HOSTILE
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun
from tests.unit.jobcommands import call, refused

if TYPE_CHECKING:
    from collections.abc import Iterable

KEYS = ("HPCTK_STATE", "HPCTK_DONE", "HPCTK_FAILED", "HPCTK_LEFT")


def status(done: int = 0, failed: int = 0, **changes: Any) -> Status:
    left = 10 - done - failed
    facts: dict[str, Any] = {
        "run": "runs/x",
        "stages": {"items": StageCounts(total=10, pending=left, done=done, failed=failed)},
        "workers": WorkerCounts(alive=2),
        "rate_per_s": 0.0,
        "eta_s": None,
        "complete": left == 0,
        "deaths": 0,
        "published": False,
        "reason": "",
    }
    return Status(**{**facts, **changes})


def noting(path: Path) -> str:
    """A command that adds its facts to a file."""
    return f"echo {' '.join(f'${key}' for key in KEYS)} >> {path}"


def noted(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (status(10), "complete 10 0 0"),
        (status(7, 3), "failed 7 3 0"),
        (status(2, 1, halt=PAUSED, reason="paused: 25 failed"), "paused 2 1 7"),
    ],
)
def test_an_end_is_reported_once_with_what_came_of_the_run(
    tmp_path: Path, last: Status, line: str
) -> None:
    hooks = Hooks(noting(tmp_path / "out"))

    for now in (status(1), last, last):
        hooks.look(now)
    hooks.finish()

    assert noted(tmp_path / "out") == [line]


def test_a_stall_is_reported_once_until_something_is_done_again(tmp_path: Path) -> None:
    clock = ManualClock()
    hooks = Hooks(None, ("30min", noting(tmp_path / "out")), clock)

    def later(minutes: float, now: Status) -> list[str]:
        clock.advance(60 * minutes)
        hooks.look(now)
        hooks.finish()
        return noted(tmp_path / "out")

    assert later(0, status(1)) == []
    assert later(29, status(1)) == []
    assert later(2, status(1)) == ["stalled 1 0 9"]
    assert later(60, status(1)) == ["stalled 1 0 9"]
    assert later(1, status(2)) == ["stalled 1 0 9"]
    assert later(31, status(2)) == ["stalled 1 0 9", "stalled 2 0 8"]
    assert len(later(31, status(10))) == 2  # complete
    assert len(later(31, status(10))) == 2


def test_text_of_a_run_reaches_a_command_only_as_a_value(tmp_path: Path) -> None:
    hooks = Hooks(f'printf %s "$HPCTK_RUN" > {tmp_path}/run')
    name = f"/x/$(touch {tmp_path}/hacked); `touch {tmp_path}/hacked`"

    hooks.look(status(10, run=name))
    hooks.finish()

    assert (tmp_path / "run").read_text() == name
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("exit 3", "failed with exit code 3"),
        ("kill -9 $$", "was killed by SIGKILL"),
        # A real-time signal without a name.
        ("kill -40 $$", "was killed by signal 40"),
    ],
)
def test_a_command_that_fails_is_a_warning_with_its_last_line(end: str, how: str) -> None:
    hooks = Hooks(f"echo first; echo no such host >&2; {end}")
    hooks.quiet = True

    hooks.look(status(10))

    assert hooks.warnings(wait=True) == [f"the command of --on-end {how}: no such host"]


def test_a_watch_runs_the_commands_of_its_options(fast_dir: Path, tmp_path: Path) -> None:
    toy = ToyRun(fast_dir / "r", 2, unit=2)
    toy.worker("w").work(toy.unit_name(0), i0="done", i1="permanent")
    words = ("status", toy.root, "--watch", "--json", "--no-slurm")

    ended = call(*words, "--on-end", noting(tmp_path / "out"), "--on-stall", "1h", "exit 1")

    assert ended.exit_code == 0
    assert json.loads(ended.stdout)["complete"]
    assert noted(tmp_path / "out") == ["failed 1 1 0"]


@pytest.mark.parametrize("option", [("--on-end", "true"), ("--on-stall", "1h", "true")])
def test_commands_of_status_need_a_watch(fast_dir: Path, option: tuple[str, ...]) -> None:
    toy = ToyRun(fast_dir / "r")

    assert refused("status", toy.root, *option).message == f"{option[0]} needs --watch"


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


def status_of(run: str = "/runs/a", **changes: Any) -> Status:
    stage = StageCounts(total=9, pending=2, running=1, claimed=0, done=5, failed=1)
    facts = {"stages": {"items": stage}, "workers": WorkerCounts(3, 1, 2, 4), "deaths": 4}
    facts |= {"rate_per_s": 1e-9, "eta_s": 12.5, "eta_low_s": 9.0, "eta_high_s": 20.0}
    return status(**{"run": run, **facts, **changes})


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
    }  # half of a surrogate pair is not text
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
        ended = call("status", "--prometheus", "h.prom")
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

    ended = call("status", toy.root, "--prometheus", file)

    assert re.search("unknown format|there is no directory", str(ended.exception))
    assert not Path(file).exists()


def test_a_training_has_no_metrics(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fast_dir)
    (fast_dir / "train" / "jobs").mkdir(parents=True)

    ended = call("status", "train", "--prometheus", "h.prom")

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
