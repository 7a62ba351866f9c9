"""Workloads: mistakes where one is named, files of checkpoints, Pythia's, and views of a text."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError, PermanentError, WorkloadError
from hpc_toolkit.queue.items import check_items
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import WorkloadSpec
from hpc_toolkit.science.workloads import checkpoints
from hpc_toolkit.science.workloads.checkpoints import (
    SETTINGS,
    checkpoint_files,
    prefetch_checkpoint,
    weight_names,
)
from hpc_toolkit.science.workloads.layer_metrics import augment
from hpc_toolkit.science.workloads.pythia import REVISIONS, parse_layers, parse_steps
from hpc_toolkit.worker.code import code_file
from hpc_toolkit.worker.loading import load_workload
from tests.unit import jobcommands

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"


def write(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


def index(directory: Path, name: str, *shards: object) -> None:
    named = {f"tensor{n}": shard for n, shard in enumerate(shards)}
    (directory / name).write_text(json.dumps({"weight_map": named}))


def test_what_a_trainer_leaves_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    loaded = ["config.json", "merges.txt", "model.safetensors", "spiece.model", "tokenizer.json"]
    left = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", PICKLED]
    others = ["consolidated.safetensors", "optimizer.safetensors", "events.log", ".config.json"]
    nested = ["onnx/model.onnx", "1_Pooling/config.json"]

    assert checkpoint_files(write(tmp_path, *loaded, *left, *others, *nested)) == loaded


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ([WHOLE, INDEX, PICKLED, PICKLED_INDEX], [WHOLE]),
        ([INDEX, PICKLED, PICKLED_INDEX], ["part.safetensors"]),
        ([PICKLED, PICKLED_INDEX], [PICKLED]),
        ([PICKLED_INDEX], ["part.bin"]),
        ([], [WHOLE]),
    ],
)
def test_of_several_weights_those_are_named_that_transformers_loads(
    tmp_path: Path, there: list[str], expected: list[str]
) -> None:
    write(tmp_path, *there)
    if INDEX in there:
        index(tmp_path, INDEX, "part.safetensors", "part.safetensors")
    if PICKLED_INDEX in there:
        index(tmp_path, PICKLED_INDEX, "part.bin")

    assert weight_names(tmp_path) == expected


def test_shards_are_part_of_a_checkpoint_wherever_the_index_says(tmp_path: Path) -> None:
    write(tmp_path, "config.json", "one.safetensors", "deep/two.safetensors", "three.safetensors")
    index(tmp_path, INDEX, "one.safetensors", "deep/two.safetensors")

    expected = ["config.json", "deep/two.safetensors", INDEX, "one.safetensors"]
    assert checkpoint_files(tmp_path) == expected


def test_index_that_leads_out_of_the_checkpoint_or_names_nothing_is_permanent(
    tmp_path: Path,
) -> None:
    shards = ("../secret", "/etc/passwd", "a/../../b", "", ".", 7, None)
    bad = [json.dumps({"weight_map": {"a": "one.safetensors", "b": shard}}) for shard in shards]

    for content in (*bad, "{}", '{"weight_map": []}', '{"weight_map": {}}'):
        (tmp_path / INDEX).write_text(content)
        with pytest.raises(PermanentError, match="does not name files of this checkpoint"):
            weight_names(tmp_path)


def test_every_file_that_a_tokenizer_of_transformers_reads_is_part_of_a_checkpoint() -> None:
    found = find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed")
    models = Path(found.origin).parent / "models"
    read = {
        name
        for module in models.glob("*/tokenization_*.py")
        for table in re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", module.read_text(), re.DOTALL)
        for name in re.findall(r": *\"([^\"]+)\"", table)
    }

    assert len(read) > 10
    assert not [n for n in read if not any(fnmatchcase(n, pattern) for pattern in SETTINGS)]


def test_files_of_a_checkpoint_are_read_to_their_end(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own readahead stops early in a large file."""
    directory = fast_dir / "step1"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(3 * 2**20 + 5))
    (directory / "optimizer.pt").write_bytes(bytes(1000))
    sizes: list[int] = []
    real = os.readv

    def readv(fd: int, buffers: Any) -> int:
        sizes.append(real(fd, buffers))
        return sizes[-1]

    monkeypatch.setattr(os, "readv", readv)

    prefetch_checkpoint(fast_dir, "step1")

    assert sum(sizes) == 2 + 3 * 2**20 + 5


@pytest.mark.parametrize("held", [False, True])
def test_a_fifo_in_the_place_of_a_file_is_passed_by(fast_dir: Path, held: bool) -> None:
    """To open one waits for who writes it, for ever; to read one for what is written."""
    path = fast_dir / "model.safetensors"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR) if held else None
    try:
        checkpoints._read_ahead(path)
    finally:
        if writer is not None:
            os.close(writer)


GRID = ("--sizes", "14m,70m,410m", "--steps", "0,1000:143000:1000")


call = partial(jobcommands.call, "items", "pythia")


def test_grid_of_three_sizes_is_exactly_5184_lines_that_a_run_takes() -> None:
    result = call(*GRID, "--layers", "blocks")

    lines = result.stdout.splitlines()
    items = [json.loads(line) for line in lines]
    assert (result.exit_code, result.stderr, len(lines)) == (0, "", 5184)
    check_items(items, group_by="checkpoint")
    assert len({item["checkpoint"] for item in items}) == 432
    assert items[0] == {"checkpoint": "EleutherAI/pythia-14m@step0", "layer": 1}
    assert items[-1] == {"checkpoint": "EleutherAI/pythia-410m@step143000", "layer": 24}


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("--layers", "all"), 144 * 39),
        (("--layers", "last"), 144 * 3),
        (("--layers", "0,2:6:2"), 144 * 3 * 4),
        ((), 5184),
    ],
)
def test_layers_are_those_of_each_size(arguments: tuple[str, ...], count: int) -> None:
    assert len(call(*GRID, *arguments).stdout.splitlines()) == count


def test_there_are_154_revisions() -> None:
    assert len(REVISIONS) == len(set(REVISIONS)) == 154
    assert REVISIONS[:13] == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000)
    assert REVISIONS[-1] == 143_000
    assert parse_steps("all") == list(REVISIONS)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("143000, 0,0", [0, 143_000]),
        ("1000:4000:1000", [1000, 2000, 3000, 4000]),
        ("1000:143000:50000", [1000, 51_000, 101_000]),
        ("128:2000", [128, 256, 512, 1000, 2000]),
        ("512:512", [512]),
        ("0:143000", list(REVISIONS)),
    ],
)
def test_steps_are_read_with_their_end_and_sorted(text: str, steps: list[int]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("0,1500", "'1500': there is no checkpoint at step 1500", "at step 1000"),
        ("0:1000:500", "'0:1000:500': .* at step 500", "at step 512"),
        ("0:3", "'0:3': .* at step 3", "at step 2"),
        ("144000", "step 144000", "at step 143000"),
        ("2000:1000:1000", "1000 is before 2000", "ascending"),
        ("0:1000:0", "the stride is 0", "FIRST"),
        ("main", "'main': not a number", "such as"),
        ("", "'': not a number", "such as"),
        ("-1", "'-1': -1 is negative", "count from 0"),
        ("1:2:3:4", "not a number", "such as"),
    ],
)
def test_steps_that_cannot_be_are_refused_with_the_nearest(
    text: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_steps(text)

    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7", "'7': pythia-14m has the layers 0 to 6"),
        ("0:99999999999", "'0:99999999999': pythia-14m has the layers 0 to 6"),
        ("block", "not a number, a range, blocks, all or last"),
        ("blocks,0", "not a number, a range"),
        ("1.5", r"'1\.5': not a number"),
    ],
)
def test_layers_that_a_size_does_not_have_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_layers(text, "14m")


_numbers = itertools.count()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of code in the current directory, whose module no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"written_{next(_numbers)}.py"
    yield path
    sys.modules.pop(path.stem, None)


def write_code(path: Path, name: str, value: int) -> None:
    """Code whose size tells its versions apart, as two of one second could not be."""
    path.write_text(f"# {'v' * value}\ndef {name}(item):\n    return {{'value': {value}}}\n")


def result(path: Path, name: str) -> dict[str, Any]:
    """What a workload gives for an item."""
    spec = WorkloadSpec(function=f"{path.stem}:{name}", path=(str(path.parent),))
    return next(load_workload(spec).run(None, iter([{}])))


def here(item: dict[str, Any]) -> dict[str, Any]:
    return item


@pytest.mark.parametrize(
    ("workload", "name"), [(here, "here"), ("__main__:here", "here"), (3, "NAME")]
)
def test_code_that_workers_cannot_import_is_refused(
    workload: Any, name: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkloadError, match="workers import code from files") as caught:
        Run.create(tmp_path / "run", [{}], workload=workload)

    hint = f"write the function to a file such as work.py, and name it: 'work:{name}'"
    assert caught.value.hint == hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "code",
    [
        "async def work(x): return 1",
        "def work(x): yield 1",
        "async def work(x): yield 1",
        "class work:\n    async def __call__(self, x): return 1",
        "class work:\n    def load(self, g): pass\n    async def run(self, c, items): yield 1",
    ],
)
def test_code_that_runs_after_its_call_returns_is_refused(
    source: Path, tmp_path: Path, code: str
) -> None:
    source.write_text(code)

    with pytest.raises(WorkloadError, match=r"work(\.run)? is async or has a yield"):
        Run.create(tmp_path / "run", [{"x": 1}], workload=f"{source.stem}:work")


@pytest.mark.parametrize(
    ("parameters", "items", "result"),
    [
        ("lr, depth", [{"lr": 1, "depth": 2}], {"lr": 1, "depth": 2}),
        ("seed, lr=0.1", [{"seed": 1}, {"seed": 2, "lr": 3}], {"seed": 1, "lr": 0.1}),
        ("lr, **rest", [{"lr": 1, "x": 2}], {"lr": 1, "rest": {"x": 2}}),
        ("*, lr", [{"lr": 1}], {"lr": 1}),
        ("**rest", [{"x": 2}], {"rest": {"x": 2}}),
        ("item", [{"item": 3}], {"item": 3}),
        ("", [{}], {}),
        ("item", [{"seed": 1}, {"lr": 5}], {"item": {"seed": 1}}),
        ("item=None", [{"seed": 1}], {"item": {"seed": 1}}),
        ("item, lr=0.1, *, steps=3", [{"lr": 1}], {"item": {"lr": 1}, "lr": 0.1, "steps": 3}),
        ("item, /", [{"seed": 1}], {"item": {"seed": 1}}),
        ("item, /", [{"item": 3}], {"item": {"item": 3}}),
        ("*args, **kwargs", [{"x": 2}], {"args": ({"x": 2},), "kwargs": {}}),
        ("lr, depth", [{"lr": 1}], "item 0 has no key 'depth', which M:run needs"),
        ("lr", [{"lr": 1, "x": 2}], "item 0 has the key 'x', which M:run does not take"),
        ("lr", [{"lr": 1}] * 300 + [{"sed": 1}], "item 300 has no key 'lr', which M:run needs"),
        ("", [{"x": 1}], "item 0 has the key 'x', which M:run does not take"),
        ("lr=0.1, steps=3", [{"seed": 1}, {"lr": 5}], "item 0 has the key 'seed', which M:run"),
        ("item", [{"x": n} for n in range(300)] + [{"item": 1}], "item 300 has the key 'item'"),
        ("a, b, /", [{"a": 1, "b": 2}], "item 0 cannot be given to M:run, which takes 'a' by"),
    ],
)
@pytest.mark.parametrize("kind", ["function", "class"])
def test_a_function_gets_the_keys_of_the_items_that_fit_it_or_the_item(
    source: Path, parameters: str, items: list[dict[str, Any]], result: Any, kind: str
) -> None:
    unique = [{**item, "lr": n} if item == {"lr": 1} else item for n, item in enumerate(items, 1)]
    text = f"def run({parameters}):\n    return locals()\n"
    if kind == "class":
        inside = f"({parameters})".replace("()", "(self)").replace("(", "(self, ", 1)
        inside = inside.replace("(self, self)", "(self)")
        text = f"class run:\n    def __call__{inside}:\n        self = locals().pop('self')\n"
        text += "        found = dict(locals())\n        found.pop('self')\n        return found\n"
    source.write_text(text)
    name = f"{source.stem}:run"

    if isinstance(result, str):
        with pytest.raises(WorkloadError) as caught:
            Run.create(source.parent / "run", unique, workload=name)
        assert result.replace("M:run", name) in caught.value.message
        assert caught.value.hint
        assert not (source.parent / "run").exists()
        return
    made = Run.create(source.parent / "run", unique, workload=name)
    work = Run.open(made.root).manifest.stages[0].workload
    assert next(load_workload(work).run(None, iter(unique[:1]))) == result


def test_a_file_that_was_written_again_is_read_again(source: Path) -> None:
    write_code(source, "first", 1)
    assert result(source, "first") == {"value": 1}

    write_code(source, "first", 2)
    assert result(source, "first") == {"value": 2}
    write_code(source, "second", 3)
    assert result(source, "second") == {"value": 3}
    with pytest.raises(WorkloadError, match="has no 'first'"):
        result(source, "first")
    source.write_text("def second(item: return\n")
    for _ in range(2):
        with pytest.raises(WorkloadError, match="cannot be imported: SyntaxError"):
            result(source, "second")


@pytest.mark.parametrize("inside", ["", "outer", "outer.inner", "outer.inner.third"])
def test_code_inside_packages_without_a_file_of_their_own_is_found_and_not_imported(
    tmp_path: Path, inside: str
) -> None:
    directory = tmp_path.joinpath(*inside.split("."))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "code.py").write_text("raise RuntimeError\n")
    named = f"{inside}.code:f".removeprefix(".")

    found = code_file(WorkloadSpec(function=named, path=(str(tmp_path),)))

    assert found == directory / "code.py"
    assert "outer" not in sys.modules


TEXT = (
    "The ministers agreed on Monday that the budget would be laid before parliament in March, "
    "and that no other tax was to rise in the year after it."
)


def test_a_view_is_the_same_on_every_machine_and_day() -> None:
    assert augment("the cat sat on the mat in the rain", 0) == "the cat sat on the mat ni the rain"


def test_one_word_in_ten_is_changed_and_all_else_stays() -> None:
    views = [augment(TEXT, view) for view in range(16)]

    assert len(set(views)) == 16
    for changed in views:
        assert 0.9 < SequenceMatcher(None, TEXT, changed, autojunk=False).ratio() < 1
        # What a word loses or gains is one letter or one space.
        assert abs(len(changed) - len(TEXT)) <= round(0.1 * len(TEXT.split()))


@given(st.text(), st.integers(0, 20))
def test_a_view_has_no_fewer_letters_than_its_text(text: str, view: int) -> None:
    changed = augment(text, view)

    assert len(changed) >= len(text)
    assert len(re.sub(r"\s", "", changed)) == len(re.sub(r"\s", "", text))
    assert (changed != text) == bool(re.search(r"\S\S", text))
