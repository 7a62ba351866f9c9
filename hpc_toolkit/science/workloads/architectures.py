"""Where the layers of a model are: found by running it on a few tokens, not by its name.

A model's blocks and what it does after the last of them are taken for known only where their
outputs are the hidden states that transformers returns, number for number.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module

PROBE_TOKENS = 4
"""Tokens of the run by which a model is examined."""


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """What of a model a pass over all layers has to know."""

    blocks: tuple[Module, ...]
    """The blocks in order: the first takes layer 0, and their outputs are layers 1 to L, the last
    of them before `tail`. Empty where they were not found: the model is asked for all hidden states
    then, which keeps them all at once."""

    tail: tuple[Module, ...] | None
    """What turns the last block's output into the last hidden state: mostly one norm; nothing in
    models that norm inside their blocks. None where it was not found."""


_known: WeakKeyDictionary[Module, Anatomy] = WeakKeyDictionary()


def anatomy(model: Module) -> Anatomy:
    """Where the layers of ``model`` are; found once a model, by one run on `PROBE_TOKENS`.

    Any encoder or decoder of transformers will do that returns ``hidden_states`` of shape
    ``(b, t, d)`` and has its blocks in one list, each called once; of others nothing is known.
    """
    if model not in _known:
        _known[model] = _examine(model)
    return _known[model]


def block_count(model: Module) -> int:
    """Blocks of the model, as its configuration says."""
    config: Any = model.config
    return int(config.num_hidden_layers)


def through(tail: Sequence[Module], states: Tensor) -> Tensor:
    """What the modules of a tail make of ``states``, one after the other."""
    for module in tail:
        states = module(states)
    return states


def output_of(returned: Any) -> Any:
    """The states among what a block returned: some return a tuple that begins with them."""
    return returned[0] if isinstance(returned, tuple) else returned


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The states among what a block was called with."""
    return args[0] if args else kwargs.get("hidden_states")


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a module during the probe."""

    module: Module
    entered: Any
    left: Any
    seen: Any
    """What was left, copied: a later operation may write into it."""


def _examine(model: Module) -> Anatomy:
    import torch

    ids = torch.arange(PROBE_TOKENS, device=next(model.parameters()).device)
    ids = ids.clamp_max(int(model.config.vocab_size) - 1).unsqueeze(0)  # type: ignore[union-attr, arg-type]
    calls: list[_Call] = []
    with torch.inference_mode(), _recorded(model, calls):
        output = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            output_hidden_states=True,
            use_cache=False,
        )
    blocks = _blocks(model, calls, output.hidden_states)
    if not blocks:
        return Anatomy((), None)
    return Anatomy(blocks, _tail(calls, blocks[-1], output.last_hidden_state))


@contextmanager
def _recorded(model: Module, calls: list[_Call]) -> Iterator[None]:
    import torch

    def record(module: Module, args: Any, kwargs: Any, returned: Any) -> None:
        left = output_of(returned)
        seen = left.clone() if isinstance(left, torch.Tensor) else None
        calls.append(_Call(module, input_of(args, kwargs), left, seen))

    handles = [
        module.register_forward_hook(record, with_kwargs=True)
        for module in model.modules()
        if module is not model
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
    """Follow the last block's output from module to module until it is the last hidden state."""
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
    """Equal number for number; what is not a number equals what is not one."""
    import torch

    if not isinstance(a, torch.Tensor) or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
