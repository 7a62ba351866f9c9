"""Checkpoints that load, and every way in which one cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.science.workloads.checkpoints import load_checkpoint, pick_device

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

NAME = "mini-s/step0"


@pytest.fixture
def root(root: str, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(f"{root}/{NAME}", tmp_path / NAME)
    return tmp_path


def test_checkpoint_loads_whole_in_float32_without_its_head(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_checkpoint(root, NAME)

    assert type(loaded.model).__name__ == "GPTNeoXModel"
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert loaded.name == NAME
    assert capfd.readouterr() == ("", "")


def cut_to(keep: float) -> Callable[[Path], object]:
    """Keep so many bytes of the weights, or that part of them."""

    def cut(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])

    return cut


def in_shards(directory: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def longer(directory: Path) -> None:
    with (directory / "model.safetensors").open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / "config.json").unlink(), "config.json"),
        (lambda at: (at / "config.json").write_text("{"), r"config\.json: not JSON"),
        (lambda at: (at / "config.json").write_text("[]"), r"config\.json: holds list"),
        (lambda at: (at / "tokenizer.json").unlink(), "cannot be loaded"),
        (lambda at: (at / "model.safetensors").unlink(), "model.safetensors"),
        *((cut_to(keep), r"model\.safetensors") for keep in (0, 5, 0.5, -1)),
        (longer, "its header says"),
        (in_shards, r"model-2\.safetensors: weights are missing"),
    ],
)
def test_checkpoint_that_is_not_complete_is_permanent_and_names_the_file(
    root: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(root / NAME)

    with pytest.raises(PermanentError, match=message) as caught:
        load_checkpoint(root, NAME)

    assert message != r"model\.safetensors" or "incomplete" in caught.value.hint


def test_weights_that_lack_a_tensor_are_not_filled_with_random_numbers(root: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = root / NAME / "model.safetensors"
    tensors = load_file(path)
    del tensors["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(tensors, path, metadata={"format": "pt"})

    with pytest.raises(PermanentError, match=r"lack 1 tensor.*layers\.1\.mlp\.dense_h_to_4h"):
        load_checkpoint(root, NAME)


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., str]) -> list[dict[str, Any]]:
    import huggingface_hub

    calls = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return answer()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_hub_checkpoint_is_asked_for_by_name_and_revision(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_hub(monkeypatch, lambda: str(root / NAME))

    loaded = load_checkpoint("elsewhere", "EleutherAI/pythia-14m@step1000")

    assert [(c["name"], c["revision"]) for c in calls] == [("EleutherAI/pythia-14m", "step1000")]
    assert loaded.name == "EleutherAI/pythia-14m@step1000"


@pytest.mark.parametrize("kind", ["RepositoryNotFoundError", "RevisionNotFoundError"])
def test_hub_revision_that_does_not_exist_is_permanent(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from huggingface_hub import errors

    def answer() -> str:
        error = getattr(errors, kind)
        instance = error.__new__(error)  # its constructor wants a response of the server
        instance.args = ("injected",)
        raise instance

    fake_hub(monkeypatch, answer)

    with pytest.raises(PermanentError, match="org/name@nope: the hub has no such revision"):
        load_checkpoint(".", "org/name@nope")


@pytest.mark.parametrize(
    ("count", "environment", "expected"),
    [
        (0, {}, "cpu"),
        (4, {"SLURM_LOCALID": "3"}, "cuda:3"),
        (4, {"SLURM_LOCALID": "6"}, "cuda:2"),
        (4, {"SLURM_LOCALID": "3", "LOCAL_RANK": "1"}, "cuda:1"),
        (4, {"SLURM_LOCALID": "3", "HPCTK_LOCAL_RANK": "2"}, "cuda:2"),
        (4, {}, "cuda:0"),
    ],
)
def test_device_is_the_local_ranks(
    monkeypatch: pytest.MonkeyPatch, count: int, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name in ("SLURM_LOCALID", "LOCAL_RANK", "HPCTK_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert str(pick_device()) == expected
