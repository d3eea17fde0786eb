"""The dry run: the real engine over fake tensors, at any world size, in one process that allocates nothing.

Model, hooks, schedule, executor, gradients, optimizer and transport are those of a run; tensors have shapes and no
values, messages arrive at once. What is read off is where memory goes: see ``observe``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardledger.layout.build import Layout
from shardledger.ledger import STATE_CATEGORIES, OptimizerBytes
from shardledger.plan.plan import Plan
from shardledger.plan.roles import Role
from shardledger.runtime.assemble import Parts, assemble
from shardledger.runtime.census import dropped_bytes
from shardledger.runtime.engine import Engine
from shardledger.runtime.observe import Observer
from shardledger.runtime.optimizer import (
    Groups,
    Recipe,
    build_optimizer,
    make_pieces,
    needs_whole_parameters,
    recipe_class,
)
from shardledger.runtime.placement import Site
from shardledger.runtime.step import FLAGS_PER_NUMBER, Stepper
from shardledger.telemetry.live import LiveBytes, Reading
from shardledger.telemetry.memory import MemoryMeter
from shardledger.transport.dry import dry_transport

_MOST_CUTS = 8
"""World size up to which stage 0 has its parameters cut as in a run."""
_OF_ALL = "_shardledger_of_all"
"""Attribute of a tensor that says whether all elements of another are true."""
_STEPS = 2
"""In the first the optimizer makes its states and the schedule learns the order of units; the second is like the rest."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What to run dry. The callables are called under fake tensors."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Any, ...]]
    """Arguments of one micro-batch."""
    loss_of: Callable[[Any], torch.Tensor]
    plan: Plan
    layout: Layout
    recipe: Recipe
    groups: Groups
    device: str = "cpu"
    """``"cpu"``: ranks talk over the plan's ``wire`` and the model as it comes counts. Else: over NCCL, and the model
    comes from the host."""
    rank: int = 0


@dataclass(frozen=True)
class DryRun:
    """What a dry run found, on one rank."""

    peaks: dict[str, Reading]
    """The highest reading of each phase."""
    rest: dict[str, int]
    """Bytes by category after a step."""
    timeline: tuple[tuple[str, str, int], ...]
    """One step: phase, unit and most bytes of every stay of the program in a unit, in order."""
    account: dict[str, int]
    """What ``engine.ledger()`` measures in a run, except for the process: states at rest, and the most that the forward
    pass kept and that was gathered or unreduced at once."""
    arrived: int
    """Bytes of the model as it came, where it lies on the ranks' own device."""
    optimizer_bytes: OptimizerBytes
    """What the optimizer keeps per element and piece."""
    sent_bytes_per_step: int

    @property
    def highest(self) -> Reading:
        """The peak."""
        return max(self.peaks.values(), key=lambda reading: reading.total)


class _DryEngine(Engine):
    """Takes its own order of reductions for rank 0's."""

    def _agree_on_order(self, parts: Parts) -> None:
        mine = parts.schedule.reduce_order
        super()._agree_on_order(parts)  # what it allocates and sends counts; what it receives has no values
        seen = [unit for unit in parts.schedule.completed if unit in mine]
        parts.schedule.reduce_order = (*seen, *(unit for unit in mine if unit not in seen))


class _DryStepper(Stepper):
    """Agrees with ranks that hold what this one holds."""

    def _agree(self, weight: float) -> tuple[float, float, dict[str, bool]]:
        names, flags = [], []
        for gradients in self._gradients:
            names += [slot.name for slot in gradients.flat.layout.slots]
            flags += gradients.present
        self._local_square()
        self._transport.exchange(torch.zeros(2 + ceil(len(flags) / FLAGS_PER_NUMBER), dtype=torch.float64), "dry run")
        return 1.0, weight * self._transport.world, dict(zip(names, flags, strict=True))


def dry_run(rehearsal: Rehearsal) -> DryRun:
    """Run the engine without values until its steps are alike, and say where memory went.

    Raises:
        PlanError: the model cannot be run on fake tensors.
    """
    meter = LiveBytes(scalar=_answer, note=_note)
    with warnings.catch_warnings(), _taken_for_real(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        model = rehearsal.make_model()
        if rehearsal.device == "cpu":
            meter.assign("params", (*model.parameters(), *model.buffers()))
        else:
            meter.ignore((*model.parameters(), *model.buffers()))
        with meter:
            return _rehearse(rehearsal, model, meter)


def _rehearse(rehearsal: Rehearsal, model: nn.Module, meter: LiveBytes) -> DryRun:
    plan = rehearsal.plan
    micro_batches = plan.step.accumulation if plan.reproducible else min(2, plan.step.accumulation)
    shorter = replace(plan, step=replace(plan.step, accumulation=micro_batches, full_checks=False))
    arrived = meter.total
    engine = _engine(rehearsal, shorter, model)
    observer = Observer(meter)
    observer.attach(engine)
    counters = engine._live().transport.counters
    try:
        for _ in range(_STEPS):
            meter.peaks.timeline.clear()
            sent = [_sent(counters)]
            for _ in range(micro_batches):
                observer.micro_batch(rehearsal.make_batch, rehearsal.loss_of)
                sent.append(_sent(counters))
    finally:
        observer.detach()
    rest = meter.reading().by_category
    # The micro-batches between the first and the last send what the first sends.
    between = (plan.step.accumulation - micro_batches) * (sent[1] - sent[0])
    extra = _step_counters(engine)
    rest["optimizer"] += extra
    account = {category: rest[category] for category in STATE_CATEGORIES}
    account["grads"] += dropped_bytes(engine._live().units)
    account["activations"] = engine._account.activations.peak_bytes
    account["communication"] = engine._live().executor.peak_transient_bytes
    return DryRun(
        peaks={phase: _with(reading, extra) for phase, reading in meter.peaks.readings.items()},
        rest=rest,
        timeline=tuple((phase, unit, nbytes + extra) for phase, unit, nbytes in meter.peaks.timeline),
        account=account,
        arrived=arrived,
        optimizer_bytes=engine._account.optimizer_bytes,
        sent_bytes_per_step=sent[-1] - sent[0] + between,
    )


def _engine(rehearsal: Rehearsal, plan: Plan, model: nn.Module) -> Engine:
    transport = dry_transport(rehearsal.rank, plan.world, rehearsal.device, plan.communication.wire)
    here = torch.device("cpu")
    parts = assemble(Site(model, plan, rehearsal.layout, transport, here, stands_for=rehearsal.device))
    whole = needs_whole_parameters(recipe_class(rehearsal.recipe)) or _too_many_pieces(plan)
    pieces = make_pieces(parts.units, whole=whole)
    optimizer = build_optimizer(rehearsal.recipe, rehearsal.groups, pieces)
    stepper = _DryStepper(parts.units, pieces, optimizer, transport, plan)
    return _DryEngine(model, plan, rehearsal.layout, parts, optimizer, stepper, MemoryMeter("cpu"))


def _too_many_pieces(plan: Plan) -> bool:
    """Whether parameters stay in one that a run would cut where the shards of other stages end.

    A cut costs a step counter, which is added afterwards, and a run of Python for each piece, which is not.
    """
    return plan.world > _MOST_CUTS and not plan.is_sharded(Role.OPTIM)


def _step_counters(engine: Engine) -> int:
    """Bytes of the step counters of the pieces that were not cut."""
    if not _too_many_pieces(engine.plan) or engine._account.optimizer_bytes.whole:
        return 0
    pieces = slots = 0
    for flat in engine.layout.flats:
        if flat.trainable:
            pieces += sum(1 for rank in range(flat.world) for _ in flat.pieces(rank))
            slots += sum(slot.numel > 0 for slot in flat.slots)
    return (pieces - slots) * engine._account.optimizer_bytes.per_piece


def _with(reading: Reading, extra: int) -> Reading:
    """A reading with more bytes of optimizer states."""
    if reading.phase == "init" or not extra:
        return reading
    by_category = {**reading.by_category, "optimizer": reading.by_category["optimizer"] + extra}
    return replace(reading, total=reading.total + extra, by_category=by_category)


def _sent(counters: Any) -> int:
    return sum(traffic.bytes for traffic in counters.traffic.values())


def _answer(tensor: torch.Tensor) -> Any:
    """The value of a tensor that has none: whether *all* are so, yes (a batch without padding, say); whether *any*, no."""
    if tensor.dtype == torch.bool:
        return bool(getattr(tensor, _OF_ALL, False))
    return 1.0 if tensor.dtype.is_floating_point else 1


def _note(func: Any, result: Any) -> None:
    if func.overloadpacket is torch.ops.aten.all and isinstance(result, torch.Tensor):
        setattr(result, _OF_ALL, True)


@contextmanager
def _taken_for_real() -> Iterator[None]:
    """transformers asks whether tensors are fake, and then goes the way of a traced graph, which no run goes."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    asked = getattr(module, "is_fake_tensor", None)
    if asked is None:
        yield
        return
    module.is_fake_tensor = lambda value: False
    try:
        yield
    finally:
        module.is_fake_tensor = asked
