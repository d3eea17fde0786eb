"""Adding tensors that come one after the other as a balanced binary tree, keeping log2(count) of them."""

from __future__ import annotations

import torch


class TreeSum:
    """A binary counter of partial sums: four tensors give ``(0 + 1) + (2 + 3)``.

    Other counts split at the largest power of two below, as ``transport.tree`` does over ranks. Tensors that are added
    become scratch.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, torch.Tensor]] = []
        """Sums that wait for the next: how many tensors are in each, and their sum; the counts fall."""

    def add(self, tensor: torch.Tensor) -> None:
        """Add the next tensor."""
        count = 1
        while self.parts and self.parts[-1][0] == count:
            left = self.parts.pop()[1]
            tensor = left.add_(tensor)
            count *= 2
        self.parts.append((count, tensor))

    def so_far(self) -> torch.Tensor:
        """The sum of all until now, in a new tensor; more may be added."""
        total = self.parts[-1][1].clone()
        for _, left in reversed(self.parts[:-1]):
            total = left + total
        return total

    def total(self) -> torch.Tensor:
        """The sum of all; ends the use of this object."""
        total = self.parts.pop()[1]
        while self.parts:
            total = self.parts.pop()[1].add_(total)
        return total
