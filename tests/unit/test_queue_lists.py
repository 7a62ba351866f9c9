"""Lists of items and files with stages: what is read, and what is refused with its place."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import shutil
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.cli.lists import read_stages
from hpc_toolkit.errors import ConfigError, HpcToolkitError, ItemsError
from hpc_toolkit.queue.listfiles import each_item
from hpc_toolkit.queue.lists import MOST_ITEMS, counted, grid
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.valuefiles import with_results
from hpc_toolkit.system.quantities import parse_range
from hpc_toolkit.worker.command import fill
from tests.unit.jobcommands import call

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_grid_is_all_combinations_and_its_last_name_varies_fastest() -> None:
    assert list(grid(["lr=0.1, 0.001", "seed=0:4:2,9"])) == [
        {"lr": lr, "seed": seed} for lr in (0.1, 0.001) for seed in (0, 2, 4, 9)
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("-1:1", [-1, 0, 1]),
        ("-1:1,8", [-1, 0, 1, 8]),
        ("-2.5,1e-05,12345678901234567890", [-2.5, 1e-05, 12345678901234567890]),
        ("true,false", [True, False]),
        ("true,null,-2.5", ["true", "null", "-2.5"]),
        ("3.9,3.10", ["3.9", "3.10"]),
        ("0:2,x", ["0", "1", "2", "x"]),
        ("00:30,\u0660:\u0669", ["00:30", "\u0660:\u0669"]),
        ("007,NaN,a:b,1:b,[1],7e12345", ["007", "NaN", "a:b", "1:b", "[1]", "7e12345"]),
        ('"quoted"', ['"quoted"']),
        ("::1,12:30:05,a:1,it's", ["::1", "12:30:05", "a:1", "it's"]),
    ],
)
def test_values_are_numbers_only_if_json_writes_all_so(text: str, values: list[Any]) -> None:
    assert [item["x"] for item in grid([f"x={text}"])] == values


@given(st.integers(-50, 50), st.integers(0, 50), st.integers(1, 9))
def test_a_range_includes_its_last_number(first: int, more: int, stride: int) -> None:
    numbers = parse_range(f"{first}:{first + more * stride}:{stride}", where="x")

    assert (numbers[0], numbers[-1], len(numbers)) == (first, first + more * stride, more + 1)
    assert list(parse_range(str(first), where="x")) == [first]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: counted(0, "x"), "--count: 0 items"),
        (lambda: counted(MOST_ITEMS + 1, "x"), "--count: 10000001 items"),
        (lambda: grid(["x"]), "'x' is not NAME=VALUES"),
        (lambda: grid(["=1"]), "'=1' is not NAME=VALUES"),
        *(
            (partial(grid, [f"x=5,{text}"]), f"--grid x: '{text}' is not a range of whole numbers")
            for text in ("0:1e9", "0:1.5", "1:", ":9", "0:9:0.5", "+1:3")
        ),
        (lambda: grid(['x="a,b"']), "--grid x: '\"a,b\"' would be split at its comma"),
        (lambda: grid(["x=[1,2]"]), "--grid x: '[1,2]' would be split at its comma"),
        (lambda: grid(["x=1", "x=2"]), "x is given twice"),
        (lambda: grid(["x=1,,2"]), "--grid x: a value is empty"),
        (lambda: grid(["x=3:1"]), "--grid x '3:1': 1 is before 3"),
        (lambda: grid(["x=1:3:0"]), "the stride is 0"),
        (lambda: grid(["x=0:999999999999"]), "has 1000000000000 values"),
        (lambda: grid(["x=0:9999", "y=0:9999"]), "--grid: 100000000 combinations"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()

    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.csv", '\ufeffx,y\r\n1,"a, b"\r\n\r\n2.5,007\r\n'),
        ("l.CSV", 'x;y\n1;a, b\n2.5;"007"'),
        ("l.csv.gz", "x\ty\n1\ta, b\n2.5\t007\n"),
        ("l.tsv", 'x\ty\r1\t"a, b"\r2.5\t007'),
        ("l.yaml", "- x: 1\n  y: a, b\n- {x: 2.5, y: 007}\n"),
        ("l.json", '[{"x": 1, "y": "a, b"},\n {"x": 2.5, "y": "007"}]'),
        ("l.jsonl", '{"x": 1, "y": "a, b"}\n\n{"x": 2.5, "y": "007"}\n'),
        ("list", '{"x": 1, "y": "a, b"}\n{"x": 2.5, "y": "007"}\n'),
    ],
)
def test_a_list_is_read_by_the_suffix_of_its_file(tmp_path: Path, name: str, text: str) -> None:
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)

    assert [*each_item(tmp_path / name)] == [{"x": 1, "y": "a, b"}, {"x": 2.5, "y": "007"}]


def test_the_lines_of_a_text_are_items(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_bytes("a  b \r\n\n\u2028c\x0bd".encode())

    assert [*each_item(tmp_path / "l.txt")] == [{"line": "a  b "}, {"line": "\u2028c\x0bd"}]


def test_a_list_in_parquet_has_dates_as_text_and_no_missing_values(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = {
        "x": pa.array([1, None]),
        "day": pa.array([None, dt.date(2026, 1, 31)]),
        "price": pa.array([Decimal("1.10"), None]),
        "nan": pa.array([float("nan"), 0.5]),
        "nested": pa.array([[dt.datetime(2026, 1, 31, 8)], None]),
        "__index_level_0__": pa.array(["a", "b"]),
    }
    pq.write_table(pa.table(columns), tmp_path / "l.parquet")

    assert [*each_item(tmp_path / "l.parquet")] == [
        {"x": 1, "price": "1.10", "nested": ["2026-01-31T08:00:00"], "index": "a"},
        {"day": "2026-01-31", "nan": 0.5, "index": "b"},
    ]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ItemsError, match=r"bad.parquet: not a list in Parquet"):
        [*each_item(tmp_path / "bad.parquet")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.csv", b"x,x\n1,2\n", "line 1: column names must be unique"),
        ("l.csv", b"x,\n1,2\n", "line 1: column names must be unique"),
        ("l.csv", b"x,y\n1,2\n1,2,3\n", "line 3: 3 cells for 2 columns"),
        ("l.csv", b'x\n"a\n', "line 2: a quote is not closed"),
        ("l.csv", b'x,y\n1,"a"b\n', "line 2: a quote is not closed, or text follows"),
        ("l.csv", b"x\n\xff\n", "line 2: not UTF-8 but maybe LATIN1"),
        ("l.tsv", "x\ty\n1\t2".encode("utf-16"), "line 1: not UTF-8 but maybe UTF-16"),
        ("l.json", '[{"x": "é"}]'.encode("latin1"), ": not UTF-8 but maybe LATIN1"),
        ("l.jsonl", b'{"x": 1}\n{"x": "\xe9"}', "line 2: not UTF-8 but maybe LATIN1"),
        ("l.jsonl", '{"x": 1}\n{"x": 2}'.encode("utf-16"), "line 2: not UTF-8 but maybe UTF-16"),
        ("l.csv.gz", gzip.compress(b"x\n1\n", mtime=0)[:-4], ": damaged gzip data"),
        ("l.yaml", b"x: [1", ": not YAML"),
        ("l.yaml", b"x: 1", ": not an array of objects"),
        ("l.dat", b"x", ": unknown format 'dat'"),
        ("l.json", b'[{"x": 1},\n{"x" 2}]', "line 2: not JSON: Expecting ':' delimiter"),
        ("l.json", b'{"x": 1}\n{"x": 2}', "line 2: not JSON: Extra data"),
        ("l.json", b"[1]", "not an array of objects"),
        ("l.json", b'[{"x": NaN}]', ": NaN is not JSON, but null is"),
        ("l.json", b'[{"x": 1, "x": 2.50}]', ": it has the key 'x' 2 times: [1, 2.5]"),
        ("l.jsonl", b'{"x": 1}\n{"x" :1,"x":2}', "line 2: it has the key 'x' 2 times: [1, 2]"),
        ("l.jsonl", b'{"y": {"x" :1,"x":2}}', "line 1: it has the key 'x' 2 times: [1, 2]"),
        ("l.yaml", b"- x: 1\n  y: {z: 1,\n    z: 2}", "line 3: z is a key of the same mapping"),
        ("l.yaml", b"- x: 1\n- x: -.Inf", "line 2: -.Inf is not JSON, but null is"),
        ("l.yaml", b"- x: [.nan]", "line 1: .nan is not JSON, but null is"),
    ],
)
def test_a_damaged_list_is_refused_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(HpcToolkitError) as caught:
        [*each_item(tmp_path / name)]

    assert message in caught.value.message
    assert caught.value.message.startswith(str(tmp_path / name))


FILE = """\
command = "echo {seed}"
count = 3
key = "seed"
group_by = "seed"
max_attempts = 2
timeout = "5min"
no_retry = "timeout"
max_failures = "5%"
open = true
items_per_claim = 2
"""


def init(*words: str) -> Any:
    found = call("init", "run", *words)
    return found.exception if found.exit_code else Run.open("run")


def test_a_file_has_all_options_of_a_list() -> None:
    Path("bench.toml").write_text(FILE)

    run = init("--config", "bench.toml")

    stage = run.manifest.stages[0]
    assert run.items() == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert (stage.workload.command, stage.group_by) == ("echo {seed}", "seed")
    assert (stage.max_attempts, stage.timeout_s, stage.max_failures) == (2, 300.0, "5%")
    assert (stage.no_retry, stage.items_per_claim) == ("timeout", 2)
    run.add([{"seed": 9}])


def test_items_per_claim_sizes_the_units_also_of_items_that_are_added() -> None:
    words = ("--count", "7", "--command", "true", "--items-per-claim", "3", "--open")
    ended = call("init", "run", *words)

    run = Run.open("run")
    run.add([{"index": 7 + number} for number in range(4)])

    assert ended.stdout == "run\n"
    assert ended.stderr == "7 items in 3 units of 1 to 3; one claim takes a unit\n"
    run.view.poll()
    segments = run.view.stages["items"].log.segments.values()
    assert [[unit.count for unit in one.units] for one in segments] == [[3, 3, 1], [3, 1]]


def test_items_are_beside_the_file_and_options_and_grids_are_tables() -> None:
    Path("below").mkdir()
    Path("below/items.csv").write_text("n\n7\n")
    flaky = "hpc_toolkit.science.workloads.synthetic:Flaky"
    text = f'items = "items.csv"\nworkload = "{flaky}"\noptions = {{ seed = 3 }}\n'
    Path("below/b.toml").write_text(text)

    found = init("--config", "below/b.toml", "--option", "seed=4")
    Path("g.toml").write_text('command = "true"\ngrid = { a = ["x", 2], b = "0:4:2" }')
    grid = call("init", "grid", "--config", "g.toml")

    assert isinstance(found, Run), found
    assert found.items() == [{"n": 7}]
    assert found.manifest.stages[0].workload.options == {"seed": 4}
    assert grid.exit_code == 0
    assert Run.open("grid").items() == [{"a": a, "b": b} for a in ("x", 2) for b in (0, 2, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuont = 3", "b.toml: unknown key 'cuont'"),
        ("count = 0", "b.toml: count: 0 is not a whole number from 1"),
        ("count = true", "b.toml: count: True is not a whole number"),
        ("timeout = 3", "timeout"),
        ("grid = 3", "b.toml: grid: 3 is not a table such as"),
        ("grid = { a = [] }", "b.toml: grid.a: [] is not a list of values"),
        ("grid = { a = [[1]] }", "b.toml: grid.a: [[1]] is not a list of values"),
        ("count 3", "b.toml: not TOML"),
        (f"count = {'1' * 5000}", "b.toml: not TOML"),
        (f"x = {'[' * 3000}", "b.toml: not TOML"),
        ("count = 1\noptions = 3", "b.toml: options: 3 is not a table"),
        ("count = 1\nno_retry = 'timeout'", "no_retry = 'timeout' needs a timeout"),
        ("count = 1\nno_retry = 'oom'", "no_retry must be 'timeout' or names of exceptions, got"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text: str, message: str) -> None:
    Path("b.toml").write_text(f"{text}\n")

    error = init("--config", "b.toml", "--command", "true")

    assert isinstance(error, ConfigError), json.dumps(str(error))
    assert message in error.message
    assert not Path("run").exists()


SLEEP = "hpc_toolkit.science.workloads.synthetic:Sleep"
AS_TEXT = {"x": "3.10", "y": "1e5", "n": "9007199254740993.0"}
WRITTEN = '{"x": 3.10, "y": 1e5, "n": 9007199254740993.0}\n'


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (("--command", "echo {x}"), {}),
        (("--workload", SLEEP), {"x": 3.1, "y": 1e5, "n": 9007199254740992.0}),
        (("--workload", SLEEP, "--text", "x", "--text", "n"), {"y": 1e5}),
        (("--command", "echo {x}", "--number", "y"), {}),
    ],
)
def test_a_number_of_a_list_reaches_a_command_as_written(
    words: tuple[str, ...], numbers: dict[str, float]
) -> None:
    Path("l.jsonl").write_text(WRITTEN)
    Path("b.toml").write_text("grid = { x = [3.10], y = [1e5], n = [9007199254740993.0] }")

    for source in (("--items", "l.jsonl"), ("--config", "b.toml")):
        assert init(*source, *words).items() == [{**AS_TEXT, **numbers}]
        shutil.rmtree("run")


NOOP = 'workload = "hpc_toolkit.science.workloads.synthetic:Noop"'
TRAIN = f'[stages.train]\n{NOOP}\ngrid = {{ lr = [0.1], seed = "0:1" }}\n'
REFUSED = {
    "no stage": ("[stages]", "a run needs a stage"),
    "no table": ("stages = 3", "stages: 3 is not tables"),
    "beside": (f"open = true\n{TRAIN}", "'open' beside stages"),
    "unknown key": (f"{TRAIN}after2 = 'x'", "stages.train: unknown key 'after2'"),
    "unknown stage": (
        f"{TRAIN}[stages.b]\n{NOOP}\nafter = 'trained'",
        "stages.b.after: there is no",
    ),
    "itself": (f"[stages.a]\n{NOOP}\nafter = 'a'", "stages.a.after: a wait for each other"),
    "circle": (
        f"{TRAIN}[stages.a]\n{NOOP}\nafter = 'b'\n[stages.b]\n{NOOP}\nafter = 'a'",
        "stages.a.after: a, b wait for each other",
    ),
    "neither": (f"[stages.a]\n{NOOP}", "stages.a needs either items or the stages"),
    "both": (f"{TRAIN}[stages.b]\n{NOOP}\nafter = 'train'\ncount = 3", "stages.b needs either"),
    "by alone": (f"{TRAIN}by = ['lr']", "stages.train.by is for a stage that follows"),
    "two without by": (
        f"{TRAIN}[stages.b]\n{NOOP}\nafter='train'\n[stages.c]\n{NOOP}\nafter = ['train', 'b']",
        "stages.c follows train and b, so it needs 'by'",
    ),
    "by a key that is not there": (
        f"{TRAIN}[stages.b]\n{NOOP}\nafter = 'train'\nby = ['rl']",
        "stages.b: by: the items of 'train' have no key 'rl'",
    ),
    "a command's key": (
        f"{TRAIN}[stages.b]\ncommand = 'eval {{trained.path}}'\nafter = 'train'",
        "stages.b: its items have no key 'trained.path'",
    ),
    "a group's key": (
        f"{TRAIN}[stages.b]\n{NOOP}\nafter = 'train'\ngroup_by = 'size'",
        "stages.b: its items have no key 'size'",
    ),
    "a function's parameter": (
        f"{TRAIN}[stages.b]\nworkload = 'shutil:copy'\nafter = 'train'",
        "stages.b: item 0 has",
    ),
    "a key named as the stage": (
        f"[stages.lr]\n{NOOP}\ngrid = {{ lr = [1] }}\n[stages.b]\n{NOOP}\nafter = 'lr'",
        "stages.b: after 'lr': its items have a key of that name",
    ),
    "name": (f"['stages'.'a b']\n{NOOP}\ncount = 1", "'a b' is not a stage name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_stage_is_refused_with_its_place_and_leaves_nothing(
    case: str, tmp_path: Path
) -> None:
    text, message = REFUSED[case]
    file = tmp_path / "pipeline.toml"
    file.write_text(text)

    with pytest.raises(HpcToolkitError) as refused:
        Run.create(tmp_path / "run", stages=read_stages(file) or {})

    assert message in refused.value.message
    assert refused.value.hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"id": 1, "after": [2]}], "stages.a: item 0: it follows '2', and no item has this id"),
        ([{"id": 1}, {"id": 1}], "stages.a: item 1 is a duplicate"),
    ],
)
def test_a_wrong_item_of_a_stage_is_refused_with_a_hint_about_items(
    items: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ItemsError) as refused:
        Run.create(tmp_path / "run", stages={"a": {"items": items, "command": "true"}})

    assert refused.value.message.startswith(message)
    assert "rename" not in refused.value.hint


@pytest.mark.parametrize(
    ("item", "filled"),
    [
        ({"train": {"path": "a b"}}, b"eval 'a b' 1"),
        ({"train": {"path": {"x": 1}}}, b"""eval '{"x": 1}' 1"""),
        ({"train": {"path": "$(id)"}}, b"eval '$(id)' 1"),
    ],
)
def test_a_command_takes_a_part_of_a_result(item: dict[str, Any], filled: bytes) -> None:
    assert fill("eval {train.path} {n}", {**item, "n": 1}) == filled


@pytest.mark.parametrize("value", [None, [], 3, {"pth": 1}])
def test_a_part_that_is_not_there_fails_the_item(value: object) -> None:
    with pytest.raises(HpcToolkitError, match=r"no key 'train\.path'"):
        fill("eval {train.path}", {"train": value})


def test_run_json_has_the_stages_in_their_order(tmp_path: Path) -> None:
    first = {"items": [{"i": 1}], "command": "true {i}"}
    after = {"after": ("first",), "by": (), "command": "true"}
    made = Run.create(tmp_path / "run", stages={"last": after, "first": first})

    record = json.loads(made.paths.manifest.read_text())["stages"]
    assert [(one["name"], one.get("after"), one.get("by")) for one in record] == [
        ("first", None, None),
        ("last", ["first"], []),
    ]


@pytest.mark.parametrize("kept", [3, None, {"same": "x"}, {"results": [], "more": 1}])
def test_a_key_of_the_user_that_is_named_stored_stays(kept: object, tmp_path: Path) -> None:
    item = {"id": 1, "stored": kept}

    assert with_results(item, str(tmp_path / "run/journals/w.values")) == item
    assert with_results(item, None) == item
