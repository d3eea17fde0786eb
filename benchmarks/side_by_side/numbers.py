"""Medians, and ratios of values that were measured in the same round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median and how far single rounds lie from it."""

    middle: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.lowest:.2f} .. {self.highest:.2f}]"


def spread(values: Sequence[float]) -> Spread:
    """Median, smallest and largest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Spread of ``ours / theirs``, round by round: what slows the machine for a while slows both.

    Raises:
        ValueError: the two were not measured in the same rounds.
    """
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def losses_agree(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> str:
    """Empty when every loss is within ``tolerance`` (relative) of the reference; otherwise where it is not."""
    if len(losses) != len(reference):
        return f"{len(losses)} losses beside {len(reference)}"
    for step, (mine, theirs) in enumerate(zip(losses, reference, strict=True)):
        if not abs(mine - theirs) <= tolerance * abs(theirs):  # written so that NaN does not agree
            return f"step {step}: {mine:.7f} beside {theirs:.7f}"
    return ""
