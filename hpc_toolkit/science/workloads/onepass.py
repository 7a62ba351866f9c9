"""Get all layers of a model from one forward pass, each layer's states as soon as they are made.

The layers are located by running the model on a few tokens, not by its name: a model's blocks and
the modules after the last block count as found only if their outputs equal the hidden states that
transformers returns, number for number.

Memory: beyond the weights, a forward pass needs the model's own memory for one batch, and the
hidden states of one layer; the states of all ``L + 1`` layers never exist together. `BatchSize`
limits the memory, which grows neither with the number of layers nor with the number of texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

from hpc_toolkit.errors import ConfigError, PermanentError
from hpc_toolkit.science.workloads.checkpoints import (
    LoadedModel,
    load_checkpoint,
    prefetch_checkpoint,
    require_positions,
    require_positive,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


PROBE_TOKENS = 4
"""Number of tokens of the run that examines a model."""


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """The parts of a model that a forward pass over all layers must know."""

    blocks: tuple[Module, ...]
    """The blocks in order: the first takes layer 0, and their outputs are layers 1 to L, with layer
    L before `tail`. Empty if they were not found; the model must then return all hidden states,
    which keeps all of them in memory at once."""
    tail: tuple[Module, ...] | None
    """The modules that turn the last block's output into the last hidden state: mostly one norm;
    empty for models that norm inside their blocks. None if they were not found."""


_known: WeakKeyDictionary[Module, Anatomy] = WeakKeyDictionary()


def anatomy(model: Module) -> Anatomy:
    """Return the layers of ``model``, found once per model by one run on `PROBE_TOKENS`.

    This works for any encoder or decoder of transformers that returns ``hidden_states`` of shape
    ``(b, t, d)`` and has its blocks in one list, each called once; in others no blocks are found.
    """
    if model not in _known:
        _known[model] = _examine(model)
    return _known[model]


def through(tail: Sequence[Module], states: Tensor) -> Tensor:
    """Apply the modules of a tail to ``states``, one after another."""
    for module in tail:
        states = module(states)
    return states


def output_of(returned: Any) -> Any:
    """Return the states in a block's return value: some blocks return them first in a tuple."""
    return returned[0] if isinstance(returned, tuple) else returned


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the states in a block's arguments."""
    return args[0] if args else kwargs.get("hidden_states")


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a module during the probe."""

    module: Module
    entered: Any
    left: Any
    seen: Any
    """A copy of ``left``: a later operation may write into ``left`` itself."""


def _examine(model: Module) -> Anatomy:
    import torch

    ids = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device)
    ids = ids.clamp_max(int(model.config.vocab_size) - 1).unsqueeze(0)  # type: ignore[union-attr, arg-type]
    mask = torch.ones_like(ids)
    calls: list[_Call] = []

    def record(module: Module, args: Any, kwargs: Any, returned: Any) -> None:
        left = output_of(returned)
        seen = left.clone() if isinstance(left, torch.Tensor) else None
        calls.append(_Call(module, input_of(args, kwargs), left, seen))

    with ExitStack() as hooks, torch.inference_mode():
        for module in model.modules():
            if module is not model:
                hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        output = model(
            input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
        )
    blocks = _blocks(model, calls, output.hidden_states)
    if not blocks:
        return Anatomy((), None)
    return Anatomy(blocks, _probed_tail(calls, blocks[-1], output.last_hidden_state))


def _blocks(model: Module, calls: list[_Call], states: Sequence[Tensor]) -> tuple[Module, ...]:
    from torch.nn import ModuleList

    for found in model.modules():
        if isinstance(found, ModuleList) and len(found) == len(states) - 1:
            blocks = tuple(found)
            made = [call for call in calls if call.module in blocks]
            if (
                [call.module for call in made] == list(blocks)
                and _same(made[0].entered, states[0])
                and all(_same(a.seen, b) for a, b in zip(made[:-1], states[1:-1], strict=True))
            ):
                return blocks
    return ()


def _probed_tail(calls: list[_Call], last: Module, wanted: Tensor) -> tuple[Module, ...] | None:
    """Follow the last block's output through the modules until it equals the last hidden state."""
    at = next(index for index, call in enumerate(calls) if call.module is last)
    states, tail = calls[at].left, []
    for call in calls[at + 1 :]:
        if _same(states, wanted):
            break
        if call.entered is states:
            states = call.left
            tail.append(call.module)
    return tuple(tail) if _same(states, wanted) else None


def _same(a: Any, b: Tensor) -> bool:
    """Return whether two tensors are equal number for number, with NaN equal to NaN."""
    import torch

    alike = isinstance(a, torch.Tensor) and a.shape == b.shape
    return alike and bool(((a == b) | (a.isnan() & b.isnan())).all())


FinalNorm = Literal["raw", "paper"]
"""Whether layers below the last are taken as they are (``raw``), or after the model's final norm
(``paper``), as returned by a model cut off after that layer. The last layer is always after it."""

Consume = Callable[[int, "Tensor", "Batch"], None]
"""Called with a layer, its float32 states ``(b, t, d)``, and the batch of texts."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A few texts of similar length that went through the model together."""

    rows: list[int]
    """Positions of the texts in the given list, longest texts last."""
    lengths: Tensor
    """Number of tokens of each text ``(b,)``; states beyond are padding."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How many texts go through a model together."""

    texts: int
    """The most texts in a batch."""
    tokens: int | None = None
    """The most tokens in a batch, padding included; a longer text goes alone. None: no limit."""

    def halved(self) -> BatchSize | None:
        """Return half of both; None if a batch holds only one text already."""
        if self.texts == 1:
            return None
        tokens = None if self.tokens is None else max(1, self.tokens // 2)
        return BatchSize(self.texts // 2, tokens)

    def cut(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the positions of texts of ``lengths`` tokens, shortest first, batch by batch."""
        rows: list[int] = []
        for row in sorted(range(len(lengths)), key=lengths.__getitem__):
            full = len(rows) == self.texts
            if rows and (full or (len(rows) + 1) * lengths[row] > (self.tokens or math.inf)):
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows


class OfCheckpoints:
    """Base class of workloads that run the model of a checkpoint over texts."""

    def __init__(
        self,
        *,
        root: str = ".",
        max_tokens: int = 64,
        batch_size: int = 32,
        max_batch_tokens: int | None = None,
        final_norm: FinalNorm = "raw",
    ) -> None:
        """Options of the workload.

        Args:
            root: the directory that contains the checkpoints.
            max_tokens: longer texts are cut.
            batch_size: the most texts that go through a model together.
            max_batch_tokens: the most tokens that go through it together, padding included.
            final_norm: how layers before the last are taken: see `FinalNorm`.

        Raises ConfigError: an option is invalid.
        """
        self._root = root
        self._max_tokens = require_positive("max_tokens", max_tokens)
        if max_batch_tokens is not None:
            require_positive("max_batch_tokens", max_batch_tokens)
        self._size = BatchSize(require_positive("batch_size", batch_size), max_batch_tokens)
        if final_norm not in get_args(FinalNorm):
            msg = f"final_norm: {final_norm!r} is neither raw nor paper"
            raise ConfigError(msg, hint="paper: every layer behind the model's final norm")
        self._final_norm = final_norm
        self.loads = 0
        """Models loaded so far."""

    def prefetch(self, group: str) -> None:
        """Prefetch the files of a checkpoint; see `prefetch_checkpoint`."""
        prefetch_checkpoint(self._root, group)

    def load_model(self, group: str) -> LoadedModel:
        """Load the model of a checkpoint. Raises PermanentError if it cannot be used."""
        loaded = load_checkpoint(self._root, group)
        self.loads += 1
        if getattr(loaded.model.config, "is_encoder_decoder", False):
            kind = f"{type(loaded.model).__name__} is an encoder with a decoder"
            msg = f"{loaded.name}: {kind}, so 'layer 3' could be of either"
            raise PermanentError(msg, hint="use a model that is one of the two")
        return loaded

    def halve(self) -> bool:
        """Halve the batches of later checkpoints; return False if they hold one text already."""
        import torch

        smaller = self._size.halved()
        self._size = smaller or self._size
        torch.cuda.empty_cache()  # does nothing if CUDA was not used
        return smaller is not None


def distinct(ids: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the different token ids in order of occurrence, and for each text its position there.

    Repeated texts would go through the model in batches of different widths and differ in their
    last bits, so that rows that should be equal would not be.
    """
    found = {key: at for at, key in enumerate(dict.fromkeys(map(tuple, ids)))}
    return [list(key) for key in found], [found[tuple(tokens)] for tokens in ids]


def layer_count(loaded: LoadedModel) -> int:
    """Return the number of hidden states: the blocks and the embeddings (layer 0)."""
    return int(loaded.model.config.num_hidden_layers) + 1


def tokenize(loaded: LoadedModel, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Return the token ids of each text, cut to ``max_tokens``.

    Raises PermanentError: a text has no tokens, or more tokens than the model takes.
    """
    encoded = loaded.tokenizer(list(texts), truncation=True, max_length=max_tokens)
    ids: list[list[int]] = encoded["input_ids"]
    for row, tokens in enumerate(ids):
        if not tokens:
            msg = f"{loaded.name}: text {row + 1} has no tokens: {texts[row][:40]!r}"
            raise PermanentError(msg)
    require_positions(loaded, max(map(len, ids), default=0))
    return ids


def forward(
    loaded: LoadedModel,
    ids: Sequence[list[int]],
    consume: Consume,
    *,
    size: BatchSize,
    final_norm: FinalNorm = "raw",
) -> None:
    """Run the model once over all texts, and pass each layer's states to ``consume``.

    ``consume`` is called while the model runs, for layer 0 (the embeddings) to layer L (the last
    hidden state, after any final norm). It must not write into the states. If it keeps none of
    them, the states of only one layer are in memory at a time, for any number of layers and texts.

    Batches hold texts of similar length. Padding is on the right, where a causal model cannot see
    it and where it does not change the positions of the text. Batches depend only on the texts, so
    two forward passes give the same numbers. Raises PermanentError: token ids beyond the
    vocabulary, hidden states that are not finite, or a final norm that was not found.
    """
    import torch

    _require_vocabulary(loaded, ids)
    found = anatomy(loaded.model)
    tail = _tail(loaded, found, final_norm)
    for rows in size.cut([len(tokens) for tokens in ids]):
        lengths = torch.tensor([len(ids[row]) for row in rows])
        width = int(lengths.max())
        padded = torch.tensor([ids[row] + [0] * (width - len(ids[row])) for row in rows])
        mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
        batch = Batch(rows, lengths.to(loaded.device))

        def hand_on(layer: int, states: Tensor, batch: Batch = batch) -> None:
            if not bool(states.isfinite().all()):
                msg = f"{loaded.name}: hidden states of layer {layer} hold NaN or infinite values"
                raise PermanentError(msg, hint="the weights are damaged, or training diverged")
            consume(layer, states, batch)

        with torch.inference_mode():
            _run(loaded, found, tail, padded, mask, hand_on)


def _run(
    loaded: LoadedModel,
    found: Anatomy,
    tail: Sequence[Module],
    padded: Tensor,
    mask: Tensor,
    hand_on: Callable[[int, Tensor], None],
) -> None:
    inputs = {
        "input_ids": padded.to(loaded.device),
        "attention_mask": mask.to(loaded.device),
        "use_cache": False,
    }
    if not found.blocks:
        output = loaded.model(**inputs, output_hidden_states=True)
        # In some models, the last of the hidden states lacks the final norm.
        for layer, states in enumerate((*output.hidden_states[:-1], output.last_hidden_state)):
            hand_on(layer, states)
        return

    def enter(_: Module, args: Any, kwargs: Any) -> None:
        hand_on(0, through(tail, input_of(args, kwargs)))

    def leave(layer: int, _: Module, __: Any, returned: Any) -> None:
        hand_on(layer, through(tail, output_of(returned)))

    with ExitStack() as hooks:
        first = found.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
        hooks.callback(first.remove)
        # No hook on the last block: the model itself returns its output after the final norm.
        for layer, block in enumerate(found.blocks[:-1], start=1):
            hooks.callback(block.register_forward_hook(partial(leave, layer)).remove)
        last = loaded.model(**inputs).last_hidden_state
    hand_on(len(found.blocks), last)


def _tail(loaded: LoadedModel, found: Anatomy, final_norm: FinalNorm) -> Sequence[Module]:
    if final_norm == "raw":
        return ()
    if found.tail is None:
        msg = f"{loaded.name}: what {type(loaded.model).__name__} norms at its end was not found"
        raise PermanentError(msg, hint="use final_norm: raw for this model")
    return found.tail


def _require_vocabulary(loaded: LoadedModel, ids: Sequence[list[int]]) -> None:
    size = int(loaded.model.config.vocab_size)
    largest = max((max(tokens) for tokens in ids), default=0)
    if largest >= size:
        msg = f"{loaded.name}: the tokenizer gives id {largest}, but the model knows {size} tokens"
        raise PermanentError(msg, hint="the tokenizer does not belong to this model")
