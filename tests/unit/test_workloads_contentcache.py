"""Embeddings kept by content: found again, never stale, and never in the way."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hpc_toolkit.science.workloads.checkpoints import LoadedModel
from hpc_toolkit.science.workloads.embeddings import SharedEmbeddings, digest_of_checkpoint
from hpc_toolkit.science.workloads.onepass import BatchSize

TEXTS = ["a story", "another", "a third"]
LAYERS, WIDTH = 3, 4
WIDTHS = (WIDTH,) * LAYERS


class Lengths(SharedEmbeddings):
    """Embeds a text by its length and the layer, and counts how often it had to."""

    def __init__(
        self, directory: Path | None = None, *, widths: Sequence[int] = WIDTHS, **identity: Any
    ) -> None:
        config = SimpleNamespace(hidden_size=WIDTH, num_hidden_layers=LAYERS - 1)
        loaded = SimpleNamespace(name="model", model=SimpleNamespace(config=config))
        super().__init__(
            cast("LoadedModel", loaded),
            max_tokens=8,
            size=BatchSize(1),
            directory=directory,
            identity=lambda: identity,
        )
        self.widths = widths
        self.asked: list[int] = []

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        self.asked.append(len(texts))
        lengths = np.array([len(text) for text in texts], dtype=np.float32).reshape(-1, 1)
        return [
            (lengths + 100 * layer).repeat(width, axis=1) for layer, width in enumerate(self.widths)
        ]


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_another_process_finds_every_layer_without_running_the_model(tmp_path: Path) -> None:
    written = Lengths(tmp_path, checkpoint="a").of(TEXTS, 1)

    second = Lengths(tmp_path, checkpoint="a")
    found = [second.of(TEXTS, layer) for layer in range(LAYERS)]

    assert second.asked == []
    assert np.array_equal(found[1], written)
    assert [rows[0, 0] for rows in found] == [7.0, 107.0, 207.0]
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize(
    ("texts", "identity"),
    [
        (TEXTS, {"checkpoint": "b", "max_tokens": 64}),
        (TEXTS, {"checkpoint": "a", "max_tokens": 32}),
        (TEXTS[::-1], {"checkpoint": "a", "max_tokens": 64}),
        (["a storyanother", "", "a third"], {"checkpoint": "a", "max_tokens": 64}),
        (TEXTS[:2], {"checkpoint": "a", "max_tokens": 64}),
    ],
)
def test_what_embeddings_depend_on_is_in_their_name(
    tmp_path: Path, texts: list[str], identity: dict[str, Any]
) -> None:
    Lengths(tmp_path, checkpoint="a", max_tokens=64).of(TEXTS, 0)
    model = Lengths(tmp_path, **identity)

    found = model.of(texts, 0)

    assert model.asked
    assert found[:, 0].tolist() == [len(text) for text in texts]
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_rows_that_other_tasks_get_as_well_cannot_be_written_to(tmp_path: Path, kept: bool) -> None:
    Lengths(tmp_path).of(TEXTS, 1)

    found = Lengths(tmp_path if kept else None).of(TEXTS, 1)

    with pytest.raises(ValueError, match="read-only"):
        found += 1


def npz(*layers: Any) -> bytes:
    content = io.BytesIO()
    np.savez(content, *layers)
    return content.getvalue()


@pytest.mark.parametrize(
    "damage", ["cut", "a bit", "empty", "text", "npy", "texts", "layers", "pickle"]
)
def test_damaged_file_is_told_of_and_written_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    Lengths(tmp_path).of(TEXTS, 0)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    rows, single = np.ones((3, WIDTH), dtype="f4"), io.BytesIO()
    np.save(single, rows)
    at = content.index(np.float32(107).tobytes())
    path.write_bytes(
        {
            "cut": content[:-5],
            "a bit": content[:at] + b"\1" + content[at + 1 :],
            "empty": b"",
            "text": b"{}",
            "npy": single.getvalue(),
            "texts": npz(*[rows[:2]] * LAYERS),
            "layers": npz(rows, rows),
            "pickle": npz(*[np.array([None])] * LAYERS),
        }[damage]
    )

    found = Lengths(tmp_path).of(TEXTS, 1)

    assert found[0, 0] == 107
    assert "is not used" in caplog.text
    caplog.clear()
    assert Lengths(tmp_path).of(TEXTS, 1).tolist() == found.tolist()
    assert not caplog.records


def test_checkpoints_with_other_bytes_or_names_have_other_digests(tmp_path: Path) -> None:
    def checkpoint(name: str, weights: bytes, file: str = "model.safetensors") -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"layers": 2}))
        (tmp_path / name / file).write_bytes(weights)
        (tmp_path / name / "optimizer.bin").write_text(name)
        return digest_of_checkpoint(tmp_path / name)

    first = checkpoint("a", b"weights")

    assert checkpoint("b", b"weights") == first
    assert checkpoint("c", b"weightz") != first
    assert checkpoint("d", b"weights", "pytorch_model.bin") != first
