"""Optimizer states by parameter, whole or this rank's part of them, at every stage. See ``access`` for the rules."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn

from shardledger.errors import EngineStateError
from shardledger.runtime.optimizer import Piece
from shardledger.runtime.reach import Reach, reach

_NO_PIECE, _NOT_YET, _UNKNOWN, _ELEMENTS, _OTHER = range(5)
"""What a rank finds: no piece of the parameter, no state, no such key, a value for each element, or something else."""


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One state of a parameter (``"exp_avg"``, …); collective where states are sharded (stages 1 to 3).

    A state that is not one number per element (``"step"``) comes in its own shape. None before the optimizer has first
    updated the parameter.

    Raises:
        EngineStateError: a frozen or foreign parameter, a key that the optimizer does not keep, or a backward pass is
            running.
    """
    place = reach(param, f"reading the optimizer state {optim_state_key!r}")
    status, number = _agree_on_state(place, optim_state_key)
    if status == _NOT_YET:
        return None
    if status == _OTHER and place.spread:
        return torch.tensor(number, dtype=place.flat.master_dtype, device=place.flat.device)
    if status == _OTHER:
        return _state(place, place.pieces[0], optim_state_key).to(place.flat.master_dtype, copy=True)
    with place.at_hand():
        part = _elements(place, optim_state_key)
    return (place.collect(part) if place.spread else part).view(place.slot.shape)


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace one state of a parameter; collective.

    Raises:
        EngineStateError: as for ``safe_get_full_optimizer_state``, a wrong shape, or no state yet.
        RanksDisagreeError: ranks pass different values.
    """
    place = reach(param, f"setting the optimizer state {optim_state_key!r}")
    status, _ = _agree_on_state(place, optim_state_key, value)
    if status == _NOT_YET:
        raise _no_state(place)
    if status == _OTHER:
        _fill(place, optim_state_key, value)
        return
    fresh = place.checked(value, place.slot.shape).reshape(-1)
    with place.at_hand(write=True):
        _write_elements(place, optim_state_key, fresh[place.mine.start : place.mine.stop])


@torch.no_grad()
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of one state, 1-D; empty when it has no part.

    A state that is not one number per element comes in its own shape. None before the optimizer has first updated the
    parameter.

    Raises:
        EngineStateError: as for ``safe_get_full_optimizer_state``.
    """
    place = reach(param, f"reading this rank's part of the optimizer state {optim_state_key!r}")
    status = _checked_status(place, optim_state_key, [_status(place, optim_state_key)])
    if status == _NOT_YET:
        return None
    if status == _OTHER:
        return _state(place, place.pieces[0], optim_state_key).to(place.flat.master_dtype, copy=True)
    with place.at_hand():
        return _elements(place, optim_state_key)


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's part (1-D) of one state. At stage 0 the part is the whole, the same on every rank.

    Raises:
        EngineStateError: as for ``safe_set_full_optimizer_state``.
    """
    place = reach(param, f"setting this rank's part of the optimizer state {optim_state_key!r}")
    status = _checked_status(place, optim_state_key, [_status(place, optim_state_key)])
    if status == _NOT_YET:
        raise _no_state(place)
    if status == _OTHER:
        _fill(place, optim_state_key, value)
        return
    _write_elements(place, optim_state_key, place.checked(value, (place.mine.numel,)))


def _agree_on_state(place: Reach, key: str, value: object = None) -> tuple[int, float]:
    """What the ranks that hold pieces find, and the value when it is a number."""
    status = _status(place, key)
    number = 0.0
    if status == _OTHER and place.spread:
        found = _state(place, place.pieces[0], key)
        if found.numel() != 1:
            raise place.error(
                f"it has shape {tuple(found.shape)} for a part of the parameter and belongs to no element"
            )
        number = float(found)
    if not place.spread and value is None:
        return _checked_status(place, key, [status]), number
    rows = place.agree(float(status), number, value=value)
    agreed = _checked_status(place, key, [int(row[0]) for row in rows])
    return agreed, next((row[1] for row in rows if row[0] == _OTHER), 0.0)


def _checked_status(place: Reach, key: str, found: list[int]) -> int:
    """One status for all ranks.

    Raises:
        EngineStateError: the optimizer keeps no such state.
    """
    told = [status for status in found if status != _NO_PIECE]
    status = told[0] if told else _NO_PIECE
    if status in (_ELEMENTS, _OTHER):
        return status
    optimizer = place.stepper.optimizer
    kept = _kept_states(optimizer)
    if status == _UNKNOWN or key not in kept:
        names = ", ".join(repr(name) for name in sorted(kept)) or "no state at all"
        raise place.error(f"{type(optimizer).__name__} keeps no such state for it. It keeps {names}")
    return status


def _status(place: Reach, key: str) -> int:
    pieces = place.pieces
    if not pieces:
        return _NO_PIECE
    states = _states_of(place, pieces[0])
    if not states:
        return _NOT_YET
    if states.get(key) is None:
        return _UNKNOWN
    return _ELEMENTS if _state(place, pieces[0], key).shape == pieces[0].values.shape else _OTHER


def _states_of(place: Reach, piece: Piece) -> dict[str, Any]:
    # The optimizer's own dictionary makes an entry for whoever is asked about.
    found: dict[str, Any] = place.stepper.optimizer.state.get(piece.values, {})
    return found


def _state(place: Reach, piece: Piece, key: str) -> torch.Tensor:
    return torch.as_tensor(_states_of(place, piece)[key])


def _elements(place: Reach, key: str) -> torch.Tensor:
    """This rank's elements of a state, 1-D, as a copy."""
    empty = torch.empty(0, dtype=place.flat.master_dtype, device=place.flat.device)
    parts = [_state(place, piece, key).reshape(-1).to(empty) for piece in place.pieces]
    return torch.cat([empty, *parts])


def _write_elements(place: Reach, key: str, fresh: torch.Tensor) -> None:
    start = 0
    for piece in place.pieces:
        state = _state(place, piece, key)
        state.copy_(fresh[start : start + state.numel()].view(state.shape))
        start += state.numel()


def _fill(place: Reach, key: str, value: object) -> None:
    """Replace a state that is not one number per element, in all pieces of this rank."""
    pieces = place.pieces
    shape = tuple(_state(place, pieces[0], key).shape) if pieces else ()
    fresh = place.checked(value, shape)
    for piece in pieces:
        states = _states_of(place, piece)
        if isinstance(states[key], torch.Tensor):
            states[key].copy_(fresh)
        else:
            states[key] = type(states[key])(float(fresh))


def _no_state(place: Reach) -> EngineStateError:
    return place.error("the optimizer has not updated it yet, so there is no state to replace. Take a step first")


_KEPT: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[str]] = weakref.WeakKeyDictionary()


def _kept_states(optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of what the optimizer keeps for a parameter: tried out once on a small one, for each param group."""
    if optimizer not in _KEPT:
        accepted = inspect.signature(type(optimizer).__init__).parameters
        kept: set[str] = set()
        for group in optimizer.param_groups:
            options = {k: v for k, v in group.items() if k in accepted and k != "params"}
            probe = torch.zeros(2, 3, requires_grad=True)  # 2-D: some classes take nothing else
            probe.grad = torch.ones(2, 3)
            trial = type(optimizer)([probe], **options)
            trial.step()
            kept |= {key for key, value in trial.state.get(probe, {}).items() if value is not None}
        _KEPT[optimizer] = kept
    return _KEPT[optimizer]
