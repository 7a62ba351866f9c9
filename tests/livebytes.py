"""Counts the bytes of tensors that are alive after each operation, on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations create inside the block.

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
        taken = {_storage(one)._cdata for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
        for one in tree_leaves(returned):
            if _is_tensor(one):
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


def _is_tensor(one: Any) -> bool:
    return isinstance(one, torch.Tensor)


def _storage(one: Any) -> Any:
    return one.untyped_storage()
