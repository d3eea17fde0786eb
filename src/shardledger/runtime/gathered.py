"""Reading and editing parameters whose values are spread over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import nn

from shardledger.errors import EngineStateError
from shardledger.runtime.assemble import Parts
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.released import is_lost
from shardledger.runtime.unit import Unit

_LIVE: weakref.WeakSet[Parts] = weakref.WeakSet()
"""The parts of every engine that has not been destroyed."""

_CHUNK = 1 << 20


def announce(parts: Parts) -> None:
    """Make an engine's parameters known to ``GatheredParameters``."""
    _LIVE.add(parts)


def withdraw(parts: Parts) -> None:
    """Forget an engine."""
    _LIVE.discard(parts)


def live() -> list[Parts]:
    """The parts of every engine that has not been destroyed."""
    return list(_LIVE)


def refuse_owned(model: nn.Module) -> None:
    """Refuse a model that an engine has already, or that one has left without values.

    Raises:
        EngineStateError: names a parameter that belongs to a live engine, or has no values.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lost = next((name for name, parameter in model.named_parameters() if is_lost(parameter)), None)
    if lost is not None:
        raise EngineStateError(
            f"parameter {lost!r} has no values any more: the engine that had sharded it was destroyed. Fill the model with "
            f"model.load_state_dict(...) before initializing again (engine.state_dict(all_ranks=True) gives the values "
            f"before engine.destroy()), or build it anew."
        )
    for parts in list(_LIVE):
        for unit in parts.units:
            for flat in unit.flats:
                taken = next((names[id(p)] for p in flat.parameters if id(p) in names), None)
                if taken is not None:
                    raise EngineStateError(
                        f"parameter {taken!r} belongs to an engine already, and two engines would take each other's "
                        f"gradients. Call engine.destroy() on the first one before initializing again."
                    )


class GatheredParameters(AbstractContextManager[None]):
    """Inside the block, ``params`` are whole on every rank; collective.

    An exception that leaves the block takes edits back.
    With ``modifier_rank``, what that rank has written into them is kept, in weights and fp32 masters of all ranks, and
    what others have written is discarded. Without it, a change made on any rank is an error on all ranks.

    Args:
        params: a parameter, parameters, or a module.
        modifier_rank: the rank whose edits count, or None to read only.
        enabled: False makes the block do nothing.

    Raises:
        EngineStateError: a backward pass is running, states are away, or (on leaving) parameters were edited without a
            modifier rank.
    """

    def __init__(
        self,
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, torch.Tensor):
            params = [params]
        self._places = list(_find(list(params))) if enabled else []
        self._modifier = modifier_rank
        self._sums: list[list[float]] = []
        self._copies: list[torch.Tensor | None] = []
        """Values of resident parameters on entry: a refused edit is taken back."""

    def __enter__(self) -> None:
        for parts in self._engines():
            if parts.usable().schedule.in_backward:
                raise EngineStateError("GatheredParameters cannot be entered while a backward pass is running.")
            for unit in self._units(parts):
                parts.executor.pin(unit)
        self._copies = [None if flat.layout.param_sharded else view.clone() for _, flat, view, _ in self._places]
        if self._modifier is None:
            self._sums = [_checksum(view) for _, _, view, _ in self._places]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                self._take_back()
            elif self._modifier is not None:
                self._keep_edits()
            else:
                self._refuse_edits()
        finally:
            for parts in self._engines():
                for unit in self._units(parts):
                    parts.executor.unpin(unit)

    @torch.no_grad()
    def _keep_edits(self) -> None:
        assert self._modifier is not None
        for parts, flat, view, name in self._places:
            if not 0 <= self._modifier < parts.transport.world:
                raise EngineStateError(f"modifier_rank {self._modifier} is not a rank of {parts.transport.world}.")
            parts.transport.broadcast(view, self._modifier, f"edited parameter {name}")
            with parts.at_hand([flat], write=True):
                flat.take_over(name)

    @torch.no_grad()
    def _refuse_edits(self) -> None:
        for parts in self._engines():
            mine = [place for place in self._places if place[0] is parts]
            before = [s for s, place in zip(self._sums, self._places, strict=True) if place[0] is parts]
            edited = [float(_checksum(place[2]) != old) for place, old in zip(mine, before, strict=True)]
            rows = parts.transport.exchange(
                torch.tensor(edited, dtype=torch.float64), "comparison of gathered parameters"
            )
            for rank, row in enumerate(rows.tolist()):
                names = [place[3] for place, changed in zip(mine, row, strict=True) if changed]
                if names:
                    self._take_back()
                    raise EngineStateError(
                        f"rank {rank} changed {names[0]!r}{' and others' if len(names) > 1 else ''} inside "
                        f"GatheredParameters without a modifier_rank, so the change would be lost when the parameter is "
                        f"sharded again. Say whose edit counts: GatheredParameters(params, modifier_rank=0)."
                    )

    @torch.no_grad()
    def _take_back(self) -> None:
        for (_, _, view, _), copy in zip(self._places, self._copies, strict=True):
            if copy is not None:
                view.copy_(copy)

    def _engines(self) -> list[Parts]:
        return list({id(parts): parts for parts, *_ in self._places}.values())

    def _units(self, parts: Parts) -> list[Unit]:
        indices = sorted({flat.layout.unit for owner, flat, *_ in self._places if owner is parts})
        return [parts.units[index] for index in indices]


_Place = tuple[Parts, FlatParameters, torch.Tensor, str]


def _find(params: list[nn.Parameter]) -> Iterator[_Place]:
    wanted = {id(p) for p in params}
    for parts in list(_LIVE):
        for unit in parts.units:
            for flat in unit.flats:
                for parameter, slot, view in zip(flat.parameters, flat.layout.slots, flat.views, strict=True):
                    if id(parameter) in wanted and slot.numel:
                        yield parts, flat, view, slot.name


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> list[float]:
    """Two numbers that change when an element does: the sum, and the sum weighted by position."""
    bits = tensor.detach().reshape(-1).view(torch.uint8)
    plain = weighted = 0.0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.float64)
        plain += float(part.sum())
        weighted += float(torch.dot(part, torch.arange(1, part.numel() + 1, dtype=torch.float64, device=part.device)))
        weighted += start * float(part.sum())
    return [plain, weighted]
