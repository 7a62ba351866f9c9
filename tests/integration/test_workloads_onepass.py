"""One pass over all layers against the same model cut off after each of its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_toolkit.science.workloads import onepass
from hpc_toolkit.science.workloads.checkpoints import LoadedModel
from hpc_toolkit.science.workloads.embeddings import pooled
from hpc_toolkit.science.workloads.onepass import (
    Anatomy,
    Batch,
    BatchSize,
    FinalNorm,
    anatomy,
    forward,
)
from tests.tinymodels import BLOCKS, TEXTS, WIDTH, alone, cut, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
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
