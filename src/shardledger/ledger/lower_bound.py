"""What a plan needs at least, before any batch has been seen: states, and the largest unit while it is computed with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from shardledger.layout.build import Layout
from shardledger.layout.flat import FlatLayout
from shardledger.ledger.offload import choice_of
from shardledger.ledger.predict import OptimizerBytes, drops_sum, gradient_bytes, state_bytes
from shardledger.ledger.row import Row
from shardledger.ledger.traffic import Wire, sent_bytes
from shardledger.plan.plan import Plan
from shardledger.plan.roles import STAGE_ROLES
from shardledger.plan.spec import DTYPE_BYTES

_STATES = ("params", "grads", "master", "optimizer")


def at_least(plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, *, one_memory: bool = True) -> Row:
    """A row that no run of the plan stays under; activations, buffers and temporaries are left out (0).

    From the second step on all states exist at the step. While a unit runs they do too, but for sums of sharded gradients
    before the first reduction of a window; at the end of its backward pass its full weights and full gradients exist
    besides, where they are sharded. ``one_memory``: ranks compute in host memory, so that what rests there
    counts.
    """
    states = state_bytes(plan, layout, optimizer, rank, one_memory=one_memory)
    largest, label = 0, ""
    for unit, flats in groupby(sorted(layout.flats, key=lambda flat: flat.unit), key=lambda flat: flat.unit):
        transient = sum(_transient(plan, flat) for flat in flats)
        if transient > largest:
            largest, label = transient, plan.units[unit].label
    dropped = 0
    if plan.step.accumulation == 1:
        sums = (flat for flat in layout.flats if drops_sum(plan, flat, one_memory=one_memory))
        dropped = sum(gradient_bytes(plan, flat).reduced for flat in sums)
    largest = max(0, largest - dropped)
    return Row(
        stage=plan.stage,
        unit_stages=(),
        recomputed_units=(),
        offload=choice_of(plan),
        checkpointing=any(unit.recompute for unit in plan.units),
        micro_batch=plan.step.micro_batch,
        **states,
        activations=0,
        communication=largest,
        temporary=0,
        framework=0,
        total=sum(states.values()) + largest,
        host_bytes=0,
        disk_bytes=0,
        peak_phase="backward",
        peak_unit=label,
        sent_bytes_per_step=_sent(plan, layout),
    )


def in_place_of(row: Row, others: Iterable[Row]) -> list[Row]:
    """``others`` (rows of ``at_least``) with the activations, temporaries and framework of ``row``, which was measured.

    Communication is that of ``others``, and what ``row`` had beyond the least of its own plan.
    """
    bounds: Mapping[tuple[int, str], Row] = {(other.stage, other.offload): other for other in others}
    own = bounds.get((row.stage, row.offload))
    beyond = max(0, row.communication - own.communication) if own is not None else row.communication
    made = []
    for other in bounds.values():
        if other is own:
            continue
        filled = replace(
            other,
            checkpointing=row.checkpointing,
            micro_batch=row.micro_batch,
            activations=row.activations,
            communication=other.communication + beyond,
            temporary=row.temporary,
            framework=row.framework,
        )
        total = sum(
            getattr(filled, name) for name in (*_STATES, "activations", "communication", "temporary", "framework")
        )
        made.append(replace(filled, total=total))
    return made


def _transient(plan: Plan, flat: FlatLayout) -> int:
    """Bytes of one flat that exist only while its unit is at work."""
    weight = DTYPE_BYTES[flat.dtype]
    weights = flat.padded_numel * weight if flat.param_sharded else 0
    if not flat.trainable or not (flat.grad_sharded or plan.reproducible):
        return weights
    wide = flat.dtype not in ("float32", "bfloat16", "float16")
    gradient = weight if wide else DTYPE_BYTES[plan.precision.local_accumulate]
    # Where one micro-batch is reduced at a time, gradients arrive in the dtype of the weights and are widened on the way.
    return weights + flat.padded_numel * min(weight, gradient)


def _sent(plan: Plan, layout: Layout) -> int:
    total = 0
    for stage, roles in STAGE_ROLES.items():
        flats = [flat for flat in layout.flats if plan.units[flat.unit].sharded == roles]
        wire = Wire(
            trained=sum(flat.padded_numel for flat in flats if flat.trainable),
            frozen=sum(flat.padded_numel for flat in flats if not flat.trainable),
            weight_bytes=DTYPE_BYTES[plan.precision.compute],
            gradient_bytes=DTYPE_BYTES[plan.precision.wire],
            sum_bytes=DTYPE_BYTES[plan.precision.accumulate],
            accumulation=plan.step.accumulation,
        )
        total += sent_bytes(stage, plan.world, wire)
    return total
