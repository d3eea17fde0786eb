"""Bytes a rank sends in one optimizer step, and whether computing hides them. Formulas, no run.

With N ranks, f = (N-1)/N, K micro-batches a step, p, g and s bytes per element of gathered weights, reductions and sums of
gradients, T trained and F frozen parameters (arXiv 1910.02054, section 7; micro-batches and frozen weights added):

    stage 0   f (g + s) T                  reduce-scatter, all-gather of the sums, so that every rank updates with the same
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
    sum_bytes: int = 4
    """Bytes per element of their sums, which stage 0 gathers."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""


def sent_bytes(stage: int, world: int, wire: Wire) -> int:
    """Bytes one rank sends per optimizer step at ``stage``."""
    p, g, k = wire.weight_bytes, wire.gradient_bytes, wire.accumulation
    per_step = {
        0: (g + wire.sum_bytes) * wire.trained,
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
    link: float | None = None
    """Bytes per second between its device and host memory; None: not known."""
    disk: float | None = None
    """Bytes per second of a disk, read and written together; None: not known."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Lower bounds of one optimizer step, in seconds."""

    compute_s: float
    communication_s: float
    hidden: bool
    """Whether computing takes at least as long as the bytes, so that overlap can hide them."""
    tokens_to_hide: int
    """Tokens per rank and optimizer step above which it does."""
    link_s: float = 0.0
    """Bytes between device and host memory."""
    disk_s: float = 0.0
    """Bytes on disk that gathers ask for, which computing can hide."""
    disk_step_s: float = 0.0
    """Bytes on disk while the optimizer steps, which nothing can."""

    @property
    def bound_s(self) -> float:
        """No step is shorter: the longest of what overlaps completely, and then the optimizer's disk."""
        return max(self.compute_s, self.communication_s, self.link_s, self.disk_s) + self.disk_step_s


@dataclass(frozen=True)
class Moved:
    """Bytes of one rank and step."""

    sent: int
    """To other ranks."""
    link: int = 0
    """Between device and host memory."""
    disk: int = 0
    """From and to disk, all ranks of the machine, during forward and backward."""
    disk_step: int = 0
    """The same, while the optimizer steps."""


def step_time(moved: Moved | int, parameters: int, tokens: int, speed: Speed, *, recompute: bool = False) -> StepTime:
    """Bounds for a rank that moves ``moved`` bytes (an int: sent ones) and processes ``tokens`` tokens per optimizer step.

    Attention's own operations are left out, so the bound is low for very long sequences. A link whose speed is not known
    counts as infinitely fast.
    """
    moved = Moved(moved) if isinstance(moved, int) else moved
    per_token = (FLOPS_PER_TOKEN_RECOMPUTED if recompute else FLOPS_PER_TOKEN) * parameters
    compute, communication = per_token * tokens / speed.flops, moved.sent / speed.bandwidth
    return StepTime(
        compute_s=compute,
        communication_s=communication,
        hidden=compute >= communication,
        tokens_to_hide=ceil(communication * speed.flops / per_token) if per_token else 0,
        link_s=moved.link / speed.link if speed.link else 0.0,
        disk_s=moved.disk / speed.disk if speed.disk else 0.0,
        disk_step_s=moved.disk_step / speed.disk if speed.disk else 0.0,
    )
