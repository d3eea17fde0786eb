"""The ledger of one rank: predicted from the layout, measured from live storages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardledger.layout.build import Layout
from shardledger.ledger import CATEGORIES, OptimizerBytes, state_bytes
from shardledger.ledger.offload import choice_of
from shardledger.ledger.predict import tiers
from shardledger.ledger.row import Row
from shardledger.plan.plan import Plan
from shardledger.runtime.activations import ActivationMeter
from shardledger.runtime.assemble import Parts, weights_of
from shardledger.runtime.census import dropped_bytes, pending_bytes, state_census, transient_bytes
from shardledger.runtime.out_of_memory import Shortage, asked_bytes
from shardledger.telemetry.memory import MemoryMeter


@dataclass
class Account:
    """Keeps what measuring needs."""

    plan: Plan
    layout: Layout
    meter: MemoryMeter
    optimizer_bytes: OptimizerBytes
    activations: ActivationMeter = field(default_factory=ActivationMeter)

    def begin_forward(self, parts: Parts) -> ActivationMeter:
        """Measure the activations of the forward pass that begins."""
        self.activations.begin(weights_of(parts.units))
        return self.activations

    def _states(self, parts: Parts) -> dict[str, int]:
        one_memory = parts.offload is None or parts.offload.link is None
        return state_bytes(self.plan, self.layout, self.optimizer_bytes, parts.transport.rank, one_memory=one_memory)

    def shortage(self, error: BaseException, phase: str, parts: Parts, optimizer: torch.optim.Optimizer) -> Shortage:
        """What is live now, beside the prediction, when ``error`` says that memory ran out."""
        predicted: dict[str, int | None] = dict.fromkeys((*CATEGORIES, "total"))
        predicted.update(self._states(parts))
        live: dict[str, int] = {
            **state_census(parts.units, optimizer),
            "communication": transient_bytes(parts.units),
            "framework": self.meter.baseline_bytes,
        }
        live["grads"] -= pending_bytes(parts.units)
        total = self.meter.current_bytes()
        live["activations"] = max(0, total - sum(live.values()))
        wanted = asked_bytes(error)
        unit = parts.units[parts.schedule.at_work].label if phase != "step" else "(optimizer)"
        found = ()
        if parts.advise is not None:
            row = Row(
                stage=self.plan.stage,
                offload=choice_of(self.plan),
                checkpointing=any(unit.recompute for unit in self.plan.units),
                micro_batch=self.plan.step.micro_batch,
                **{**live, "activations": live["activations"] + (wanted or 0)},
                temporary=0,
                total=sum(live.values()) + (wanted or 0),
                host_bytes=0,
                disk_bytes=0,
                peak_phase=phase,
                peak_unit=unit,
                sent_bytes_per_step=0,
            )
            found = tuple(parts.advise(row, sum(live.values())))
        return Shortage(
            rank=parts.transport.rank,
            step=parts.progress.global_steps + parts.progress.skipped_steps + 1,
            phase=phase,
            unit=unit,
            asked_bytes=wanted,
            live={**live, "total": total},
            predicted=predicted,
            remedies=found,
        )

    def ledger(self, parts: Parts, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int | None]]:
        """Bytes by category and their total; None where there is no prediction."""
        predicted: dict[str, int | None] = dict.fromkeys((*CATEGORIES, "total"))
        predicted.update(self._states(parts))
        known: dict[str, int] = {
            **state_census(parts.units, optimizer),
            "activations": self.activations.peak_bytes,
            "communication": parts.executor.peak_transient_bytes + staging_bytes(parts),
            "framework": self.meter.baseline_bytes,
        }
        known["grads"] += dropped_bytes(parts.units)  # held from the first reduction to the step
        total = self.meter.peak_bytes()
        known["temporary"] = max(0, total - sum(known.values()))
        measured: dict[str, int | None] = {category: known[category] for category in CATEGORIES}
        found = {"predicted": predicted, "measured": {**measured, "total": total}}
        return found if parts.offload is None else {**found, "away": self._away(parts)}

    def _away(self, parts: Parts) -> dict[str, int | None]:
        """Bytes that rest apart from the memory this rank computes in, and what moves them."""
        one_memory = parts.offload is not None and parts.offload.link is None
        found = tiers(self.plan, self.layout, self.optimizer_bytes, parts.transport.rank, one_memory=one_memory)
        return {
            "host": 0 if one_memory else sum(found.host.values()),
            "disk": sum(found.disk.values()),
            "disk_files": found.disk_file_bytes,
            "staging": staging_bytes(parts),
        }


def staging_bytes(parts: Parts) -> int:
    """Host memory that states pass through on their way between tiers."""
    return 0 if parts.offload is None else parts.offload.tile_plan.staging_bytes
