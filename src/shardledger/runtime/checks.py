"""``"checks": "full"``: compares across ranks what must be equal, and what must not be, at every step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from shardledger.errors import RanksDisagreeError
from shardledger.runtime.hooks import tensors_in
from shardledger.runtime.unit import Unit
from shardledger.transport import Transport

_WORD = 0xFFFFFFFF


class FullChecks:
    """Reads every whole parameter once a step and every batch once; sends a few numbers a unit."""

    def __init__(self, units: Sequence[Unit], transport: Transport) -> None:
        self._units = units
        self._transport = transport
        self._batches: list[float] = []
        self._warned = False

    def note_batch(self, arguments: Any) -> None:
        """Remember what this rank's model was called with."""
        digest = 0
        for tensor in tensors_in(arguments):
            digest = (digest * 1_000_003 + _digest(tensor.detach())) & _WORD
        self._batches.append(float(digest))

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        """Compare, while the weights are still those that the gradients were computed with.

        Raises:
            RanksDisagreeError: a parameter that every rank holds whole differs between ranks, or ranks were called a
                different number of times.
        """
        flats = [(unit, flat) for unit in self._units for flat in unit.flats if not flat.layout.param_sharded]
        calls = len(self._batches)
        batches, self._batches = self._batches, []
        first = self._transport.exchange(torch.tensor([float(calls)], dtype=torch.float64), "comparison of calls")
        counts = [int(row[0]) for row in first.tolist()]
        if len(set(counts)) > 1:
            raise RanksDisagreeError(
                f"step {step}: ranks called the model {counts} times (by rank) since the last step; all must do so "
                f"equally often."
            )
        mine = [float(_digest(flat.full)) for _, flat in flats] + batches
        rows = self._transport.exchange(torch.tensor(mine, dtype=torch.float64), "comparison of parameters").tolist()
        for index, (unit, flat) in enumerate(flats):
            odd = [rank for rank, row in enumerate(rows) if row[index] != rows[0][index]]
            if odd:
                raise RanksDisagreeError(
                    f"step {step}: the parameters of unit {unit.label} (from {flat.layout.slots[0].name!r} on) on rank "
                    f"{odd[0]} are not those of rank 0. Something wrote to them on one rank only: an initialisation, an "
                    f"average, or a load after shardledger.initialize. Use GatheredParameters with a modifier_rank."
                )
        self._look_for_twins(step, [row[len(flats) :] for row in rows])

    def _look_for_twins(self, step: int, batches: list[list[float]]) -> None:
        for rank, row in enumerate(batches):
            twins = [other for other in range(rank) if row and batches[other] == row]
            if twins and not self._warned:
                self._warned = True
                warnings.warn(
                    f"step {step}: ranks {twins[0]} and {rank} were given the same batches, so they do the same work "
                    f"twice. Split the data over ranks: pass training_data to initialize, or use a DistributedSampler.",
                    stacklevel=4,
                )


def _digest(tensor: torch.Tensor) -> int:
    """A 32-bit sum over the bits of a tensor."""
    if not tensor.numel():
        return 0
    flat = tensor.contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    width = next(
        dtype
        for dtype in (torch.int32, torch.int16, torch.uint8)
        if flat.element_size() >= dtype.itemsize and flat.element_size() % dtype.itemsize == 0
    )
    return int(flat.view(width).sum(dtype=torch.int64)) & _WORD
