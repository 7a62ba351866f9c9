"""Checkpoints: the files that belong to one, and Pythia's that 'hpctk items pythia' prints."""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError, PermanentError
from hpc_toolkit.queue.items import check_items
from hpc_toolkit.science.workloads import checkpoints
from hpc_toolkit.science.workloads.checkpoints import (
    SETTINGS,
    checkpoint_files,
    prefetch_checkpoint,
    weight_names,
)
from hpc_toolkit.science.workloads.pythia import REVISIONS, parse_layers, parse_steps
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
