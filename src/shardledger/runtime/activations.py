"""How many bytes a forward pass keeps for its backward pass, measured once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from shardledger.runtime.saved import Kept, give_back, keep


class ActivationMeter:
    """Counts the storages that autograd saves, parameters excluded."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._seen: set[int] = set()
        self._weights: set[int] = set()
        self._current = 0

    def begin(self, weights: Iterable[torch.Tensor]) -> None:
        """A forward pass begins. ``weights`` are counted elsewhere."""
        self._seen.clear()
        self._current = 0
        self._weights = {w.untyped_storage()._cdata for w in weights}

    def watch(self) -> AbstractContextManager[None]:
        """A context that counts what is saved within it, where no other hooks look at saved tensors."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, give_back)

    def note(self, tensor: torch.Tensor) -> None:
        """Count one saved tensor, seen by other hooks: of nested ones autograd calls the innermost only."""
        self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Kept:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights and storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._current += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self._current)
        return keep(tensor)
