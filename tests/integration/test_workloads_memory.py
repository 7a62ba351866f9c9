"""What a pass over all layers keeps in memory, counted by tensor."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from hpc_toolkit.science.metrics import STANDARD
from hpc_toolkit.science.workloads.layer_metrics import MeasuredLayers, require_metrics
from hpc_toolkit.science.workloads.onepass import BatchSize, anatomy
from tests.tinymodels import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - only where torch is
from torch.utils._pytree import tree_leaves  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WIDTH, TOKENS, TEXTS = 32, 24, 4
STATES = 4 * TEXTS * TOKENS * WIDTH
"""Bytes of the states of one batch at one layer."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations create inside the block, on any device.

    Memory that an operation allocates and frees internally is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.peak: int = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        returned = function(*args, **(kwargs or {}))
        taken = {
            _storage(one)._cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        for one in tree_leaves(returned):
            if isinstance(one, torch.Tensor):
                storage = _storage(one)
                if storage._cdata not in self._seen | taken:
                    self._add(storage)
        return returned

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _storage(one: Any) -> Any:
    return one.untyped_storage()


def passing(blocks: int, prompts: int, *, tokens: int | None = None) -> tuple[int, int]:
    """Bytes of tensors that live at most during a pass, and that its result keeps."""
    loaded = tiny("gpt_neox", blocks, hidden_size=WIDTH, intermediate_size=4 * WIDTH)
    anatomy(loaded.model)
    ids = [[(row * place + row // 50) % 50 for place in range(TOKENS)] for row in range(prompts)]
    assert len(set(map(tuple, ids))) == prompts
    size = BatchSize(TEXTS if tokens is None else 10**6, tokens)
    with LiveBytes() as live:
        measured = MeasuredLayers(loaded, ids, require_metrics(STANDARD), size=size)
    assert measured.layers == blocks + 1
    return live.peak, live.now


@pytest.fixture(scope="module")
def alone() -> int:
    """Bytes that the model itself needs for one batch."""
    loaded = tiny("gpt_neox", 3, hidden_size=WIDTH, intermediate_size=4 * WIDTH)
    ids = torch.ones(TEXTS, TOKENS, dtype=torch.long)
    with LiveBytes() as live, torch.inference_mode():
        loaded.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
    peak: int = live.peak
    return peak


@pytest.mark.parametrize(("blocks", "prompts"), [(3, 8), (12, 8), (3, 64)])
def test_a_pass_needs_what_the_model_needs_and_a_row_a_prompt_and_layer(
    alone: int, blocks: int, prompts: int
) -> None:
    peak, left = passing(blocks, prompts)

    rows = 8 * WIDTH * (blocks + 1) * prompts
    assert rows <= left <= 1.5 * rows
    assert peak - left <= alone + STATES


def test_the_tokens_of_a_batch_bound_the_memory_not_its_texts(alone: int) -> None:
    peak, left = passing(3, 64, tokens=TEXTS * TOKENS)

    assert peak - left <= alone + STATES
