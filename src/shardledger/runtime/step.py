"""The optimizer step: agree on the norm, decide together, update this rank's pieces, publish the new weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardledger.plan.plan import Plan
from shardledger.runtime.executor import Executor
from shardledger.runtime.gradients import FlatGradients
from shardledger.runtime.optimizer import Piece
from shardledger.runtime.unit import Unit
from shardledger.transport import Transport

_BITS = 48
"""Presence flags per number of the exchange: integers below 2**48 survive a float64."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step decided, the same on every rank."""

    grad_norm: float
    """Global norm of the averaged gradient, before clipping."""
    clip_coefficient: float
    """What the gradients were multiplied with to meet the clipping norm; 1 when they met it."""
    applied: bool
    """Whether the optimizer ran: not when the norm is infinite or NaN."""


class Stepper:
    """Owns the optimizer's pieces between backward passes."""

    def __init__(
        self,
        units: Sequence[Unit],
        pieces: Sequence[Piece],
        optimizer: torch.optim.Optimizer,
        transport: Transport,
        plan: Plan,
    ) -> None:
        self.optimizer = optimizer
        self.running = False
        """Whether the optimizer is called by the engine."""
        self._gradients = [g for unit in units for g in unit.gradients]
        self._pieces = pieces
        self._transport = transport
        self._plan = plan

    def step(self, executor: Executor, micro_batches: int, clip_norm: float) -> StepOutcome:
        """Take one optimizer step from the gradients of ``micro_batches`` micro-batches per rank."""
        executor.settle_reductions()
        divisor = micro_batches * (self._transport.world if self._plan.communication.average else 1)
        norm_of_sum, present = self._agree()
        norm = norm_of_sum / divisor
        applied = math.isfinite(norm)
        coefficient = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 and applied else 1.0
        if applied:
            self._hand_over(coefficient / divisor, present)
            self.running = True
            try:
                self.optimizer.step()
            finally:
                self.running = False
            for piece in self._pieces:
                piece.values.grad = None
            executor.publish()
        self.discard()
        return StepOutcome(norm, coefficient, applied)

    def discard(self) -> None:
        """Forget the gradients of this accumulation window."""
        for gradients in self._gradients:
            gradients.clear()

    def forget(self) -> None:
        """Drop everything that keeps tensors alive."""
        self._gradients = []
        self._pieces = []

    def _agree(self) -> tuple[float, dict[str, bool]]:
        """Global norm of the summed gradients, and which parameters had a gradient on any rank, in one exchange.

        Squares are added over this rank's shards in fp64, then over ranks in rank order, at every stage alike.
        """
        names, flags, square = [], [], 0.0
        for gradients in self._gradients:
            names += [slot.name for slot in gradients.flat.layout.slots]
            flags += gradients.present
            if gradients.has_sum:
                square += float(torch.linalg.vector_norm(gradients.reduced_shard(), dtype=_wide(gradients))) ** 2
        words = [sum(1 << bit for bit, f in enumerate(flags[i : i + _BITS]) if f) for i in range(0, len(flags), _BITS)]
        rows = self._transport.exchange(
            torch.tensor([square, *words], dtype=torch.float64), "exchange of the gradient norm"
        ).tolist()
        total = 0.0
        for row in rows:
            total += row[0]
        merged = [0] * len(words)
        for row in rows:
            merged = [a | int(b) for a, b in zip(merged, row[1:], strict=True)]
        present = {name: bool(merged[i // _BITS] >> (i % _BITS) & 1) for i, name in enumerate(names)}
        return math.sqrt(total), present

    def _hand_over(self, factor: float, present: Mapping[str, bool]) -> None:
        """Point each piece at its part of the reduced gradient, scaled. Without a gradient anywhere it has none."""
        ready: dict[int, torch.Tensor] = {}
        for gradients in self._gradients:
            if not gradients.has_sum:
                continue
            flat = gradients.flat
            reduced = gradients.reduced if not flat.layout.optim_sharded else gradients.reduced_shard()
            if reduced.dtype != flat.master_dtype:
                reduced = reduced.to(flat.master_dtype)
            if factor != 1.0:
                reduced.mul_(factor)
            ready[id(flat)] = reduced
        for piece in self._pieces:
            gradient = ready.get(id(piece.flat))
            if gradient is None or not present[piece.name]:
                piece.values.grad = None
                continue
            part = gradient[piece.start : piece.start + piece.values.numel()]
            piece.values.grad = part.view(piece.values.shape)


def _wide(gradients: FlatGradients) -> torch.dtype:
    return torch.complex128 if gradients.accumulate.is_complex else torch.float64
