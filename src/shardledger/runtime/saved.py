"""What autograd saves of a unit's weights while they are gathered.

Autograd keeps views of the full flat. When their backward comes at a time that no hook announced (a second backward over the
first one's graph, a unit whose outputs no hook could find), the flat is empty, and reading the view would crash the process.
Here each saved view is asked for when it is needed: its unit is gathered first.

Two things that autograd does for tensors it saves itself are lost with hooks, and are done here. It saves no output with its
own graph, which would be a cycle that nothing collects; and it refuses a tensor that was changed since it was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial

import torch

from shardledger.errors import EngineStateError
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.states import ParamState
from shardledger.runtime.unit import Unit


@dataclass(slots=True)
class _SavedWeight:
    view: torch.Tensor
    flat: FlatParameters
    updates: int


Kept = tuple[torch.Tensor, int]
"""A saved tensor without its graph, and its version."""


def keep(tensor: torch.Tensor) -> Kept:
    """What a hook may store of a tensor that autograd saves."""
    return tensor.detach(), tensor._version


def give_back(kept: Kept) -> torch.Tensor:
    """The tensor again.

    Raises:
        RuntimeError: it was changed in place since, as autograd says it.
    """
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
            f"shape {tuple(tensor.shape)}, {tensor.dtype}, is at version {tensor._version}; version {version} was saved. "
            f"Replace the in-place operation that follows its use."
        )
    return tensor


class SavedWeights:
    """Hooks for autograd's saved tensors, for engines whose parameters are sharded."""

    def __init__(self, units: Sequence[Unit], gather: Callable[[int], None]) -> None:
        self.updates = 0
        """Times the weights have been updated: a view saved before an update belongs to other weights."""
        self._units = units
        self._gather = gather
        self._flats = {flat.full.untyped_storage()._cdata: flat for unit in units for flat in unit.sharded_flats}

    def watch(self, note: Callable[[torch.Tensor], None] | None = None) -> AbstractContextManager[None]:
        """A context for a forward pass; ``note`` is shown every saved tensor."""
        if note is None:
            return torch.autograd.graph.saved_tensors_hooks(partial(_untraced_pack(), self), self._unpack)

        def pack(tensor: torch.Tensor) -> Kept | _SavedWeight:
            note(tensor)
            return self._pack(tensor)

        return torch.autograd.graph.saved_tensors_hooks(torch.compiler.disable(pack), self._unpack)

    @property
    def needed(self) -> bool:
        """Whether there is anything to watch."""
        return bool(self._flats)

    def _pack(self, tensor: torch.Tensor) -> Kept | _SavedWeight:
        flat = self._flats.get(tensor.untyped_storage()._cdata)
        if flat is None:
            return tensor.detach(), tensor._version
        return _SavedWeight(tensor.detach(), flat, self.updates)

    def _unpack(self, packed: Kept | _SavedWeight) -> torch.Tensor:
        if isinstance(packed, tuple):
            return give_back(packed)
        if packed.updates != self.updates:
            raise EngineStateError(
                f"a graph built before engine.step() is propagated back after it: the weights it saved (unit of "
                f"{packed.flat.layout.slots[0].name!r}) have been updated since. Run backward before step."
            )
        unit = packed.flat.layout.unit
        if self._units[unit].state is not ParamState.FULL:  # also while it is on its way: the bytes are not there yet
            self._gather(unit)
        return packed.view


@cache
def _untraced_pack() -> Callable[[SavedWeights, torch.Tensor], Kept | _SavedWeight]:
    """What runs between two compiled parts of a module saves tensors with the compiler listening: it is to skip this.

    One function for all engines: a wrapper of a bound method, kept by its object, would be a cycle.
    """
    pack: Callable[[SavedWeights, torch.Tensor], Kept | _SavedWeight] = torch.compiler.disable(SavedWeights._pack)
    return pack
