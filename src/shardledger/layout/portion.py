"""What a checkpoint and an engine hand each other: names for numbers of the training state, and where they come from.

Both rooms know this one and not each other. Tensors are ``Any`` here, because a layout is made without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardledger.layout.flat import Interval


@dataclass(frozen=True)
class Portion:
    """Elements of one role of one parameter or buffer."""

    name: str
    role: str
    """``"master"``, ``"weight"``, ``"buffer"``, the optimizer's name of a state, or ``"gradient.…"``."""
    elements: Interval
    """Of the flattened parameter; empty for a state that is not one number per element."""
    scalar: bool = False
    """Whether the state is not one number per element."""


class StateSource(Protocol):
    """Where an engine reads its state from, parameter by parameter."""

    def has(self, name: str) -> bool:
        """Whether there is a value of this parameter."""

    def read(self, name: str, elements: Interval, out: Any) -> None:
        """Copy these elements of the parameter's value into the tensor ``out`` (1-D), cast to its dtype."""

    def trained(self, name: str) -> bool:
        """Whether optimizer states were kept for the parameter, if only none yet."""

    def states(self, name: str) -> Mapping[str, tuple[str, bool]]:
        """Optimizer states of the parameter: by name, the dtype and whether it is a scalar."""

    def read_state(self, name: str, state: str, elements: Interval, out: Any) -> None:
        """Copy these elements of a state into the tensor ``out`` (1-D), cast to its dtype."""

    def scalar(self, name: str, state: str) -> Any:
        """A state that is not one number per element, as a CPU tensor."""

    def gradients(self, name: str) -> Mapping[str, str]:
        """Gradients of an unfinished accumulation window: by role, the dtype. ``read_state`` reads them."""

    def numbers(self, name: str) -> Mapping[str, Any]:
        """States that are plain numbers."""
