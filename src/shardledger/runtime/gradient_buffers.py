"""What ``FlatGradients`` keeps its books with: the buffer of a sum, and what a backward pass has yet to bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Sum:
    """Where sums over ranks are kept: 1-D."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    drops: bool
    """Whether it is let go of after a step: activations can have its memory until the next reduction."""
    held: torch.Tensor | None = None

    def tensor(self, made: Callable[[torch.Tensor], None] | None) -> torch.Tensor:
        """The buffer, made when it is not there; undefined values then."""
        if self.held is None:
            self.held = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            if made is not None:
                made(self.held)
        return self.held


def is_unshared(storage: torch.UntypedStorage) -> bool:
    """Whether one tensor alone refers to a storage, as far as PyTorch tells. Views in a graph may share a gradient's memory."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and int(count(storage._cdata)) == 2  # the tensor, and whoever asks


BEGUN = 5
"""One part in so many of a flat's elements: the first large matrix of a block's backward is above it, biases are not."""


@dataclass
class Due:
    """What a backward pass has yet to bring of one flat."""

    slots: int
    good_part: int
    """Elements that are a good part of the flat; 0 where nobody asks."""
    parameters: int = 0
    missing: int = 0
    """Elements until the good part is there."""
    early: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Gradients that wait for the flat's buffer, by parameter: it is taken when there is room for it."""

    def begin(self) -> None:
        """A backward pass starts."""
        self.parameters, self.missing = self.slots, self.good_part
        self.early.clear()

    def count(self, numel: int) -> bool:
        """One more gradient has come. Whether it made the good part."""
        self.parameters -= 1
        waited = self.missing > 0
        self.missing -= numel
        return waited and self.missing <= 0
