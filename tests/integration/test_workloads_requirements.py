"""The longest text that a model takes, told before one is too long for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.science.workloads.checkpoints import LoadedModel, require_positions
from hpc_toolkit.science.workloads.onepass import tokenize
from tests.tinymodels import alone, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

POSITIONS = 12


def model(kind: str) -> LoadedModel:
    if kind == "roberta":  # it counts from behind its padding, so two positions are never used
        from transformers import RobertaConfig, RobertaModel

        sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
        config = RobertaConfig(
            vocab_size=60, num_hidden_layers=1, max_position_embeddings=POSITIONS + 2, **sizes
        )
        return LoadedModel(RobertaModel(config).eval(), None, torch.device("cpu"), kind)
    name = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    return tiny(kind, **{name: POSITIONS})


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "opt", "roberta"])
def test_model_is_refused_from_the_first_length_on_that_it_cannot_take(kind: str) -> None:
    loaded = model(kind)

    require_positions(loaded, POSITIONS)
    assert alone(loaded, [5] * POSITIONS).isfinite().all()

    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|must match"):
        alone(loaded, [5] * (POSITIONS + 1))
    with pytest.raises(
        PermanentError, match="it takes 12 tokens, and the longest text has 13"
    ) as caught:
        require_positions(loaded, POSITIONS + 1)
    assert "set max_tokens to 12 or less" in caught.value.hint


def test_model_with_rotary_positions_is_not_taken_beyond_those_it_knows() -> None:
    with pytest.raises(PermanentError, match="gpt_neox: it takes 12 tokens"):
        require_positions(model("gpt_neox"), 13)


def test_text_that_is_too_long_for_the_model_is_refused_before_the_pass() -> None:
    def words(texts: list[str], *, max_length: int, **_: Any) -> dict[str, Any]:
        return {"input_ids": [[7] * min(max_length, len(text.split())) for text in texts]}

    loaded = replace(model("bert"), tokenizer=words)
    texts = ["one", "word " * 20]

    assert [len(ids) for ids in tokenize(loaded, texts[:1], 64)] == [1]
    assert [len(ids) for ids in tokenize(loaded, texts, 12)] == [1, 12]
    with pytest.raises(PermanentError, match="bert: it takes 12 tokens, and the longest"):
        tokenize(loaded, texts, 64)
