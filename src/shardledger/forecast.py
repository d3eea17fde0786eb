"""From a model and a configuration to the rows of a plan: the body of ``shardledger.plan``.

Each combination of stage, recomputation and micro-batch is one dry run of the engine (``runtime.dryrun``); offload is
arithmetic on top of it. Nothing is allocated, no process group is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardledger.config import Config, load_config
from shardledger.errors import ConfigError, PlanError
from shardledger.layout.build import Layout, build_layout
from shardledger.ledger.categories import CATEGORIES
from shardledger.ledger.fit import Situation
from shardledger.ledger.offload import Offloaded, choice_of, choices, offloaded, with_offload
from shardledger.ledger.recommend import Recommendation, recommend
from shardledger.ledger.row import Row
from shardledger.ledger.saves import SaveBytes, save_bytes
from shardledger.ledger.tier_traffic import tier_bytes
from shardledger.plan.build import build_plan
from shardledger.plan.plan import Plan
from shardledger.plan.roles import Role
from shardledger.plan.spec import ModelSpec
from shardledger.runtime.describe import describe
from shardledger.runtime.dryrun import DryRun, Rehearsal, dry_run
from shardledger.runtime.optimizer import OptimizerRecipe, check_recipe
from shardledger.telemetry.live import Reading
from shardledger.workload import find_model, loss_of
from shardledger.workload.adapters import train_adapters

DEFAULT_CONFIG: Mapping[str, Any] = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
"""What is planned without a configuration."""

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class Links:
    """What a recommendation reads beside memory; None: not known."""

    bandwidth: float | None = None
    """Bytes per second that a rank sends to others."""
    flops: float | None = None
    """Operations per second of a rank."""
    ranks_per_machine: int = 8
    task_samples: int | None = None
    """Samples there are to learn from."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned."""

    model: str | nn.Module | Callable[[], nn.Module]
    """A name (``gpt:SIZE``, ``package.module:function``, a Hugging Face ``config.json``), a module on any device, or a
    function that returns one."""
    config: Any = None
    """As for ``initialize``; None: bf16 and AdamW."""
    world: int
    micro_batches: tuple[int, ...] = ()
    """Samples per rank and micro-batch; empty: what the configuration says."""
    seq_len: int = 1024
    """Tokens per sample, for models that take tokens and targets."""
    batch: Any = None
    """Positional arguments of the model for one micro-batch: tensors (their values do not matter), or a function that
    returns them for a number of samples. None: int64 tokens and targets, both [micro-batch, seq_len]."""
    device: str = "cuda"
    """``"cuda"`` (ranks talk as NCCL's do, the model is made on the host) or ``"cpu"`` (gloo, and the model counts)."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    checkpointing: tuple[bool, ...] = (False, True)
    trainable: str = "all"
    """``"all"`` (as the model says) or ``"lora:r=16"``."""
    framework_bytes: int = 0
    """What the process has on the device before the model."""
    device_memory: int | None = None
    """Bytes of one device; None: nothing is recommended."""
    host_memory: int | None = None
    """Bytes of one machine."""
    links: Links = field(default_factory=Links)
    """How fast, and how much there is to learn from: for the recommendation."""
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """One dry run and what it was made from."""

    config: Config
    plan: Plan
    layout: Layout
    run: DryRun

    def saves(self, rank: int) -> SaveBytes:
        """What a checkpoint takes on ``rank``."""
        asynchronous = self.config.shardledger.checkpoint.asynchronous
        return save_bytes(self.layout, self.run.optimizer_bytes, rank, asynchronous=asynchronous)

    def while_saving(self, question: Question) -> Reading:
        """Live bytes during a save: states at rest, and on CPU ranks, whose device is the host, the copies of an
        asynchronous save. A synchronous one copies a unit into the writer's buffers, which are no tensors."""
        held = dict(self.run.rest)
        if question.device == "cpu" and self.config.shardledger.checkpoint.asynchronous:
            held["temporary"] += self.saves(question.rank).copied
        return Reading(sum(held.values()), held, "checkpoint", "")


@dataclass(frozen=True)
class Forecast:
    """The answer to a ``Question``."""

    spec: ModelSpec
    rows: tuple[Row, ...]
    runs: Mapping[tuple[int, bool, int], Rehearsed]
    """By stage, checkpointing and micro-batch."""
    notes: tuple[str, ...] = field(default=())
    """What could not be planned, and why."""
    recommended: Recommendation | None = None
    """What to take and why; None where no device memory was named."""


def forecast(question: Question) -> Forecast:
    """Plan every combination.

    Raises:
        ConfigError: the model's name or the configuration is wrong.
        PlanError: the model cannot be laid out, or not be run without values.
    """
    base = base_config(question)
    make_model = model_maker(question)
    spec = describe_model(make_model)
    rows: list[Row] = []
    notes: list[str] = []
    runs: dict[tuple[int, bool, int], Rehearsed] = {}
    micro_batches = question.micro_batches or (base.train_micro_batch_size_per_gpu,)
    for stage in question.stages:
        for checkpointing in question.checkpointing:
            for micro_batch in micro_batches:
                try:
                    config = variant(base, question.world, stage, checkpointing, micro_batch)
                    found = rehearse(question, config, spec, make_model)
                except ConfigError as error:
                    notes.append(f"stage {stage}: {error}")
                    break
                runs[stage, checkpointing, micro_batch] = found
                rows += rows_of(question, found)
    if not rows:
        same = {note.partition(": ")[2] for note in notes}
        raise ConfigError(*(same if len(same) == 1 else dict.fromkeys(notes)))
    answer = None if question.device_memory is None else recommend(rows, situation_of(question, base, spec))
    return Forecast(spec, tuple(rows), runs, tuple(dict.fromkeys(notes)), answer)


def situation_of(question: Question, base: Config, spec: ModelSpec) -> Situation:
    """What the rows must fit into."""
    assert question.device_memory is not None
    micro_batch = max(question.micro_batches or (base.train_micro_batch_size_per_gpu,))
    links = question.links
    return Situation(
        bandwidth=links.bandwidth,
        flops=links.flops,
        ranks_per_machine=links.ranks_per_machine,
        task_samples=links.task_samples,
        tokens=micro_batch * question.seq_len * base.gradient_accumulation_steps if question.batch is None else None,
        device_memory=question.device_memory,
        host_memory=question.host_memory,
        world=question.world,
        parameters=spec.numel,
        trained=sum(p.numel for p in spec.parameters if p.trainable),
        accumulation=base.gradient_accumulation_steps,
    )


def rehearse(question: Question, config: Config, spec: ModelSpec, make_model: Callable[[], nn.Module]) -> Rehearsed:
    """Run one configuration dry."""
    plan = build_plan(config, spec, world=question.world)
    layout = build_layout(plan, spec)
    recipe = recipe_of(config, spec)
    check_recipe(recipe, sharded=plan.is_sharded(Role.OPTIM))
    rehearsal = Rehearsal(
        make_model=make_model,
        make_batch=partial(make_batch, question, config.train_micro_batch_size_per_gpu),
        loss_of=loss_of,
        plan=plan,
        layout=layout,
        recipe=recipe,
        groups=[({}, [p.name for p in spec.parameters if p.trainable])],
        device=question.device,
        rank=question.rank,
    )
    try:
        return Rehearsed(config=config, plan=plan, layout=layout, run=dry_run(rehearsal))
    except (PlanError, ConfigError):
        raise
    except Exception as error:
        raise PlanError(
            f"{spec.class_name} cannot be run without values (stage {plan.stage}, micro-batch "
            f"{plan.step.micro_batch}): {type(error).__name__}: {error}. A plan runs the model on tensors that have "
            f"shapes only; code that reads values (.item(), .numpy(), if tensor: ...) stops it. Check also that the "
            f"model takes the inputs that the plan gives it: tokens and targets, int64, unless batch=... says otherwise."
        ) from error


def rows_of(question: Question, found: Rehearsed) -> list[Row]:
    """One row for each choice of offload."""
    sharded = any(flat.param_sharded for flat in found.layout.flats)
    return [row_of(question, found, c) for c in choices(sharded=sharded, one_memory=question.device == "cpu")]


def row_of(question: Question, found: Rehearsed, choice: str | None = None) -> Row:
    """The highest moment of a step under one choice of offload; None: that of its plan."""
    cpu = question.device == "cpu"
    plan = found.plan if choice is None else with_offload(found.plan, choice)
    moved = offloaded(plan, found.layout, found.run.optimizer_bytes, question.rank, one_memory=cpu)
    held, phase, unit = highest({**found.run.peaks, "checkpoint": found.while_saving(question)}, moved)
    held["framework"] += question.framework_bytes
    crossing = tier_bytes(plan, found.layout, found.run.optimizer_bytes, question.rank, one_memory=cpu)
    return Row(
        stage=found.plan.stage,
        offload=choice_of(plan),
        checkpointing=found.config.shardledger.activation_checkpointing,
        micro_batch=found.plan.step.micro_batch,
        **{category: held[category] for category in CATEGORIES},
        total=sum(held.values()),
        host_bytes=moved.host,
        disk_bytes=moved.disk,
        peak_phase=phase,
        peak_unit=unit,
        sent_bytes_per_step=found.run.sent_bytes_per_step,
        link_bytes_per_step=crossing.link,
        disk_bytes_per_step=crossing.disk_read + crossing.disk_written,
        disk_bytes_in_step=crossing.disk_in_step,
        unit_stages=tuple((found.config.shardledger.unit_stages or {}).items()),
        recomputed_units=found.config.shardledger.recomputed_units or (),
    )


def highest(peaks: Mapping[str, Reading], moved: Offloaded) -> tuple[dict[str, int], str, str]:
    """Bytes by category at the highest moment once some have ``moved``, and its phase and unit; ``peaks``: by phase."""
    found = []
    for phase, reading in peaks.items():
        held = dict(reading.by_category)
        for category, nbytes in moved.device.items():
            held[category] = max(0, held[category] - nbytes)  # at birth not all of it is there yet
        found.append((held, phase, reading.unit))
    return max(found, key=lambda one: sum(one[0].values()))


def base_config(question: Question) -> Config:
    """The configuration with an optimizer, whatever stage and batch it asks for. Raises ConfigError."""
    given = question.config
    if isinstance(given, Config):
        return given
    given = DEFAULT_CONFIG if given is None else given
    return load_config(given, world=question.world, world_source="the plan's world size")


def variant(
    base: Config,
    world: int,
    stage: int,
    checkpointing: bool,
    micro_batch: int,
    by_unit: Mapping[str, Any] | None = None,
) -> Config:
    """``base`` at another stage, with or without recomputation, at another micro-batch.

    ``by_unit`` are keys of ``shardledger`` that tell units apart (``unit_stages``, ``recomputed_units``). The accumulation
    stays as it is, so another micro-batch means another global batch. Raises ConfigError.
    """
    raw = base.to_dict()
    zero = {k: v for k, v in raw.get("zero_optimization", {}).items() if not k.startswith("offload_")}
    own = {k: v for k, v in raw.get("shardledger", {}).items() if k not in ("unit_stages", "recomputed_units")}
    accumulation = base.gradient_accumulation_steps
    changed = {
        **raw,
        "zero_optimization": {**zero, "stage": stage},
        "shardledger": {**own, "activation_checkpointing": checkpointing, **(by_unit or {})},
        **dict(zip(BATCH_KEYS, (micro_batch * accumulation * world, micro_batch, accumulation), strict=True)),
    }
    return load_config(changed, world=world, world_source="the plan's world size")


def recipe_of(config: Config, spec: ModelSpec) -> OptimizerRecipe:
    """The configuration's optimizer; AdamW without one."""
    if not any(p.trainable for p in spec.parameters):
        return OptimizerRecipe("SGD", {"lr": 0.0})
    if config.optimizer is None:
        return OptimizerRecipe("AdamW", {"lr": 1e-4})
    return OptimizerRecipe(*config.optimizer.resolved())


def model_maker(question: Question) -> Callable[[], nn.Module]:
    """A function that makes the model anew, to be called under fake tensors. Raises ConfigError."""
    model = question.model
    if isinstance(model, str):
        make: Callable[[], nn.Module] = partial(find_model(model), question.seq_len)
    elif isinstance(model, nn.Module):
        make = partial(_copied, model)
    elif callable(model):
        make = model
    else:
        raise ConfigError(f"plan needs a model's name, a torch.nn.Module or a function, got {type(model).__name__}.")
    return partial(_made, make, question.trainable)


def make_batch(question: Question, micro_batch: int) -> tuple[Any, ...]:
    """The arguments of one micro-batch, without values."""
    if question.batch is None:
        tokens = torch.zeros(micro_batch, question.seq_len, dtype=torch.int64)
        return tokens, torch.zeros(micro_batch, question.seq_len, dtype=torch.int64)
    batch = question.batch(micro_batch) if callable(question.batch) else question.batch
    return tuple(_blank(batch if isinstance(batch, (tuple, list)) else (batch,)))


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, Mapping):
        return {key: _blank(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_blank(item) for item in value)
    return value


def describe_model(make_model: Callable[[], nn.Module]) -> ModelSpec:
    """The model as plain data, made without values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return describe(make_model())


def _made(make: Callable[[], nn.Module], trainable: str) -> nn.Module:
    model = make()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model function returned a {type(model).__name__}, not a torch.nn.Module.")
    return train_adapters(model, trainable)


def _copied(model: nn.Module) -> nn.Module:
    """A copy whose tensors have no values: the user's module is not touched."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        blank = torch.empty(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
    return copy.deepcopy(model, memo)
