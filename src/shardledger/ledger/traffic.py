"""Bytes a rank sends in one optimizer step, and whether computing hides them. Formulas, no run.

With N ranks, f = (N-1)/N, K micro-batches a step, p and g bytes per element of gathers and reductions, T trained and
F frozen parameters (arXiv 1910.02054, section 7; micro-batches and frozen weights added):

    stage 0   2 f g T                      all-reduce
    stage 1   f (g + p) T                  reduce-scatter once, all-gather of the new weights
    stage 2   f (K g + p) T                reduce-scatter every micro-batch
    stage 3   f K ((2 p + g) T + 2 p F)    all-gather in forward and backward, nothing to publish
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

FLOPS_PER_TOKEN = 6
"""Operations per parameter and token of one forward and backward pass (2 + 4)."""
FLOPS_PER_TOKEN_RECOMPUTED = 8
"""The same when the forward pass is done twice."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What travels."""

    trained: int
    """Parameters with gradients."""
    frozen: int
    """Parameters without."""
    weight_bytes: int
    """Bytes per element of gathered weights."""
    gradient_bytes: int
    """Bytes per element of reduced gradients."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""


def sent_bytes(stage: int, world: int, wire: Wire) -> int:
    """Bytes one rank sends per optimizer step at ``stage``."""
    p, g, k = wire.weight_bytes, wire.gradient_bytes, wire.accumulation
    per_step = {
        0: 2 * g * wire.trained,
        1: (g + p) * wire.trained,
        2: (k * g + p) * wire.trained,
        3: k * ((2 * p + g) * wire.trained + 2 * p * wire.frozen),
    }[stage]
    return ceil(per_step * (world - 1) / world)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one rank's hardware does."""

    bandwidth: float
    """Bytes per second a rank sends to the others."""
    flops: float
    """Operations per second of its matrix products, as measured, not as advertised."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Lower bounds of one optimizer step, in seconds."""

    compute_s: float
    communication_s: float
    hidden: bool
    """Whether computing takes at least as long as the bytes, so that overlap can hide them."""
    tokens_to_hide: int
    """Tokens per rank and optimizer step above which it does."""

    @property
    def bound_s(self) -> float:
        """No step is shorter: the longer of the two, when they overlap completely."""
        return max(self.compute_s, self.communication_s)


def step_time(sent: int, parameters: int, tokens: int, speed: Speed, *, recompute: bool = False) -> StepTime:
    """Bounds for a rank that sends ``sent`` bytes and processes ``tokens`` tokens per optimizer step.

    Attention's own operations are left out, so the bound is low for very long sequences.
    """
    per_token = (FLOPS_PER_TOKEN_RECOMPUTED if recompute else FLOPS_PER_TOKEN) * parameters
    compute, communication = per_token * tokens / speed.flops, sent / speed.bandwidth
    return StepTime(
        compute_s=compute,
        communication_s=communication,
        hidden=compute >= communication,
        tokens_to_hide=ceil(communication * speed.flops / per_token) if per_token else 0,
    )
