"""Locate the layers of a model by running it on a few tokens, not by its name.

A model's blocks and the modules after the last block count as found only if their outputs equal the
hidden states that transformers returns, number for number.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    return Anatomy(blocks, _tail(calls, blocks[-1], output.last_hidden_state))


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


def _tail(calls: list[_Call], last: Module, wanted: Tensor) -> tuple[Module, ...] | None:
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
