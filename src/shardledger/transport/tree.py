"""Sums in one fixed order, whatever the bucket, the stage or the overlap."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tree_sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add ``parts`` (same shape, one per rank, in rank order) as a balanced binary tree and write the sum to ``out``.

    Four ranks give ``(0 + 1) + (2 + 3)``; other counts split at the largest power of two below. Sums are taken in the
    dtype of ``out``. The first part of each pair is overwritten unless it must be converted first, so ``parts`` are
    scratch, except that ``out`` may be one of them.
    """
    if len(parts) == 1:
        if parts[0] is not out:
            out.copy_(parts[0])
        return
    left, right = _halves(parts, out.dtype)
    torch.add(left, right, out=out)  # one pass: neither half is copied


def _halves(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two operands of the last addition, the first in ``dtype``."""
    split = 1 << ((len(parts) - 1).bit_length() - 1)
    left, right = _sum(parts[:split], dtype), _sum(parts[split:], dtype)
    return left if left.dtype == dtype else left.to(dtype), right


def _sum(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    left, right = _halves(parts, dtype)
    return left.add_(right)
