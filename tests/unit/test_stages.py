"""Files with stages: what is refused, and where the message says it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import Run
from hpc_toolkit.cli.lists import read_stages
from hpc_toolkit.errors import HpcToolkitError, ItemsError
from hpc_toolkit.rundir.valuefiles import with_results
from hpc_toolkit.worker.command import fill

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
