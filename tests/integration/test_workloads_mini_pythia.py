"""The demo's training: deterministic, resumable, and what it lists is what it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples import mini_pythia
from hpc_toolkit.errors import PermanentError

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]


def train(root: Path, **options: Any) -> dict[str, Any]:
    item = {"size": "mini-s", "root": str(root), "steps": [0, 1, 3], "texts": 60, **options}
    return mini_pythia.train(item)


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("once")
    value = train(root)
    assert value["trained"]
    assert value["loss"] < value["first_loss"]
    json.dumps(value, allow_nan=False)
    return root


def test_training_again_elsewhere_gives_the_same_bytes(once: Path, tmp_path: Path) -> None:
    train(tmp_path)

    assert contents(tmp_path) == contents(once)


def test_training_cut_off_goes_on_to_the_same_bytes(once: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(once / "mini-s/step0", tmp_path / "mini-s/step0")
    (tmp_path / "mini-s/.step1.0badc0de").mkdir()
    (tmp_path / "mini-s/step3").mkdir()  # without its last file: not whole

    train(tmp_path)

    assert contents(tmp_path) == contents(once)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "mini-x"}, "no size 'mini-x'"),
        ({"steps": []}, r"steps must increase from 0, got \[\]"),
        ({"steps": [0, 4, 2]}, "steps must increase"),
        ({"steps": [1, 2]}, "steps must increase"),
    ],
)
def test_training_of_what_makes_no_sense_is_permanent(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PermanentError, match=message):
        train(tmp_path, **options)


def test_prompts_are_sentences_that_are_not_trained_on(tmp_path: Path) -> None:
    from hpc_toolkit.science.workloads.text_tasks import training_stories

    prompts = mini_pythia.write_prompts(tmp_path / "data/prompts.txt")

    stories = " ".join(" ".join(training_stories()).split())
    assert (tmp_path / "data/prompts.txt").read_text().splitlines() == prompts
    assert len(prompts) == len(set(prompts)) == mini_pythia.PROMPTS
    assert not [prompt for prompt in prompts if prompt in stories]
