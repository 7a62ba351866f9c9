"""Runs of several stages: what follows what, through kills, failures and retries."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from hpc_toolkit import Run
from hpc_toolkit.rundir.layout import shown_item
from tests.integration.realrun import Hpctk, journal_lines, wait_until

PIPELINE = """
[stages.train]
workload = "stage_workloads:train"
grid = {{ lr = "0:{last}", seed = "0:9" }}
[stages.evaluate]
after = "train"
command = "python -c 'import sys, time; time.sleep(.02); print(sys.argv[1])' {{train.text}}"
[stages.rank]
after = "evaluate"
by = ["lr"]
workload = "stage_workloads:rank"
[stages.summary]
after = ["rank", "train"]
by = []
workload = "stage_workloads:summary"
"""


def pipeline(hpctk: Hpctk, last: int) -> Run:
    Path("pipeline.toml").write_text(PIPELINE.format(last=last))
    made = hpctk("init", "run", "--config", "pipeline.toml")
    assert made.code == 0, made.err
    return Run.open("run")


def check_order(run: Run) -> None:
    """No item has a line from before those that it was made of, and nothing was made twice."""
    done = {}
    for line in journal_lines(run, "done"):
        done[line["unit"].rpartition("-")[0], line["item"]] = (
            line["at"] - line["seconds"],
            line["at"],
        )
    for stage in run.view.stages.values():
        origins = []
        for entry, segment in stage.log.segments.items():
            made = [tuple(one) if isinstance(one, list) else one for one in segment.origins]
            origins += made
            for position in range(segment.count if stage.spec.by is None and made else 0):
                before = f"{stage.spec.after[0]}/{made[position][0]:06d}", made[position][1]
                begun = done[f"{stage.spec.name}/{entry:06d}", position][0]
                assert begun >= done[before][1] - 0.1, (stage.spec.name, entry, position)
        assert len(set(origins)) == len(origins), stage.spec.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "kills", "workers"),
    [pytest.param(3, 3, 4), pytest.param(99, 20, 8, marks=pytest.mark.soak)],
)
def test_every_item_of_a_pipeline_is_made_and_run_once_through_kills(
    hpctk: Hpctk, last: int, kills: int, workers: int
) -> None:
    run, total = pipeline(hpctk, last), 10 * (last + 1)
    for number in range(kills):
        work = hpctk.start("work", "run", "--workers", workers)
        wanted = (number + 1) * 2 * total // (kills + 2)
        enough = partial(lambda least: journal_lines(run, "done")[least:], wanted)
        wait_until(enough, "results", of=work)
        work.kill()
    assert hpctk("work", "run", "--workers", workers).code == 0

    assert {
        name: (one.done, one.whole, one.duplicates) for name, one in run.status().stages.items()
    } == {
        "train": (total, total, 0),
        "evaluate": (total, total, 0),
        "rank": (last + 1, last + 1, 0),
        "summary": (1, 1, 0),
    }
    rows = run.results(stage="rank")
    assert sorted(row["value"]["seeds"] for row in rows) == [list(range(10))] * (last + 1)
    assert run.results()[0]["value"] == {"ranks": last + 1, "trained": total}
    assert set(run.status().to_json()["stages"]) == {"train", "evaluate", "rank", "summary"}
    check_order(run)


def test_what_follows_a_failed_item_is_skipped_until_it_is_retried(hpctk: Hpctk) -> None:
    Path("bad").touch()
    run = pipeline(hpctk, 1)
    assert hpctk("work", "run", "--workers", 2).code == 0
    now = run.status()

    assert now.complete
    assert [(one.done, one.failed, one.skipped) for one in now.stages.values()] == [
        *((19, 1, 0), (19, 0, 1), (1, 0, 1), (0, 0, 1))
    ]
    shown = hpctk("status", "run").out
    assert "19 of 19" in shown
    assert "1 skipped" in shown
    assert len(run.results(stage="evaluate")) == 19  # published before the retry
    assert hpctk("report", "run").code == 0
    page = (run.root / "report.html").read_text()
    assert re.search("39 of 40 items are done in .*; 1 failed, 3 skipped", page)
    stages = re.findall("<tr>(.*?)</tr>", page.partition("<h2>Stages")[2].partition("</table>")[0])
    cells = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in stages]
    assert [[row[0], *row[1:4], *row[-2:]] for row in cells] == [
        ["stage", "done", "failed", "skipped", "follows", "skipped after"],
        ["train", "19", "1", "0", "", ""],
        ["evaluate", "19", "0", "1", "train", "failures of train"],
        ["rank", "1", "0", "1", "evaluate, each lr", "failures of train"],
        ["summary", "0", "0", "1", "all of rank and train", "failures of train"],
    ]

    Path("bad").unlink()
    assert run.retry() == 1
    assert hpctk("work", "run", "--workers", 2).code == 0
    now = run.status()

    assert [(one.done, one.failed, one.skipped) for one in now.stages.values()] == [
        *((20, 0, 0), (20, 0, 0), (2, 0, 0), (1, 0, 0))
    ]
    assert len(run.results(stage="evaluate")) == 20
    assert (
        sorted(row["value"]["seeds"] for row in run.results(stage="rank")) == [list(range(10))] * 2
    )
    check_order(run)


def test_a_key_of_an_element_replaces_that_of_its_item_and_a_dict_makes_one_item(
    hpctk: Hpctk,
) -> None:
    run = Run.create(
        "run",
        stages={
            "widen": {
                "workload": "stage_workloads:widen",
                "items": [{"seed": 0}, {"seed": 1}],
                "expand": True,
            },
            "use": {"command": "true", "after": "widen"},
        },
    )
    assert hpctk("work", "run").code == 0

    items = [shown_item(row["item"]) for row in run.results(stage="use")]
    assert sorted(items, key=str) == [
        {"seed": 0, "more": 2},
        {"seed": 1, "widen": {"seed": 8}},
        {"seed": 7, "more": 1},
    ]


def test_stages_get_results_as_python_had_them_and_lists_make_items(hpctk: Hpctk) -> None:
    run = Run.create(
        "run",
        stages={
            "count": {"workload": "stage_workloads:count", "after": "part", "by": ["name"]},
            "part": {"workload": "stage_workloads:part", "after": "split"},
            "split": {
                "workload": "stage_workloads:split",
                "items": [{"name": "a"}, {"name": "b"}, {"name": "none"}],
                "expand": True,
            },
        },
    )
    assert hpctk("work", "run").code == 0

    parts = [shown_item(row["item"]) for row in run.results(stage="part")]
    assert sorted(map(sorted, parts)) == [["name", "number", "rows"]] * 4 + [["name", "split"]] * 2
    assert {row["item"]["name"]: row["value"] for row in run.results(stage="count")} == {
        "a": {"sum": 6000.0, "parts": 3},
        "b": {"sum": 6000.0, "parts": 3},
    }
    assert json.loads(hpctk("status", "run", "--json").out)["complete"]
