"""The three roles of training state, and the tiers they can live on.

A ZeRO stage is the set of roles that are sharded over the data-parallel ranks (arXiv 1910.02054, section 5).
"""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """What a byte of training state is for."""

    PARAM = "param"
    """The weights the forward and backward passes compute with."""
    GRAD = "grad"
    """Accumulated gradients."""
    OPTIM = "optim"
    """fp32 master weights and optimizer moments."""


class Home(Enum):
    """The memory tier on which a role rests between uses."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


STAGE_ROLES: dict[int, frozenset[Role]] = {
    0: frozenset(),
    1: frozenset({Role.OPTIM}),
    2: frozenset({Role.OPTIM, Role.GRAD}),
    3: frozenset({Role.OPTIM, Role.GRAD, Role.PARAM}),
}
