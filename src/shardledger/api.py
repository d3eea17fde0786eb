"""The composition root: from what the user passes to a running engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardledger.checkpoint.checkpoints import Checkpoints
from shardledger.checkpoint.checkpoints import Settings as CheckpointSettings
from shardledger.config import Config, load_config
from shardledger.errors import ConfigError, RanksDisagreeError
from shardledger.layout.build import build_layout
from shardledger.plan.build import build_plan
from shardledger.plan.plan import Plan
from shardledger.plan.roles import Role
from shardledger.runtime.assemble import Parts, assemble, take_apart
from shardledger.runtime.describe import describe
from shardledger.runtime.engine import Engine
from shardledger.runtime.gathered import refuse_owned
from shardledger.runtime.optimizer import (
    OptimizerRecipe,
    build_optimizer,
    check_recipe,
    groups_of,
    make_pieces,
    needs_whole_parameters,
    parameter_names,
    recipe_class,
)
from shardledger.runtime.placement import Site
from shardledger.runtime.schedulers import build_scheduler
from shardledger.runtime.step import Stepper
from shardledger.runtime.training_state import TrainingState
from shardledger.telemetry.memory import MemoryMeter
from shardledger.transport import Place, Transport, find_place, join, leave
from shardledger.workload.training_loader import PositionedSampler, TrainingLoader


@dataclass(frozen=True)
class _Wanted:
    """The user's objects, before any decision."""

    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None
    model_parameters: Iterable[Any] | None
    lr_scheduler: Any
    training_data: Dataset[Any] | None
    collate_fn: Callable[..., Any] | None


def initialize(  # noqa: PLR0913  # DeepSpeed's signature, so that scripts written for it run
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> tuple[Engine, torch.optim.Optimizer, DataLoader[Any] | None, Any]:
    """Shard ``model`` over the ranks and return ``(engine, optimizer, dataloader, lr_scheduler)``.

    Collective: every rank calls it with the same arguments. All ranks start from rank 0's weights.

    Args:
        args: object whose ``deepspeed_config`` names the configuration, when ``config`` is not given.
        model: the module, on CPU, on its device or on the meta device.
        optimizer: a fresh torch.optim optimizer over the model's parameters, or a callable that makes one from param
            groups; None takes the configuration's.
        model_parameters: parameters or param groups for the configuration's optimizer; None takes all trainable ones.
        training_data: a map-style dataset, returned as a loader that gives each rank its part.
        lr_scheduler: a scheduler over ``optimizer``, or a callable that makes one from it.
        distributed_port: used when MASTER_PORT is not set.
        mpu: refused: there is no model parallelism here.
        dist_init_required: False refuses to start a process group.
        collate_fn: for the loader of ``training_data``.
        config: path, dict or JSON text in DeepSpeed's keys.
        config_params: older name of ``config``.
        device: ``"cpu"``, ``"cuda"``, …; None takes the GPU of the local rank when there is one.

    Raises:
        ConfigError: the configuration or an argument is wrong; raised before anything is allocated.
        PlanError: the model cannot be laid out.
        RanksDisagreeError: ranks were given different models or configurations.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize needs model=<torch.nn.Module>, got {type(model).__name__}.")
    if mpu is not None:
        raise ConfigError("mpu: model parallelism is not supported; leave it out.")
    place = find_place()
    settings = _settings(args, config, config_params, place)
    recipe = _recipe(settings, optimizer, trains=any(p.requires_grad for p in model.parameters()))
    target = _device(device, place)
    refuse_owned(model)
    spec = describe(model)
    plan = build_plan(settings, spec, world=place.world)
    check_recipe(recipe, sharded=plan.is_sharded(Role.OPTIM))
    layout = build_layout(plan, spec)
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    transport, created = join(place, target, settings.shardledger.timeout_s, may_create=dist_init_required is not False)
    _pin(plan, target)
    parts: Parts | None = None
    try:
        _compare(plan, transport)
        meter = MemoryMeter(target)
        wanted = _Wanted(optimizer, model_parameters, lr_scheduler, training_data, collate_fn)
        names = parameter_names(model)
        groups = groups_of(_group_source(wanted), names, [p.name for p in spec.parameters if p.trainable])
        parts = assemble(Site(model, plan, layout, transport, target))
        pieces = make_pieces(parts.units, whole=needs_whole_parameters(recipe_class(recipe)))
        made = build_optimizer(recipe, groups, pieces)
        engine = Engine(model, plan, layout, parts, made, Stepper(parts.units, pieces, made, transport, plan), meter)
        engine.lr_scheduler = _scheduler(settings, lr_scheduler, made)
        parts.saver = Checkpoints(
            TrainingState(engine, parts, [names for _, names in groups]), transport, _checkpoint_settings(settings)
        )
    except BaseException:
        if parts is not None:
            take_apart(parts)
        if created:
            leave()
        raise
    parts.on_destroy = leave if created else None
    engine.config = settings
    engine.training_dataloader = _loader(wanted, settings, plan, transport)
    return engine, made, engine.training_dataloader, engine.lr_scheduler


def _settings(args: Any, config: Any, config_params: Any, place: Place) -> Config:
    from_args = getattr(args, "deepspeed_config", None)
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": from_args,
    }
    sources = {name: value for name, value in given.items() if value is not None}
    if len(sources) != 1:
        found = " and ".join(sources) or "none"
        raise ConfigError(f"initialize needs exactly one configuration (config=...), got {found}.")
    (source,) = sources.values()
    if isinstance(source, Config):
        return source
    return load_config(source, world=place.world, world_source=place.source)


def _device(device: str | torch.device | None, place: Place) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f"device={str(device)!r} was asked for, but this PyTorch sees no GPU; use device='cpu'.")
        if target.index is None:
            target = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(target)
    return target


def _pin(plan: Plan, device: torch.device) -> None:
    """Reproducible mode: fix what changes bits behind the engine's back.

    Raises:
        ConfigError: the backend adds in an order of its own.
    """
    if not plan.reproducible:
        return
    if device.type != "cpu":
        raise ConfigError(
            f"shardledger.reproducible is available on CPU ranks over gloo; on {device.type} the collectives and some "
            f"kernels add in an order of their own. Remove the key, or use device='cpu'."
        )
    torch.set_num_threads(1)  # a matmul over two threads rounds differently from one over one


def _compare(plan: Plan, transport: Transport) -> None:
    """Every rank must have the same plan before the first collective that depends on it."""
    digest = plan.fingerprint
    words = [int(digest[i : i + 12], 16) for i in range(0, 48, 12)]
    rows = transport.exchange(torch.tensor(words, dtype=torch.float64), "comparison of plans").tolist()
    different = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if different:
        raise RanksDisagreeError(
            f"rank {transport.rank}: ranks {different} have another plan than rank 0 (theirs: other fingerprints, "
            f"here {digest[:12]}). All ranks must pass the same model structure, requires_grad flags and configuration. "
            f"This rank: stage {plan.stage}, {len(plan.units)} units, {sum(len(u.parameters) for u in plan.units)} "
            f"parameters."
        )


def _group_source(wanted: _Wanted) -> Any:
    return wanted.optimizer if isinstance(wanted.optimizer, torch.optim.Optimizer) else wanted.model_parameters


def _recipe(settings: Config, optimizer: Any, *, trains: bool) -> Any:
    if optimizer is not None:
        return optimizer
    if settings.optimizer is None and not trains:
        return OptimizerRecipe("SGD", {"lr": 0.0})  # a frozen model is sharded and evaluated, never stepped
    if settings.optimizer is None:
        raise ConfigError(
            'there is no optimizer: add "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}} to the configuration, or '
            "pass optimizer=..."
        )
    return OptimizerRecipe(*settings.optimizer.resolved())


def _scheduler(settings: Config, lr_scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    if lr_scheduler is not None:
        is_object = hasattr(lr_scheduler, "step")
        return lr_scheduler if is_object else lr_scheduler(optimizer)
    if settings.scheduler is None:
        return None
    return build_scheduler(*settings.scheduler.resolved(), optimizer)


def _checkpoint_settings(settings: Config) -> CheckpointSettings:
    asked = settings.shardledger.checkpoint
    return CheckpointSettings(
        asynchronous=asked.asynchronous,
        keep_last=asked.keep_last,
        keep_every=asked.keep_every,
        version=sys.modules["shardledger"].__version__,  # importing the door from here would be a cycle
    )


def _loader(wanted: _Wanted, settings: Config, plan: Plan, transport: Transport) -> DataLoader[Any] | None:
    if wanted.training_data is None:
        return None
    return TrainingLoader(
        wanted.training_data,
        plan.step.micro_batch,
        PositionedSampler(wanted.training_data, rank=transport.rank, world=transport.world),
        wanted.collate_fn,
        settings.dataloader_drop_last,
    )
