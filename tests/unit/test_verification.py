"""Whether results are whole, and what is said where they are not."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.cli.gathering import check_results
from hpc_toolkit.errors import ConfigError, RunError, WorkloadError
from hpc_toolkit.results.snapshots import write_snapshot
from hpc_toolkit.results.tables import Results, plain_key, read_results, write_table
from hpc_toolkit.results.verification import Problem, Range, Recomputation, verify
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import StageSpec, WorkloadSpec

if TYPE_CHECKING:
    from pathlib import Path

ITEMS: list[dict[str, Any]] = [
    {"seed": seed, "name": f"n{seed}", "at": [seed]} for seed in range(4)
]


def row(seed: int, **changes: Any) -> dict[str, Any]:
    """A done row."""
    return {
        "item": ITEMS[seed],
        "state": "done",
        "value": {"mean": 0.25 * seed, "deep": {"steps": [1.0, seed]}},
        "error": None,
        "attempts": 1,
        "seconds": 0.5,
        "worker": "w",
        **changes,
    }


def failed(seed: int) -> dict[str, Any]:
    return row(seed, state="failed", value=None, error="ill")


def found(rows: list[dict[str, Any]], **how: Any) -> list[tuple[str, Any, str]]:
    """Kind, seed and text of what is wrong."""
    items = how.pop("items", ITEMS)
    problems = verify(Results(rows=rows, key=plain_key), items, **how)
    return [(one.kind, one.item["seed"], one.what) for one in problems]


def test_whole_results_have_no_problem() -> None:
    rows = [row(seed) for seed in range(4)]

    assert found(rows, ranges=(Range(name="mean", least=0, most=0.75),), unique=("seed",)) == []


def test_a_row_that_is_missing_twice_there_or_of_no_item_is_named() -> None:
    rows = [row(0), row(1), row(1), row(1), row(2, item={"seed": 9})]

    assert found(rows) == [
        ("missing", 2, ""),
        ("missing", 3, ""),
        ("unexpected", 9, ""),
        ("duplicate", 1, "3 rows"),
    ]
    assert found(rows, items=None) == [("duplicate", 1, "3 rows")]


def test_failed_rows_are_named_with_their_error_and_have_no_value_to_check() -> None:
    ranges = (Range(name="mean"),)

    assert found([*map(row, range(3)), failed(3)], ranges=ranges) == [("failed", 3, "ill")]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("mean=0:0.5", "mean is 0.75, not in 0:0.5"),
        ("mean=:0.5", "mean is 0.75, not in -inf:0.5"),
        ("deep.steps=0:1", "deep.steps is [1.0, 3]"),
        ("none=0:1", "none is null"),
    ],
)
def test_a_number_outside_its_range_is_named(text: str, what: str) -> None:
    assert found([row(3)], items=None, ranges=(Range.parse(text),)) == [("out of range", 3, what)]


def test_an_end_that_is_left_out_bounds_nothing() -> None:
    assert Range.parse("mean=:") == Range(name="mean")
    assert Range.parse("a.b=-1:") == Range(name="a.b", least=-1.0)


@pytest.mark.parametrize("text", ["mean", "mean=1", "=0:1", "mean=1:0", "mean=a:1", "mean=nan:1"])
def test_a_text_that_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not KEY=LEAST:MOST"):
        Range.parse(text)


def test_numbers_that_are_not_finite_are_named_wherever_they_stand() -> None:
    rows = [row(0, value={"a": [1.0, math.nan], "b": {"c": -math.inf}, "d": True, "e": None})]

    assert found(rows, items=None) == [
        ("not finite", 0, "value.a[1] is nan"),
        ("not finite", 0, "value.b.c is -inf"),
    ]


def test_keys_that_repeat_are_named_in_items_and_in_values() -> None:
    rows = [row(0, value={"id": 7}), row(1, value={"id": 8}), row(2, value={"id": 7}), row(3)]

    assert found(rows, unique=("id",)) == [
        ("not unique", 2, f"id is 7 as in {json.dumps(ITEMS[0])}"),
        ("not unique", 3, "there is no id"),
    ]
    assert found([row(1), row(1)], items=None, unique=("seed",))[1][0] == "not unique"


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_what_gather_wrote_is_read_back_in_every_format(ending: str, tmp_path: Path) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"rows{ending}"
    items = [*ITEMS, {"seed": 4.5, "state": "its own", "error": "its own", "none": None}]
    last = row(3, item=items[4], value={"mean": 5.0})
    write_table(path, [row(0), row(1), failed(2), row(3), last, row(3)])

    results = read_results(path)
    problems = verify(results, items, ranges=(Range(name="mean", most=0.5),), unique=("mean",))

    assert [(one.kind, one.what) for one in problems if one.kind != "not unique"] == [
        ("duplicate", "2 rows"),
        ("failed", "ill"),
        ("out of range", "mean is 0.75, not in -inf:0.5"),
        ("out of range", "mean is 5.0, not in -inf:0.5"),
        ("out of range", "mean is 0.75, not in -inf:0.5"),
    ]
    assert len([one for one in problems if one.kind == "not unique"]) == 1
    assert verify(Results(rows=results.rows[:3], key=results.key), items[:3])[0].kind == "failed"


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_keys_of_items_are_never_taken_for_columns_of_ours(ending: str, tmp_path: Path) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"rows{ending}"
    items: list[dict[str, Any]] = [
        {"value.mean": 9.0},
        {"seed": 1, "hpctk.value.mean": 8.0, "value.mean": 7.0},
        {"seed": 2, "state": "Ohio", "hpctk.error": "none", "value.other": "x"},
        {"seed": 3},
        {"seed": 4, "error": "its own", "hpctk.hpctk.state": "Utah"},
    ]
    values = [{"mean": 0.1}, {"mean": 0.2, "other": 5}, {"other": 6}, {"mean": 0.4}, {"mean": 0.5}]
    rows = [row(0, item=items[n], value=value) for n, value in enumerate(values)]
    rows[4] |= {"state": "failed", "value": None, "error": "ill"}
    write_table(path, rows)

    results = read_results(path)

    assert [(one.kind, one.what) for one in verify(results, items)] == [("failed", "ill")]
    assert [one["value"] for one in results.rows] == [*values[:4], None]


def test_numbers_that_are_not_finite_are_found_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("seed,state,error,value.a,value.b\n1,done,,nan,inf\n2,done,,1e3,text\n")

    results = read_results(path)

    assert [one.what for one in verify(results, [{"seed": 1}, {"seed": 2}])] == [
        "value.a is nan",
        "value.b is inf",
    ]
    assert results.rows[1]["value"] == {"a": 1000.0, "b": "text"}


@pytest.mark.parametrize(
    ("name", "text", "error", "match"),
    [
        ("rows.npz", "", ConfigError, "results are .jsonl, .csv or .parquet"),
        ("rows.jsonl", "{}\n", RunError, "holds no gathered rows: KeyError"),
        ("rows.jsonl", "[1]\n", RunError, "holds no gathered rows"),
        ("rows.jsonl", "{\n", RunError, "holds no gathered rows"),
        ("rows.csv", "", RunError, "holds no gathered rows: "),
        ("rows.csv", "a,b\n1,2\n", RunError, "holds no gathered rows: KeyError"),
        ("rows.csv", "a,state\n1,done\n2,d", RunError, r"holds no gathered rows: .*state 'd'"),
        ("rows.csv", "a,state\n1,done\n2", RunError, r"holds no gathered rows: .*1 cells of 2"),
    ],
)
def test_a_file_of_something_else_is_refused(
    name: str, text: str, error: type[Exception], match: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(error, match=match):
        read_results(tmp_path / name)
    with pytest.raises((ConfigError, RunError)):
        read_results(tmp_path / "none" / name)


CODE = """
import os
import random
import sys
LOADS = []

def value(item):
    if item["seed"] == 2:
        raise OSError("gone")
    return {"mean": 0.25 * item["seed"], "deep": {"steps": [1.0, item["seed"]]}}

def noisy(item):
    return {**value(item), "deep": {"steps": [1.0 + 1e-6, item["seed"]], "time": random.random()}}

def leaves(item):
    sys.exit(0)

def loud(item):
    print("a word")
    os.system("echo another")
    return {"mean": 0.5}

class Grouped:
    def load(self, group):
        LOADS.append(group)
        return group
    def run(self, context, items):
        return ({"context": context} for _ in items)

class Fragile(Grouped):
    def run(self, context, items):
        for item in items:
            if item["n"] == 1:
                raise OSError("lost the device")
            yield {"context": context}
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of workloads."""
    (tmp_path / "code_of_verification.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "code_of_verification", raising=False)
    return "code_of_verification"


def stage(function: str, **changes: Any) -> StageSpec:
    return StageSpec(name="items", workload=WorkloadSpec(function=function), **changes)


def test_results_that_come_out_the_same_are_counted(code: str) -> None:
    assert Recomputation(count=2).check(stage(f"{code}:value"), [row(0), row(1), row(3)]) == (2, [])
    assert Recomputation(count=9).check(stage(f"{code}:value"), [row(0), failed(2)]) == (1, [])


def test_results_that_come_out_otherwise_are_named(code: str) -> None:
    rows = [row(0, value={"mean": 0.5}), row(1), row(2)]

    again, problems = Recomputation(count=3).check(stage(f"{code}:value"), rows)

    assert again == 3
    found = {one.item["seed"]: one.what for one in problems}
    assert found == {
        0: 'value.mean was 0.5, is 0.0; value.deep was null, is {"steps": [1.0, 0]}',
        2: "fails now: OSError: gone",
    }
    assert {one.kind for one in problems} == {"recomputed"}


def test_the_tolerance_and_the_keys_to_ignore_decide_what_is_the_same(code: str) -> None:
    function, rows = stage(f"{code}:noisy"), [row(1)]

    def problems(**how: Any) -> list[Problem]:
        return Recomputation(count=1, **how).check(function, rows)[1]

    assert "value.deep.time" in problems(tolerance=1e-5)[0].what
    assert "value.deep.steps[0]" in problems(ignore=("time",))[0].what
    assert problems(tolerance=1e-5, ignore=("time",)) == []


def test_the_draw_depends_on_its_seed_alone(code: str) -> None:
    rows = [row(1, item={"seed": seed}, value={}) for seed in range(100, 150)]

    def drawn(seed: int) -> list[int]:
        _, problems = Recomputation(count=5, seed=seed).check(stage(f"{code}:value"), rows)
        return [one.item["seed"] for one in problems]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(drawn(1)) == 5


def test_a_group_is_loaded_once(code: str) -> None:
    rows = [row(0, item={"g": n % 2, "n": n}, value={"context": n % 2}) for n in range(6)]

    assert Recomputation(count=6).check(stage(f"{code}:Grouped", group_by="g"), rows) == (6, [])

    assert importlib.import_module(code).LOADS == [0, 1]


def test_after_a_failure_the_group_is_loaded_anew(code: str) -> None:
    loads: list[int] = importlib.import_module(code).LOADS
    rows = [row(0, item={"g": 0, "n": n}, value={"context": 0}) for n in range(3)]

    _, problems = Recomputation(count=3).check(stage(f"{code}:Fragile", group_by="g"), rows)

    assert [one.what for one in problems] == ["fails now: OSError: lost the device"]
    assert loads == [0, 0]  # the one that fails is not the last of this draw


def test_code_that_leaves_by_sys_exit_is_a_failure(code: str) -> None:
    again, problems = Recomputation(count=1).check(stage(f"{code}:leaves"), [row(0)])

    assert again == 1
    assert [one.what for one in problems] == ["fails now: SystemExit: 0"]


def test_what_code_prints_is_no_part_of_the_answer(
    code: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", [ITEMS[0]], workload=f"{code}:loud")
    taken = replace(run.snapshot(), rows=[row(0, value={"mean": 0.5})])
    write_snapshot(tmp_path / "s.json", taken)

    sample = Recomputation(count=1)
    path = str(tmp_path / "s.json")
    check_results(path, items=None, ranges=[], unique=[], sample=sample, as_json=True)

    out, err = capfd.readouterr()
    assert json.loads(out)["whole"]
    assert {"a word", "another"} <= set(err.split("\n"))


def test_code_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(WorkloadError):
        Recomputation(count=1).check(stage("no_such_module_at_all:f"), [row(0)])
