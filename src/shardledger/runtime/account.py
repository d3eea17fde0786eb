"""The ledger of one rank: predicted from the layout, measured from live storages."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from shardledger.layout.build import Layout
from shardledger.ledger import CATEGORIES, OptimizerBytes, state_bytes
from shardledger.plan.plan import Plan
from shardledger.runtime.activations import ActivationMeter
from shardledger.runtime.assemble import Parts, weights_of
from shardledger.runtime.census import state_census
from shardledger.telemetry.memory import MemoryMeter


@dataclass
class Account:
    """Keeps what measuring needs."""

    plan: Plan
    layout: Layout
    meter: MemoryMeter
    optimizer_bytes: OptimizerBytes
    activations: ActivationMeter = field(default_factory=ActivationMeter)

    def watch_forward(self, parts: Parts) -> AbstractContextManager[None]:
        """Measure the activations of the forward pass inside."""
        return self.activations.watch(weights_of(parts.units))

    def ledger(self, parts: Parts, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int | None]]:
        """Bytes by category and their total; None where there is no prediction."""
        predicted: dict[str, int | None] = dict.fromkeys((*CATEGORIES, "total"))
        predicted.update(state_bytes(self.plan, self.layout, self.optimizer_bytes, parts.transport.rank))
        known: dict[str, int] = {
            **state_census(parts.units, optimizer),
            "activations": self.activations.peak_bytes,
            "communication": parts.executor.peak_transient_bytes,
            "framework": self.meter.baseline_bytes,
        }
        total = self.meter.peak_bytes()
        known["temporary"] = max(0, total - sum(known.values()))
        measured: dict[str, int | None] = {category: known[category] for category in CATEGORIES}
        return {"predicted": predicted, "measured": {**measured, "total": total}}
