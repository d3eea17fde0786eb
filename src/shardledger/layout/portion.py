"""What a checkpoint and an engine hand each other: a name for some numbers of the training state."""

from __future__ import annotations

from dataclasses import dataclass

from shardledger.layout.flat import Interval


@dataclass(frozen=True)
class Portion:
    """Elements of one role of one parameter or buffer."""

    name: str
    role: str
    """``"master"``, ``"weight"``, ``"buffer"``, or the optimizer's name of a state."""
    elements: Interval
    """Of the flattened parameter; empty for a state that is not one number per element."""
    scalar: bool = False
    """Whether the state is not one number per element."""
