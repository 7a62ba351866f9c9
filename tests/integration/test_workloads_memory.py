"""What a pass over all layers keeps in memory, counted by tensor."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_toolkit.science.metrics import STANDARD
from hpc_toolkit.science.workloads.layer_metrics import MeasuredLayers, require_metrics
from hpc_toolkit.science.workloads.onepass import BatchSize, anatomy
from tests.tinymodels import tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
LiveBytes: Any = pytest.importorskip("tests.livebytes").LiveBytes
pytestmark = [pytest.mark.torch, pytest.mark.slow]

WIDTH, TOKENS, TEXTS = 32, 24, 4
STATES = 4 * TEXTS * TOKENS * WIDTH
"""Bytes of the states of one batch at one layer."""


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
