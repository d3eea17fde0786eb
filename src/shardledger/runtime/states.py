"""The lives of a unit's parameters and gradients, and the legal moves of each."""

from __future__ import annotations

from enum import Enum

from shardledger.errors import EngineStateError


class _State(Enum):
    """Hashed by identity: an ``Enum`` is hashed by name, in Python, and states move often."""

    __hash__ = object.__hash__


class ParamState(_State):
    """Where the full parameters of a unit are."""

    UNBORN = "unborn"
    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


class GradState(_State):
    """How far the gradients of a flat are."""

    EMPTY = "empty"
    """None since the last step."""
    PENDING = "pending"
    """Local gradients exist that no other rank has seen."""
    REDUCING = "reducing"
    REDUCED = "reduced"
    """All gradients so far are summed over ranks."""


_PARAM_MOVES: dict[ParamState, frozenset[ParamState]] = {
    ParamState.UNBORN: frozenset({ParamState.SHARDED, ParamState.FULL}),
    ParamState.SHARDED: frozenset({ParamState.GATHERING}),
    ParamState.GATHERING: frozenset({ParamState.FULL, ParamState.SHARDED}),
    ParamState.FULL: frozenset({ParamState.SHARDED, ParamState.FULL}),
}
_GRAD_MOVES: dict[GradState, frozenset[GradState]] = {
    GradState.EMPTY: frozenset({GradState.PENDING, GradState.EMPTY}),
    GradState.PENDING: frozenset({GradState.PENDING, GradState.REDUCING, GradState.EMPTY}),
    GradState.REDUCING: frozenset({GradState.REDUCED}),
    GradState.REDUCED: frozenset({GradState.PENDING, GradState.REDUCED, GradState.EMPTY}),
}


def move(now: Enum, to: Enum, who: str, rank: int) -> None:
    """Check one move.

    Raises:
        EngineStateError: the move is illegal; names unit, both states and rank.
    """
    table = _PARAM_MOVES if isinstance(now, ParamState) else _GRAD_MOVES
    if to not in table[now]:  # type: ignore[index]
        raise EngineStateError(
            f"unit {who} on rank {rank} cannot go from {now.value} to {to.value}. This is an engine bug, or "
            f"parameters were moved behind its back (model.to, .data, .half): please report it with the model."
        )
