"""The files of a checkpoint that loading reads, and that are in memory before it does."""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.science.workloads import checkpoints
from hpc_toolkit.science.workloads.checkpoints import (
    SETTINGS,
    checkpoint_files,
    prefetch_checkpoint,
    weight_names,
)

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
