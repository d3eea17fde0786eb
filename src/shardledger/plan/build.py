"""From what the user asked (config) and what the model is (spec) to the plan. Every knob is read here, once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches

from shardledger.config import Config
from shardledger.errors import PlanError
from shardledger.plan.offload import build_offload
from shardledger.plan.plan import Communication, LossScale, Plan, Precision, Reporting, StepRule, UnitPlan
from shardledger.plan.roles import STAGE_ROLES, Role
from shardledger.plan.spec import REAL_FLOATS, ModelSpec
from shardledger.plan.units import ROOT, find_units, large_tables, leaf_paths

ALIGNMENT = 8
"""Elements: 16 bytes of bf16, the width NCCL copies at full speed."""

REPRODUCIBLE_ALIGNMENT = 64
"""Elements: a multiple of two vectors of the widest CPU instruction set, the step of torch's vectorised loops."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def build_plan(config: Config, model: ModelSpec, *, world: int) -> Plan:
    """Decide. Pure: the same arguments give the same plan on every rank.

    Raises:
        PlanError: the model has no parameters, or ``shardledger.units`` names no class of it.
    """
    if not model.parameters:
        raise PlanError(f"{model.class_name} has no parameters: there is nothing to train or to shard.")
    if config.shardledger.reproducible and world & (world - 1):
        raise PlanError(
            f"shardledger.reproducible needs 1, 2, 4, 8, ... ranks, not {world}: only then do micro-batches and ranks "
            f"form one binary tree. Change the number of ranks, or remove the key."
        )
    zero = config.zero_optimization
    sharded = STAGE_ROLES[zero.stage]
    leaves = leaf_paths(model, zero.leaf_module)
    found = find_units(model, config.shardledger.units, leaves)
    tables = _tables(config, model, found)
    units = _units(config, found, tables)
    precision = _precision(config, sharded)
    # Found at every stage, so that one configuration lays parameters out alike, and computes the same bits, at all.
    persistent = _persistent(config, model)
    return Plan(
        model_digest=model.digest,
        stage=zero.stage,
        world=world,
        units=units,
        leaves=tuple(module.parameters for module in model.modules if module.path in leaves),
        persistent=persistent,
        alignment=REPRODUCIBLE_ALIGNMENT if config.shardledger.reproducible else ALIGNMENT,
        reproducible=config.shardledger.reproducible,
        precision=precision,
        communication=_communication(config, model, units, tables),
        step=StepRule(
            micro_batch=config.train_micro_batch_size_per_gpu,
            accumulation=config.gradient_accumulation_steps,
            clip_norm=config.gradient_clipping,
            norm=config.shardledger.gradient_clipping_norm,
            raise_on_nonfinite=config.shardledger.nonfinite == "raise",
            max_consecutive_skips=config.shardledger.max_consecutive_skips,
            full_checks=config.shardledger.checks == "full",
        ),
        reporting=Reporting(every=config.steps_per_print, breakdown=config.wall_clock_breakdown),
        offload=build_offload(config, model),
        reasons=_reasons(config, model, units, tables, persistent),
    )


def _tables(config: Config, model: ModelSpec, found: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
    """Paths of the tables outside the blocks that became units without having been named."""
    if config.shardledger.units is not None:
        return ()
    large = large_tables(model)
    return tuple(path for path, _ in found if path in large)


def _units(config: Config, found: Sequence[tuple[str, tuple[str, ...]]], tables: Sequence[str]) -> tuple[UnitPlan, ...]:
    """Units with what each shards and whether it is recomputed: all alike, unless the configuration names some.

    ``tables`` are never recomputed: all that a matrix product or a look-up keeps is its inputs.

    Raises:
        PlanError: ``shardledger.unit_stages`` or ``recomputed_units`` names a unit that the model does not have.
    """
    own = config.shardledger
    alike = UnitPlan(path=ROOT, parameters=(), sharded=STAGE_ROLES[config.zero_optimization.stage])
    plans = [replace(alike, path=path, parameters=names) for path, names in found]
    blocks = [unit.label for unit in plans if unit.path != ROOT]
    lowered = own.unit_stages or {}
    recomputed = (own.recomputed_units or blocks) if own.activation_checkpointing else ()
    _check_labels("unit_stages", lowered, [unit.label for unit in plans])
    _check_labels("recomputed_units", recomputed, blocks)
    return tuple(
        replace(
            unit,
            sharded=STAGE_ROLES[lowered[unit.label]] if unit.label in lowered else unit.sharded,
            recompute=unit.label in recomputed and unit.path not in tables,
        )
        for unit in plans
    )


def _check_labels(key: str, named: Iterable[str], known: Sequence[str]) -> None:
    for label in named:
        if label not in known:
            near = get_close_matches(label, known, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise PlanError(
                f"shardledger.{key} names the unit {label!r}, which this model does not have.{hint} Its units: "
                f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}."
            )


def _precision(config: Config, sharded: frozenset[Role]) -> Precision:
    """fp32 gradients wherever sums must not round: across ranks always, across micro-batches when there are several."""
    compute = _DTYPES[config.precision]
    asked = config.data_types.grad_accum_dtype
    accumulate = _DTYPES[asked] if asked else "float32"
    local = accumulate
    if not asked and Role.OPTIM in sharded and Role.GRAD not in sharded and config.gradient_accumulation_steps == 1:
        local = compute
    wire = config.communication_data_type
    return Precision(
        compute=compute,
        accumulate=accumulate,
        local_accumulate=local,
        wire=_DTYPES[wire] if wire else compute,
        cast_inputs=config.shardledger.cast_inputs and compute != "float32",
        autocast=_DTYPES[config.torch_autocast.dtype] if config.torch_autocast.enabled else None,
        loss_scale=_loss_scale(config) if compute == "float16" else None,
    )


def _loss_scale(config: Config) -> LossScale:
    fp16 = config.fp16
    return LossScale(
        dynamic=fp16.loss_scale == 0,
        initial=fp16.loss_scale or 2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _persistent(config: Config, model: ModelSpec) -> frozenset[str]:
    """Small parameters that stay gathered at stage 3, in model order, as DeepSpeed's two thresholds say."""
    zero = config.zero_optimization
    threshold = zero.param_persistence_threshold or 0
    budget = zero.model_persistence_threshold
    kept: set[str] = set()
    total = 0
    if threshold <= 0:
        return frozenset()
    for spec in model.parameters:
        if spec.numel <= threshold and (budget is None or total + spec.numel <= budget):
            kept.add(spec.name)
            total += spec.numel
    return frozenset(kept)


def _communication(
    config: Config, model: ModelSpec, units: tuple[UnitPlan, ...], tables: Sequence[str]
) -> Communication:
    zero = config.zero_optimization
    numel = {p.name: p.numel for p in model.parameters}
    # Tables are reduced in buckets as large as a block, so that what stages them sets no peak of its own.
    largest = max(sum(numel[name] for name in unit.parameters) for unit in units if unit.path not in tables)
    bucket = zero.reduce_bucket_size
    return Communication(
        reduce_bucket_numel=max(1, min(bucket, largest) if bucket is not None else largest),
        overlap=zero.overlap_comm is not False,
        prefetch=config.shardledger.prefetch and zero.prefetch_bucket_size != 0,
        max_live_numel=zero.max_live_parameters if zero.max_live_parameters is not None else model.numel,
        average=config.gradient_allreduce_op == "mean",
        timeout_s=config.shardledger.timeout_s,
        wire=config.shardledger.transport or "auto",
    )


def _reasons(
    config: Config, model: ModelSpec, units: tuple[UnitPlan, ...], tables: Sequence[str], persistent: frozenset[str]
) -> tuple[str, ...]:
    reasons = list(config.resolutions)
    blocks = len(units) - 1 - len(tables)
    reasons.append(
        f"{model.class_name}: {model.numel:,} parameters in {blocks} repeated block(s) and the root unit"
        if blocks
        else f"{model.class_name}: {model.numel:,} parameters in one unit (no repeated blocks; name some in shardledger.units)"
    )
    if tables:
        numel = {p.name: p.numel for p in model.parameters}
        sizes = ", ".join(
            f"{unit.path} ({sum(numel[name] for name in unit.parameters):,})" for unit in units if unit.path in tables
        )
        reasons.append(
            f"tables outside the blocks, large beside one: {sizes}; each is a unit, gathered only while it is at work "
            f"(shardledger.units with the class of the blocks alone puts them into the root unit)"
        )
    other = sorted({p.dtype for p in model.parameters} & REAL_FLOATS - {_DTYPES[config.precision]})
    if other:
        reasons.append(f"parameters of dtype {', '.join(other)} are trained in {config.precision}, as the config says")
    if persistent and config.zero_optimization.stage == 3:
        share = sum(p.numel for p in model.parameters if p.name in persistent) / max(1, model.numel)
        reasons.append(
            f"stage3_param_persistence_threshold keeps {len(persistent)} of {len(model.parameters)} parameters gathered "
            f"({share:.0%} of the elements): these are not sharded between steps"
        )
    return tuple(reasons)
