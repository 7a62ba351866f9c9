"""One pass over all layers: the states, what it keeps in memory, and the longest text."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.science.metrics import STANDARD
from hpc_toolkit.science.workloads import onepass
from hpc_toolkit.science.workloads.checkpoints import LoadedModel, require_positions
from hpc_toolkit.science.workloads.embeddings import pooled
from hpc_toolkit.science.workloads.layer_metrics import MeasuredLayers, require_metrics
from hpc_toolkit.science.workloads.onepass import (
    Anatomy,
    Batch,
    BatchSize,
    FinalNorm,
    anatomy,
    forward,
    tokenize,
)
from tests.tinymodels import BLOCKS, TEXTS, WIDTH, alone, cut, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - only where torch is
from torch.utils._pytree import tree_leaves  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NORMED = ["gpt_neox", "gpt2", "llama", "opt"]
WITHIN = ["bert", "distilbert"]


@pytest.fixture(scope="module", params=[*NORMED, *WITHIN])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny(request.param)


def passed(
    loaded: LoadedModel, final_norm: FinalNorm = "raw", size: BatchSize | None = None
) -> list[list[Any]]:
    """States of each layer, text by text, without padding."""
    layers: list[list[Any]] = [[None] * len(TEXTS) for _ in range(BLOCKS + 1)]

    def take(layer: int, states: Any, batch: Batch) -> None:
        for at, row in enumerate(batch.rows):
            assert layers[layer][row] is None
            layers[layer][row] = states[at, : batch.lengths[at]].clone()

    forward(loaded, TEXTS, take, size=size or BatchSize(3), final_norm=final_norm)
    return layers


def test_texts_of_the_same_tokens_have_the_same_row_to_the_last_bit(loaded: LoadedModel) -> None:
    texts = [[(7 * row + place) % 50 for place in range(3 + row % 9)] for row in range(40)]
    again = [*texts, *texts[:30], texts[0]]

    layers = pooled(loaded, again, size=BatchSize(7))

    once = pooled(loaded, texts, size=BatchSize(7))
    for rows, expected in zip(layers, once, strict=True):
        assert rows.shape == (71, WIDTH)
        assert rows[:40].tolist() == expected.tolist()
        assert rows[40:].tolist() == [*expected[:30].tolist(), expected[0].tolist()]


def largest(a: list[Any], b: list[Any]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_each_layer_as_the_paper_takes_it_is_what_the_model_cut_off_there_returns(
    loaded: LoadedModel,
) -> None:
    layers = passed(loaded, "paper")

    for layer, states in enumerate(layers):
        shorter = cut(loaded, layer)
        assert largest(states, [alone(shorter, ids) for ids in TEXTS]) <= 5e-6


def test_raw_layers_of_a_batch_are_the_models_own_to_the_last_digit(loaded: LoadedModel) -> None:
    same = [TEXTS[2], TEXTS[2][::-1]]
    handed: list[Any] = []

    forward(loaded, same, lambda _, states, __: handed.append(states.clone()), size=BatchSize(2))

    with torch.inference_mode():
        output = loaded.model(
            input_ids=torch.tensor(same),
            attention_mask=torch.ones(2, len(same[0])),
            output_hidden_states=True,
        )
    assert all(map(torch.equal, handed, output.hidden_states))


def test_the_two_conventions_differ_below_the_last_layer_of_a_model_that_norms_at_its_end(
    loaded: LoadedModel,
) -> None:
    raw, paper = passed(loaded), passed(loaded, "paper")
    differences = [largest(a, b) for a, b in zip(raw, paper, strict=True)]

    assert differences[-1] == 0
    if loaded.name in NORMED:
        assert min(differences[:-1]) > 1e-2
    else:
        assert differences == [0] * (BLOCKS + 1)


@pytest.mark.parametrize("found", [True, False])
def test_the_last_layer_is_behind_a_final_norm_that_the_model_leaves_out_of_its_hidden_states(
    monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    loaded = tiny("clip_text_model")
    if not found:
        monkeypatch.setattr(onepass, "anatomy", lambda _: Anatomy((), None))

    layers = passed(loaded)

    assert largest(layers[-1], [alone(loaded, ids) for ids in TEXTS]) <= 5e-6
    for row, ids in enumerate(TEXTS):
        with torch.inference_mode():
            states = loaded.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        below = [layer[row] for layer in layers[:-1]]
        assert largest(below, [each[0] for each in states[:-1]]) <= 5e-6
        assert largest([layers[-1][row]], [states[-1][0]]) > 0.1


def test_blocks_and_what_follows_them_are_found(loaded: LoadedModel) -> None:
    found = anatomy(loaded.model)

    assert len(found.blocks) == BLOCKS
    assert found.tail is not None
    assert len(found.tail) == (loaded.name in NORMED)
    assert anatomy(loaded.model) is found


def test_a_block_whose_output_is_written_over_later_is_not_taken_for_a_layer() -> None:
    loaded = tiny("llama")

    def write_over(_: Any, args: Any, kwargs: Any) -> None:
        (args[0] if args else kwargs["hidden_states"]).mul_(2)

    loaded.model.layers[2].register_forward_pre_hook(write_over, with_kwargs=True)

    assert anatomy(loaded.model).blocks == ()


def test_nothing_stays_hooked_to_a_model_also_when_its_pass_fails() -> None:
    loaded = tiny("gpt_neox")

    def refuse(layer: int, states: Any, batch: Batch) -> None:
        if layer == 2:
            raise MemoryError

    anatomy(loaded.model)  # transformers puts hooks of its own where hidden states are asked for
    before = hooks(loaded)
    with pytest.raises(MemoryError):
        forward(loaded, TEXTS, refuse, size=BatchSize(2))

    assert hooks(loaded) == before


def hooks(loaded: LoadedModel) -> list[Any]:
    return [
        list(hook)
        for m in loaded.model.modules()
        for hook in (m._forward_hooks, m._forward_pre_hooks)
    ]


def test_batches_hold_at_most_so_many_tokens_with_their_padding() -> None:
    lengths = [4, 1, 9, 2, 2, 3]

    assert list(BatchSize(2).cut(lengths)) == [[1, 3], [4, 5], [0, 2]]
    assert list(BatchSize(9, 6).cut(lengths)) == [[1, 3, 4], [5], [0], [2]]
    assert list(BatchSize(9).cut([])) == []


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


HIDDEN, TOKENS, ROWS = 32, 24, 4
STATES = 4 * ROWS * TOKENS * HIDDEN
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
            one.untyped_storage()._cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }
        for one in tree_leaves(returned):
            if isinstance(one, torch.Tensor):
                storage: Any = one.untyped_storage()
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


def passing(blocks: int, prompts: int, tokens: int | None) -> tuple[int, int]:
    """Bytes of tensors that live at most during a pass, and that its result keeps."""
    loaded = tiny("gpt_neox", blocks, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN)
    anatomy(loaded.model)
    ids = [[(row * place + row // 50) % 50 for place in range(TOKENS)] for row in range(prompts)]
    assert len(set(map(tuple, ids))) == prompts
    size = BatchSize(ROWS if tokens is None else 10**6, tokens)
    with LiveBytes() as live:
        measured = MeasuredLayers(loaded, ids, require_metrics(STANDARD), size=size)
    assert measured.layers == blocks + 1
    return live.peak, live.now


@pytest.fixture(scope="module")
def least() -> int:
    """Bytes that the model itself needs for one batch."""
    loaded = tiny("gpt_neox", 3, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN)
    ids = torch.ones(ROWS, TOKENS, dtype=torch.long)
    with LiveBytes() as live, torch.inference_mode():
        loaded.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
    peak: int = live.peak
    return peak


@pytest.mark.parametrize(
    ("blocks", "prompts", "tokens"),
    [(3, 8, None), (12, 8, None), (3, 64, None), (3, 64, ROWS * TOKENS)],
)
def test_a_pass_needs_what_the_model_needs_and_a_row_a_prompt_and_layer(
    least: int, blocks: int, prompts: int, tokens: int | None
) -> None:
    peak, left = passing(blocks, prompts, tokens)

    rows = 8 * HIDDEN * (blocks + 1) * prompts
    assert rows <= left <= 1.5 * rows
    assert peak - left <= least + STATES
