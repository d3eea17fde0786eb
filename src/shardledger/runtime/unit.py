"""One unit at run time: its module, its flats, and where its full parameters are."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from shardledger.plan.plan import UnitPlan
from shardledger.runtime.gradients import FlatGradients
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.states import ParamState, move


@dataclass
class Unit:
    """Parameters that are gathered and reduced together."""

    index: int
    plan: UnitPlan
    module: nn.Module
    flats: list[FlatParameters]
    rank: int
    gradients: list[FlatGradients] = field(default_factory=list)
    """One for each trainable flat."""
    state: ParamState = ParamState.UNBORN

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.plan.label

    @property
    def sharded_flats(self) -> list[FlatParameters]:
        """Flats that must be gathered before use."""
        return [flat for flat in self.flats if flat.layout.param_sharded]

    def move(self, to: ParamState) -> None:
        """Change state.

        Raises:
            EngineStateError: the move is illegal.
        """
        move(self.state, to, self.label, self.rank)
        self.state = to
