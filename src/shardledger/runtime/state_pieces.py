"""The tensors of a unit's training state on this rank: what a checkpoint writes, and where it reads to.

Over all ranks every element is held by one: the rank in whose shard it lies, also where every rank has a copy. So a save
is spread evenly over ranks at every stage, and a load reads each element once and replicates it over the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardledger.errors import EngineStateError
from shardledger.layout.flat import Interval, Slot
from shardledger.layout.portion import Portion, StateSource
from shardledger.runtime.describe import dtype_of
from shardledger.runtime.optimizer import Piece
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.unit import Unit
from shardledger.transport import Transport

MASTER, WEIGHT = "master", "weight"


def held_values(unit: Unit) -> Iterator[tuple[Portion, torch.Tensor]]:
    """This rank's part of the values of a unit's parameters, as 1-D views."""
    for flat in unit.flats:
        role = MASTER if flat.layout.trainable else WEIGHT
        kept, start = _kept(flat)
        mine = flat.layout.shard(flat.rank)
        for piece in flat.layout.pieces(flat.rank):
            first = mine.start + piece.in_shard.start - start
            yield Portion(piece.name, role, piece.in_parameter), kept[first : first + piece.in_shard.numel]


def held_states(
    unit: Unit, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Portion, torch.Tensor]]:
    """This rank's part of the optimizer states of a unit's parameters, as views.

    Raises:
        EngineStateError: a state that cannot be saved: neither a number per element nor one for the parameter.
    """
    for piece, elements, inside in _own(unit, pieces):
        for state, value in optimizer.state.get(piece.values, {}).items():
            if state in (MASTER, WEIGHT, "buffer"):
                raise _cannot(piece, state, "that name means the value of the parameter itself in a checkpoint")
            if not isinstance(value, torch.Tensor):
                continue
            if value.shape == piece.values.shape:
                yield Portion(piece.name, state, elements), value.reshape(-1)[inside.start : inside.stop]
            elif value.numel() != 1 and piece.values.numel() != _slot(piece).numel:
                raise _cannot(piece, state, f"it has shape {tuple(value.shape)} for a part of the parameter")
            elif elements.start == 0:
                yield Portion(piece.name, state, Interval(0, 0), scalar=True), value


def held_numbers(
    units: Sequence[Unit], pieces: Sequence[Piece], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Optimizer states that are plain numbers, of parameters whose first element is in this rank's shard.

    Raises:
        EngineStateError: a state that is neither a tensor nor a number.
    """
    found: dict[str, dict[str, Any]] = {}
    for unit in units:
        for piece, elements, _ in _own(unit, pieces):
            for state, value in optimizer.state.get(piece.values, {}).items():
                if isinstance(value, torch.Tensor):
                    continue
                if value is not None and not isinstance(value, (bool, int, float, str)):
                    raise _cannot(piece, state, f"it is a {type(value).__name__}, neither a tensor nor a number")
                if elements.start == 0:
                    found.setdefault(piece.name, {})[state] = value
    return found


def read_values(unit: Unit, source: StateSource) -> None:
    """Read this rank's part of the values of a unit's parameters, those that the source has."""
    for flat in unit.flats:
        kept, start = _kept(flat)
        mine = flat.layout.shard(flat.rank)
        for piece in flat.layout.pieces(flat.rank):
            if source.has(piece.name):
                first = mine.start + piece.in_shard.start - start
                source.read(piece.name, piece.in_parameter, kept[first : first + piece.in_shard.numel])


def replicate_values(unit: Unit, transport: Transport) -> None:
    """Bring what each rank has read to every tensor that holds it; collective."""
    works = []
    for flat in unit.flats:
        layout = flat.layout
        if layout.param_sharded or not layout.padded_numel:
            flat.refresh()
            continue
        if layout.optim_sharded:
            flat.publish()
        whole = flat.full if layout.optim_sharded else _kept(flat)[0].to(flat.device)
        works.append((flat, whole, transport.all_gather(whole, unit.label)))
    for flat, whole, work in works:
        work.wait()
        if not flat.layout.optim_sharded:
            _kept(flat)[0].copy_(whole)
            flat.publish()


def read_states(unit: Unit, pieces: Sequence[Piece], optimizer: torch.optim.Optimizer, source: StateSource) -> None:
    """Replace the optimizer states of a unit's parameters. Those the source never trained keep what they have."""
    fast = {id(p): _steps_on_device(group) for group in optimizer.param_groups for p in group["params"]}
    for piece in pieces:
        if not any(piece.flat is flat for flat in unit.flats) or not source.trained(piece.name):
            continue
        optimizer.state.pop(piece.values, None)  # first, so that old and new are not held at once
        entries: dict[str, Any] = dict(source.numbers(piece.name))
        elements = _elements(piece)
        for state, (dtype, scalar) in source.states(piece.name).items():
            if scalar:
                value = source.scalar(piece.name, state)
                stays = value.numel() == 1 and not fast.get(id(piece.values), False)
                entries[state] = value if stays else value.to(piece.values.device)
                continue
            wanted = _follow(dtype_of(dtype), piece.values.dtype)
            target = torch.empty(elements.numel, dtype=wanted, device=piece.values.device)
            source.read_state(piece.name, state, elements, target)
            entries[state] = target.view(piece.values.shape)
        if entries:
            optimizer.state[piece.values] = entries


def _kept(flat: FlatParameters) -> tuple[torch.Tensor, int]:
    """The tensor that holds a flat's values, and which element of the flat is its first."""
    if flat.master is not None:
        return flat.master, flat.master_interval.start
    if flat.shard is not None:
        return flat.shard, flat.layout.shard(flat.rank).start
    return flat.full, 0


def _own(unit: Unit, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Interval, Interval]]:
    """Pieces with elements in this rank's shard: which of the parameter's those are, and which of the piece's."""
    for piece in pieces:
        flat = piece.flat
        if not any(flat is other for other in unit.flats):
            continue
        start = flat.master_interval.start + piece.start
        common = Interval(start, start + piece.values.numel()).overlap(flat.layout.shard(flat.rank))
        if common is not None:
            first = _slot(piece).start
            inside = Interval(common.start - start, common.stop - start)
            yield piece, Interval(common.start - first, common.stop - first), inside


def _elements(piece: Piece) -> Interval:
    start = piece.flat.master_interval.start + piece.start - _slot(piece).start
    return Interval(start, start + piece.values.numel())


def _slot(piece: Piece) -> Slot:
    return next(slot for slot in piece.flat.layout.slots if slot.name == piece.name)


def _follow(saved: torch.dtype, values: torch.dtype) -> torch.dtype:
    """Dtype of a state: moments are as wide as the masters, all else stays what it was."""
    if saved.is_floating_point and values.is_floating_point and saved.itemsize >= 4:
        return values
    return saved


def _steps_on_device(group: Mapping[str, Any]) -> bool:
    """Whether torch keeps step counts beside the parameters, as its own ``load_state_dict`` decides."""
    return bool(group.get("capturable") or group.get("fused"))


def _cannot(piece: Piece, state: str, why: str) -> EngineStateError:
    return EngineStateError(f"the optimizer state {state!r} of parameter {piece.name!r} cannot be saved: {why}.")
