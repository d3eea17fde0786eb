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
    total = _sum(parts, out.dtype)
    if total is not out:
        out.copy_(total)


def _sum(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    split = 1 << ((len(parts) - 1).bit_length() - 1)
    left, right = _sum(parts[:split], dtype), _sum(parts[split:], dtype)
    if left.dtype != dtype:
        left = left.to(dtype)
    return left.add_(right)
