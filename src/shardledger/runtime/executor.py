"""Performs the schedule's actions: gathers, waits, releases, reduces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from shardledger.errors import EngineStateError
from shardledger.plan.plan import Plan
from shardledger.runtime.census import transient_bytes
from shardledger.runtime.describe import dtype_of
from shardledger.runtime.gradients import FlatGradients
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.schedule import Act, Action
from shardledger.runtime.shards import Shards
from shardledger.runtime.states import GradState, ParamState
from shardledger.runtime.unit import Unit
from shardledger.transport import ReduceHow, Transport, Work

_KEPT_IN_FLIGHT = 2
"""Reductions at once of gradients that stay in place: each has a receive buffer. Of those that do not stay, only one unit's
are under way: each holds a full gradient too, beside the one that backward is filling."""


@dataclass
class _Reduction:
    gradients: FlatGradients
    label: str
    target: torch.Tensor
    work: Work


class Executor:
    """Moves units between their states. Knows tensors and transport; decides nothing."""

    def __init__(self, units: Sequence[Unit], transport: Transport, plan: Plan) -> None:
        self.units = units
        self.sync = True
        """Whether backward passes end in a reduction (not inside ``no_sync``)."""
        self.boundary = True
        """Whether the current micro-batch is the last one before the step."""
        self.measuring = True
        """Whether to keep track of the peak of transient bytes: in the first steps, the rest are alike."""
        self.peak_transient_bytes = 0
        """Most bytes of gathered parameters and unreduced gradients alive at once, beside the states."""
        self._transport = transport
        self._plan = plan
        self._wire = dtype_of(plan.precision.wire)
        self._pins: dict[int, int] = {}
        self._gathers: dict[int, list[Work]] = {}
        self._reductions: deque[_Reduction] = deque()
        self._replications: list[Work] = []
        self.shards: Shards | None = None
        """Brings shards that rest away from the device; None where all are on it."""

    def perform(self, actions: Iterable[Action], *, after_failure: bool = False) -> None:
        """Do what the schedule said, in order.

        Raises:
            EngineStateError: something has written to a gathered parameter that is to be released.
        """
        for action in actions:
            unit = self.units[action.unit]
            if action.act is Act.WAIT:
                self._wait(unit)
            elif action.act is Act.GATHER:
                self._gather(unit)
            elif action.act is Act.SETTLE:
                self.finish_reductions()
            elif action.act is Act.RELEASE:
                edited = None if after_failure else self._edited(unit)
                self._release(unit)
                if edited is not None:
                    raise self._lost_edit(unit, edited)
            elif action.act is Act.REDUCE and self.sync:
                for gradients in unit.gradients:
                    if self.boundary or not gradients.keeps_local:
                        self._reduce(gradients, unit.label)

    def finish_reductions(self) -> None:
        """Wait for every reduction under way; what follows one (replication, a way to the host) goes on."""
        while self._reductions:
            self._finish_reduction()

    def settle_reductions(self) -> None:
        """Wait for every reduction under way, and for the replication of reduced gradients that follows at stage 0."""
        self.finish_reductions()
        for work in self._replications:
            work.wait()
        self._replications.clear()
        for unit in self.units:
            for gradients in unit.gradients:
                gradients.settle()

    def complete(self) -> None:
        """Before the step: everything is reduced, folded and, where every rank updates everything, on every rank."""
        self.settle_reductions()
        for unit in self.units:
            for gradients in unit.gradients:
                gradients.fold()
                if gradients.partial is not None and not gradients.flat.layout.optim_sharded:
                    self._replications.append(self._transport.all_gather(gradients.reduced, unit.label))
        self.settle_reductions()

    def publish(self) -> None:
        """After the optimizer: bring the new weights from the masters to the full flats of every rank."""
        works = []
        for unit in self.units:
            for flat in unit.flats:
                if flat.layout.trainable and not flat.layout.param_sharded:
                    flat.publish()
                    works += self.replicate(flat, unit.label)
        for work in works:
            work.wait()

    def replicate(self, flat: FlatParameters, label: str) -> list[Work]:
        """Start bringing every rank's new weights to all ranks, where each rank has a part of them."""
        if not flat.layout.trainable or flat.layout.param_sharded or not flat.layout.optim_sharded:
            return []
        return [self._transport.all_gather(flat.full, label)]

    def reduce_everything(self) -> None:
        """Reduce every trainable flat, whether or not this rank has gradients for it; collective."""
        for unit in reversed(self.units):
            for gradients in unit.gradients:
                self._reduce(gradients, unit.label)

    def late(self) -> list[int]:
        """Units with gradients that came after their reduction was launched."""
        return [unit.index for unit in self.units if any(g.state is GradState.PENDING for g in unit.gradients)]

    def drain(self) -> None:
        """After a failure: forget what was under way. Errors of the dead collectives add nothing to the first one."""
        works = [w for works in self._gathers.values() for w in works]
        works += [r.work for r in self._reductions] + self._replications
        self._gathers.clear()
        self._reductions.clear()
        self._replications.clear()
        for work in works:
            try:
                work.wait()
            except RuntimeError:
                continue

    def settle(self) -> None:
        """Wait for everything under way.

        Raises:
            TransportError: it did not come.
        """
        for works in list(self._gathers.values()):
            for work in works:
                work.wait()
        self.settle_reductions()

    def forget(self) -> None:
        """Let go of what is under way without waiting for it."""
        self.shards = None
        self._gathers.clear()
        self._reductions.clear()
        self._replications.clear()

    @property
    def pinned(self) -> bool:
        """Whether any unit is held full by ``pin``."""
        return bool(self._pins)

    def pin(self, unit: Unit) -> None:
        """Gather a unit, if it is not, and keep it full until ``unpin``; collective."""
        self._pins[unit.index] = self._pins.get(unit.index, 0) + 1
        if unit.sharded_flats:
            self._gather(unit)
            self._wait(unit)

    def unpin(self, unit: Unit) -> None:
        """End one ``pin``; the last one releases the unit."""
        self._pins[unit.index] -= 1
        if not self._pins[unit.index]:
            del self._pins[unit.index]
            if unit.sharded_flats:
                self._release(unit)

    def _gather(self, unit: Unit) -> None:
        if unit.state is not ParamState.SHARDED:
            return  # pinned
        unit.move(ParamState.GATHERING)
        works = []
        for flat in unit.sharded_flats:
            flat.allocate()
            if self.shards is not None:
                self.shards.fill(flat)
            elif flat.shard is not None:
                flat.interval_of(flat.full).copy_(flat.shard)
            works.append(self._transport.all_gather(flat.full, unit.label))
        self._gathers[unit.index] = works
        self.measure()

    def _wait(self, unit: Unit) -> None:
        if unit.state is ParamState.FULL:
            return
        for work in self._gathers.pop(unit.index, ()):
            work.wait()
        unit.move(ParamState.FULL)
        for flat in unit.sharded_flats:
            flat.expose()

    def _release(self, unit: Unit) -> None:
        if unit.index in self._pins:
            return
        for work in self._gathers.pop(unit.index, ()):
            work.wait()
        if unit.state is ParamState.SHARDED:
            return
        unit.move(ParamState.SHARDED)
        for flat in unit.sharded_flats:
            flat.release()

    def _edited(self, unit: Unit) -> str | None:
        """Name of a parameter that was written to while the unit was gathered for a pass."""
        if unit.state is not ParamState.FULL or unit.index in self._pins:
            return None
        names = (flat.edited(thorough=self.measuring) for flat in unit.sharded_flats)
        return next((name for name in names if name is not None), None)

    def _lost_edit(self, unit: Unit, name: str) -> EngineStateError:
        return EngineStateError(
            f"parameter {name!r} was written to while unit {unit.label} was gathered for its forward or backward pass at "
            f"{self._transport.where}. That copy is dropped now, so the change would be lost. Write to it between steps "
            f"inside shardledger.GatheredParameters(p, modifier_rank=0), keep such values in a buffer, or keep the "
            f"parameter whole (stage 2, or stage3_param_persistence_threshold)."
        )

    def _reduce(self, gradients: FlatGradients, label: str) -> None:
        while self._reductions and self._crowded(gradients):
            self._finish_reduction()
        if any(r.gradients is gradients for r in self._reductions):
            self.settle_reductions()
        local = gradients.ready_to_reduce()
        self.measure()
        target, accumulate = gradients.target()
        wide = local.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        how = ReduceHow(
            wire=local.dtype if wide else self._wire,
            accumulate=accumulate,
            bucket_numel=self._plan.communication.reduce_bucket_numel,
            label=label,
        )
        work = self._transport.reduce_scatter(local, target, how)
        self._reductions.append(_Reduction(gradients, label, target, work))
        if not self._plan.communication.overlap:
            self.settle_reductions()

    def _crowded(self, next_one: FlatGradients) -> bool:
        """Whether the oldest reduction must end before ``next_one`` is reduced."""
        if next_one.keeps_local:
            return len(self._reductions) >= _KEPT_IN_FLIGHT
        return self._reductions[0].gradients.flat.layout.unit != next_one.flat.layout.unit

    def _finish_reduction(self) -> None:
        reduction = self._reductions.popleft()
        reduction.work.wait()
        gradients = reduction.gradients
        gradients.finished(reduction.target)
        if not gradients.flat.layout.optim_sharded and gradients.partial is None:
            self._replications.append(self._transport.all_gather(gradients.reduced, reduction.label))

    def measure(self) -> None:
        """Note what is gathered and unreduced now."""
        if self.measuring:
            self.peak_transient_bytes = max(self.peak_transient_bytes, transient_bytes(self.units))
