"""Host memory that asynchronous saves copy to."""

from __future__ import annotations

import torch

from shardledger.checkpoint.port import Held


class Staging:
    """Copies of a unit's tensors that training does not touch.

    The memory is kept from one save to the next: the system hands out fresh memory page by page, which takes several times
    as long as the copy, and training waits for both. One save is under way at a time, so one set is enough.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def copy(self, unit: int, held: list[Held]) -> list[Held]:
        """The same in host memory. What it gave for this unit before is overwritten."""
        copied = []
        for index, (portion, tensor) in enumerate(held):
            place = self._kept.get((unit, index))
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                place = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self._kept[unit, index] = place
            place.copy_(tensor.detach())
            copied.append((portion, place))
        return copied
