"""Lists whose items follow each other: order, results, failures and kills, as a user runs them."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import Run
from hpc_toolkit.doctor.runfiles import check_run
from hpc_toolkit.doctor.sides import Verdict
from tests.integration.realrun import Hpctk, journal_lines, wait_until, write_items
from tests.unit.jobcommands import refused

DIAMOND: list[dict[str, Any]] = [
    {"id": "d", "after": ["b", "c"]},
    {"id": "b", "after": ["a"]},
    {"id": "a"},
    {"id": "c", "after": ["a"]},
]


def made(hpctk: Hpctk, items: list[dict[str, Any]], *how: str) -> Run:
    write_items(items)
    found = hpctk("init", "run", "--items", "items.jsonl", *how)
    assert found.code == 0, found.err
    return Run.open("run")


def check_order(run: Run, items: list[dict[str, Any]]) -> None:
    """Each item has one result, and none was begun before the items that it follows were done."""
    run.view.poll()
    log, times = run.view.stages["items"].log, {}
    for line in journal_lines(run, "done"):
        entry = int(line["unit"].rpartition("/")[2].partition("-")[0])
        number = log.segments[entry].number(line["item"])
        assert number not in times, number
        times[number] = (line["at"] - line["seconds"], line["at"])
    assert sorted(times) == list(range(len(items)))
    numbers = {str(item["id"]): number for number, item in enumerate(items)}
    for number, item in enumerate(items):
        for one in item.get("after", []):
            assert times[number][0] >= times[numbers[str(one)]][1] - 0.1, (item, one)


def chain(count: int) -> list[dict[str, Any]]:
    return [{"id": n, "after": [n - 1] if n else []} for n in range(count)]


def shuffled(count: int) -> list[dict[str, Any]]:
    draw = random.Random(7)
    items = [
        {"id": n, "after": sorted(draw.sample(range(n), min(n, draw.randrange(4))))}
        for n in range(count)
    ]
    draw.shuffle(items)
    return items


@pytest.mark.parametrize(
    ("items", "kills"),
    [
        (shuffled(150), 3),
        pytest.param(chain(1000), 10, marks=pytest.mark.soak),
        pytest.param(shuffled(10_000), 30, marks=pytest.mark.soak),
    ],
    ids=["random", "long chain", "large"],
)
def test_items_run_once_and_in_order_through_kills(
    items: list[dict[str, Any]], kills: int, hpctk: Hpctk
) -> None:
    run = made(hpctk, items, "--workload", "stage_workloads:whole")
    for number in range(kills):
        work = hpctk.start("work", "run", "--workers", 4)
        wanted = (number + 1) * len(items) // (kills + 2)
        wait_until(partial(has_done, run, wanted), "results", of=work)
        work.kill()
    assert hpctk("work", "run", "--workers", 4).code == 0

    now = run.status()
    assert (now.complete, now.stages["items"].done) == (True, len(items))
    check_order(run, items)
    depth: dict[str, int] = {}
    after = {str(one["id"]): [str(of) for of in one["after"]] for one in items}
    for name in sorted(after, key=int):
        depth[name] = 1 + max((depth[one] for one in after[name]), default=0)
    rows = run.results()
    assert [row["item"]["id"] for row in rows] == [one["id"] for one in items]
    assert {str(row["item"]["id"]): row["value"]["depth"] for row in rows} == depth


def has_done(run: Run, least: int) -> bool:
    return len(journal_lines(run, "done")) > least


def test_a_function_gets_the_results_of_items_before_as_python_had_them(hpctk: Hpctk) -> None:
    run = made(hpctk, DIAMOND, "--workload", "stage_workloads:total")
    assert hpctk("work", "run", "--workers", 2).code == 0

    rows = run.results()
    assert [(row["item"]["id"], row["value"]["rows"][0]) for row in rows] == [
        *(("d", 2 * 2000 * 2001 + 1), ("b", 2001), ("a", 1), ("c", 2001))
    ]
    assert rows[0]["value"]["path"] == "d ['b', 'c']"
    gathered = [json.loads(line) for line in hpctk("gather", "run").out.splitlines()]
    assert [sorted(row["item"]) for row in gathered] == [["id", "results"]] * 4


def test_a_failed_item_skips_what_follows_until_it_is_retried(hpctk: Hpctk) -> None:
    Path("bad").touch()
    more = [*DIAMOND, {"id": "e", "after": ["d"]}]
    run = made(hpctk, more, "--workload", "stage_workloads:total")
    waits = hpctk("explain", "run", "--item", '"id": "d"').out
    assert waits.splitlines() == [
        '{"id": "d"}: waiting',
        '  after {"id": "b"}: waiting',
        '  after {"id": "c"}: waiting',
    ]
    assert hpctk("work", "run", "--workers", 2).code == 0
    now = run.status()

    assert now.complete
    counts = now.stages["items"]
    assert (counts.done, counts.failed, counts.skipped, counts.waiting) == (2, 1, 2, 0)
    assert "2 skipped" in hpctk("status", "run").out
    assert hpctk("explain", "run", "--item", "e").out.splitlines() == [
        '{"id": "e"}: skipped',
        '  after {"id": "b"}: failed: ValueError: no such file',
    ]
    told = json.loads(hpctk("explain", "run", "--item", "4", "--json").out)
    assert (told["item"], told["state"]) == ({"id": "e"}, "skipped")
    assert [row["state"] for row in run.results()] == ["failed", "done", "done"]

    Path("bad").unlink()
    assert run.retry() == 1
    assert hpctk("work", "run", "--workers", 2).code == 0
    assert run.status().stages["items"].done == 5
    assert [row["item"]["id"] for row in run.results()] == ["d", "b", "a", "c", "e"]
    check_order(run, more)


def test_a_command_takes_parts_of_results(hpctk: Hpctk) -> None:
    items: list[dict[str, Any]] = [{"id": "b", "after": ["a"]}, {"id": "a"}]
    Path("len.py").write_text("import sys; print('{\"n\": %d}' % len(sys.argv[1]))")
    run = made(hpctk, items, "--command", "python len.py {results}")
    assert hpctk("work", "run").code == 0

    assert [row["value"]["n"] for row in run.results()] == [len('{"a": {"n": 2}}'), 2]


def test_a_stage_follows_items_that_follow_each_other(hpctk: Hpctk) -> None:
    write_items(DIAMOND)
    stages = """
        items = "items.jsonl"
        workload = "stage_workloads:total"
        [stages.length]
        after = "graph"
        command = "python len.py {graph.path} {results}"
        [stages.end]
        after = "length"
        by = []
        workload = "stage_workloads:ends"
        """
    Path("len.py").write_text("import sys; print('{\"n\": %d}' % len(sys.argv[1]))")
    Path("stages.toml").write_text("[stages.graph]" + stages.replace("        ", ""))
    assert hpctk("init", "run", "--config", "stages.toml").code == 0
    run = Run.open("run")
    plan = json.loads(hpctk("plan", "run", "--nodes", 1, "--item-time", "1s", "--json").out)
    assert (plan["items"], plan["done"], plan["sealed"]) == (8, 0, True)
    assert hpctk("work", "run", "--workers", 2).code == 0

    lengths = [row["value"]["n"] for row in run.results(stage="length")]
    assert sorted(lengths) == sorted(map(len, ["a []", "b ['a']", "c ['a']", "d ['b', 'c']"]))
    assert run.results()[0]["value"] == 4
    shown = hpctk("status", "run").out
    assert shown.count("4 of 4") == 2


DAMAGES = [
    (b'"count":[2,', b'"count":[1,'),
    (b'"before":[1,3', b'"before":[1,9'),
    (b'"format":1', b'"format"::'),
    (b'{"id":"c"}\n', b""),
    (b'{"id":"c"}', b'{"id":"c"'),
]


def test_a_damaged_graph_is_named(hpctk: Hpctk) -> None:
    run = made(hpctk, DIAMOND, "--workload", "stage_workloads:total")
    file = run.paths.stage("items").root / "graph.jsonl"
    data = file.read_bytes()
    for find, put in DAMAGES:
        assert find in data
        file.write_bytes(data.replace(find, put))

        (found,) = (one for one in check_run(run.root) if one.verdict is Verdict.UNSAFE)
        assert f"{file} is damaged: line " in " ".join(found.found.split())
    worked = hpctk("work", "run")
    assert f"{file} is damaged: line " in worked.err
    assert "restore it from a backup; 'hpctk doctor run' shows what else is" in worked.err
    assert hpctk("doctor", "run").code == 1


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "cycle": (
        [
            *({"id": "x"}, {"id": "a", "after": ["c"]}, {"id": "b", "after": ["a"]}),
            {"id": "c", "after": ["x", "b"]},
        ],
        "line 2: item 1: items wait for each other: a after c after b after a",
    ),
    "itself": ([{"id": 1, "after": [1]}], "line 1: item 0: items wait for each other: 1 after 1"),
    "unknown": ([{"id": "a"}, {"id": "b", "after": ["c"]}], "line 2: item 1: it follows 'c', and"),
    "double": (
        [{"id": 1}, {"id": "b", "after": [1]}, {"id": "1", "x": 2}],
        "line 3: item 2: its id '1' is that of item 0",
    ),
    "no id": ([{"id": "a", "after": []}, {"x": 1}], "line 2: item 1: it has no 'id'"),
    "no list": (
        [{"id": "a", "after": []}, {"id": "b", "after": "a"}],
        "line 2: item 1: its 'after'",
    ),
    "no text": ([{"id": "a", "after": [None]}], "line 1: item 0: 'after' has None"),
    "results": (
        [{"id": "a", "after": [], "results": 1}],
        "line 1: item 0: it has the key 'results'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("hpctk")
def test_a_wrong_list_is_refused_with_its_line(case: str) -> None:
    items, message = REFUSED[case]
    write_items(items)
    found = refused("init", "run", "--items", "items.jsonl", "--command", "true {results}")

    assert found.message.startswith(f"items.jsonl, {message}")
    assert found.hint
    assert not Path("run").exists()


def test_nothing_can_be_added_to_such_a_list(hpctk: Hpctk) -> None:
    write_items(DIAMOND)
    wrong = hpctk("init", "run", "--open", "--items", "items.jsonl", "--command", "true {id}")
    assert "items that follow each other cannot be in an open list" in wrong.err
    made(hpctk, DIAMOND, "--command", "true {id}")

    assert "follow other" in refused("add", "run", "--items", "items.jsonl").message


def test_what_follows_short_items_is_added_in_groups(hpctk: Hpctk) -> None:
    roots = [{"id": n} for n in range(200)]
    items = roots + [{"id": 200 + n, "after": [n]} for n in range(200)]
    run = made(hpctk, items, "--workload", "stage_workloads:plain")
    assert hpctk("work", "run").code == 0
    check_order(run, items)
    assert len(run.view.stages["items"].log.segments) < 150
    # Code that asks for no results gets none.
    assert [(row["item"], row["value"]) for row in run.results()] == [
        ({"id": n}, n) for n in range(400)
    ]
