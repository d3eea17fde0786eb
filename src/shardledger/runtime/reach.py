"""One parameter of a live engine: where its elements are, and how ranks agree on what to do with it."""

from __future__ import annotations

import hashlib
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from shardledger.errors import EngineStateError, RanksDisagreeError
from shardledger.layout.flat import Interval, Slot
from shardledger.runtime.assemble import Parts
from shardledger.runtime.gathered import live
from shardledger.runtime.gradients import FlatGradients
from shardledger.runtime.optimizer import Piece
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.step import Stepper
from shardledger.runtime.unit import Unit

WIDTH = 4
"""Numbers that one agreement carries beside the call and the value: always as many, so that any two calls meet."""

_NOWHERE = Interval(0, 0)
_CHUNK = 1 << 20


@dataclass
class _Index:
    """Positions, not objects: what the objects refer to would keep an engine alive."""

    parameters: dict[int, tuple[int, int, int]]
    """``id`` of a parameter to (unit, flat in the unit, slot in the flat)."""
    pieces: dict[str, list[int]]
    """Name of a parameter to this rank's pieces in the optimizer's order."""


_INDICES: weakref.WeakKeyDictionary[Parts, _Index] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Reach:
    """A trainable parameter, and what its caller is doing with it."""

    doing: str
    """``"reading the gradient"``."""
    parts: Parts
    unit: Unit
    flat: FlatParameters
    index: int

    @property
    def slot(self) -> Slot:
        """Its place in the flat."""
        return self.flat.layout.slots[self.index]

    @property
    def gradients(self) -> FlatGradients:
        """The gradients of its flat."""
        return next(gradients for gradients in self.unit.gradients if gradients.flat is self.flat)

    @property
    def spread(self) -> bool:
        """Whether each rank updates a part of it only."""
        return self.flat.layout.optim_sharded

    @property
    def mine(self) -> Interval:
        """Which of its elements this rank updates."""
        return self.in_shard_of(self.flat.rank) if self.spread else Interval(0, self.slot.numel)

    @property
    def stepper(self) -> Stepper:
        """Holds the optimizer and its pieces."""
        assert self.parts.stepper is not None
        return self.parts.stepper

    @property
    def pieces(self) -> list[Piece]:
        """This rank's pieces of it, in order of their elements."""
        found = [self.stepper.pieces[i] for i in _index(self.parts).pieces.get(self.slot.name, ())]
        return sorted(found, key=lambda piece: piece.start)

    def at_hand(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Its master and states are at hand inside; ``write``: changes are kept."""
        return self.parts.at_hand([self.flat], write=write)

    def in_shard_of(self, rank: int) -> Interval:
        """Which of its elements are in a rank's shard."""
        common = self.slot.interval.overlap(self.flat.layout.shard(rank))
        return _NOWHERE if common is None else Interval(common.start - self.slot.start, common.stop - self.slot.start)

    def within(self, flat: torch.Tensor, start: int, elements: Interval) -> torch.Tensor:
        """Its ``elements`` as a view of a 1-D tensor whose first element is number ``start`` of the flat."""
        first = self.slot.start + elements.start - start
        return flat[first : first + elements.numel] if elements.numel else flat[:0]

    def master(self) -> torch.Tensor:
        """What this rank has of its fp32 values, 1-D, as a view."""
        assert self.flat.master is not None
        return self.within(self.flat.master, self.flat.master_interval.start, self.mine)

    def in_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor that is this rank's interval of the flat, 1-D, as a view."""
        rank = self.flat.rank
        return self.within(shard, self.flat.layout.shard(rank).start, self.in_shard_of(rank))

    def collect(self, part: torch.Tensor) -> torch.Tensor:
        """The whole from every rank's elements (those in its shard), 1-D, in the masters' dtype; collective."""
        transport = self.parts.transport
        whole = torch.empty(self.slot.numel, dtype=self.flat.master_dtype, device=self.flat.device)
        for rank in range(transport.world):
            elements = self.in_shard_of(rank)
            if not elements.numel:
                continue
            target = whole[elements.start : elements.stop]
            if rank == transport.rank:
                target.copy_(part)
            transport.broadcast(target, rank, f"{self.doing} of {self.slot.name}")
        return whole

    def checked(self, value: object, shape: tuple[int, ...]) -> torch.Tensor:
        """``value`` on the parameter's device in the masters' dtype.

        Raises:
            EngineStateError: it is no tensor of ``shape``.
        """
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        if not isinstance(value, torch.Tensor) or found != shape:
            raise self.error(f"a tensor of shape {shape} is needed, got {found}")
        return value.detach().to(self.flat.device, self.flat.master_dtype)

    def error(self, why: str) -> EngineStateError:
        """An error that names the parameter and what was wanted of it."""
        return EngineStateError(f"{self.doing} of parameter {self.slot.name!r}: {why}.")

    def agree(self, *numbers: float, value: object = None) -> list[list[float]]:
        """Every rank's ``numbers`` (at most ``WIDTH``), by rank; collective.

        Raises:
            RanksDisagreeError: ranks do different things, with different parameters, or pass different values.
        """
        row = [_word(f"{self.doing} of {self.slot.name}"), _digest(value), *numbers, *[0.0] * (WIDTH - len(numbers))]
        # One label for all, so that different calls meet here, where the answer can name both, and training goes on.
        rows = self.parts.transport.exchange(torch.tensor(row, dtype=torch.float64), "agreement on a call").tolist()
        for column, what in ((0, "do this at the same time"), (1, "pass the same value")):
            others = [rank for rank, other in enumerate(rows) if other[column] != rows[self.flat.rank][column]]
            if others:
                raise RanksDisagreeError(
                    f"{self.doing} of parameter {self.slot.name!r} on rank {self.flat.rank}: ranks {others} do not "
                    f"{what}. It is collective: call it on every rank, in the same order, for the same parameters, and "
                    f"with equal values."
                )
        return [other[2:] for other in rows]


def reach(parameter: object, doing: str) -> Reach:
    """Find a parameter among the live engines.

    Raises:
        EngineStateError: it is no trainable parameter of exactly one of them, or a backward pass is running.
    """
    if not isinstance(parameter, nn.Parameter):
        raise EngineStateError(f"{doing}: a parameter is needed, got a {type(parameter).__name__}.")
    found = [
        (parts, _index(parts).parameters[id(parameter)])
        for parts in live()
        if id(parameter) in _index(parts).parameters
    ]
    if len(found) != 1:
        have = f"{len(found)} live engines have" if found else "no live engine has"
        raise EngineStateError(
            f"{doing}: {have} this parameter of shape {tuple(parameter.shape)}. Pass a parameter of the model given to "
            f"shardledger.initialize, between initialize and engine.destroy()."
        )
    parts, (unit, flat, slot) = found[0]
    place = Reach(doing, parts.usable(), parts.units[unit], parts.units[unit].flats[flat], slot)
    if not place.flat.layout.trainable:
        raise place.error(
            "it was frozen at initialize, so it has no fp32 master, gradient or optimizer state. Its value is in "
            "engine.state_dict(), and shardledger.GatheredParameters reads or edits it"
        )
    if parts.schedule.in_backward:
        raise place.error("a backward pass is running. Call it after the backward pass, before engine.step()")
    return place


def _index(parts: Parts) -> _Index:
    if parts not in _INDICES:
        index = _Index({}, {})
        for unit in parts.units:
            for position, flat in enumerate(unit.flats):
                for slot, parameter in enumerate(flat.parameters):
                    index.parameters[id(parameter)] = (unit.index, position, slot)
        for number, piece in enumerate(parts.stepper.pieces if parts.stepper else ()):
            index.pieces.setdefault(piece.name, []).append(number)
        _INDICES[parts] = index
    return _INDICES[parts]


def _word(text: str) -> float:
    """48 bits that say whether two texts are the same."""
    return float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))


@torch.no_grad()
def _digest(value: object) -> float:
    """48 bits of a tensor's shape and fp32 bits: integer sums, so that they do not depend on the order of addition."""
    if not isinstance(value, torch.Tensor):
        return 0.0 if value is None else _word(type(value).__name__)
    real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    flat = real.reshape(-1).to(torch.float32).contiguous().view(torch.int32)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=part.device)
        total += int((part * place).sum()) + int(part.sum())
    return _word(f"{tuple(value.shape)} {total}")
