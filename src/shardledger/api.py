"""The composition root: from what the user passes to a running engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardledger.checkpoint.checkpoints import Checkpoints
from shardledger.checkpoint.checkpoints import Settings as CheckpointSettings
from shardledger.config import Config, load_config
from shardledger.config.quantities import bandwidth as bytes_per_second
from shardledger.config.quantities import byte_size, flop_rate
from shardledger.errors import ConfigError, DoesNotFitError, RanksDisagreeError
from shardledger.layout.build import Layout, build_layout
from shardledger.ledger.bounds import Bounds
from shardledger.ledger.row import Row
from shardledger.plan.build import build_plan
from shardledger.plan.plan import Plan
from shardledger.plan.roles import Home, Role
from shardledger.plan.spec import ModelSpec
from shardledger.plan.stages import at_every_stage
from shardledger.runtime.assemble import Parts, assemble, take_apart
from shardledger.runtime.census import probe_recipe, probe_states
from shardledger.runtime.compiled import Aside
from shardledger.runtime.describe import describe
from shardledger.runtime.engine import Engine
from shardledger.runtime.gathered import refuse_owned
from shardledger.runtime.last_words import part_with
from shardledger.runtime.offload import Offload
from shardledger.runtime.optimizer import (
    Groups,
    OptimizerRecipe,
    Piece,
    Recipe,
    build_optimizer,
    check_recipe,
    groups_of,
    make_pieces,
    needs_whole_parameters,
    parameter_names,
    recipe_class,
)
from shardledger.runtime.out_of_memory import tell_at_birth
from shardledger.runtime.placement import Site
from shardledger.runtime.schedulers import build_scheduler
from shardledger.runtime.step import Stepper
from shardledger.runtime.training_state import TrainingState
from shardledger.telemetry.memory import MemoryMeter
from shardledger.transport import Place, Transport, find_place, join, leave
from shardledger.transport.heap import keep_freed_memory
from shardledger.workload.training_loader import PositionedSampler, TrainingLoader

if TYPE_CHECKING:
    from shardledger.forecast import Forecast

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class _Wanted:
    """The user's objects, before any decision."""

    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None
    model_parameters: Iterable[Any] | None
    lr_scheduler: Any
    training_data: Dataset[Any] | None
    collate_fn: Callable[..., Any] | None
    device: str | torch.device | None
    port: int


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
        DoesNotFitError: states and the largest unit alone exceed ``shardledger.device_memory``, or what CUDA has free;
            or, with ``training_data``, a dry run of a step exceeds the former; raised before anything is allocated.
        RanksDisagreeError: ranks were given different models or configurations.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize needs model=<torch.nn.Module>, got {type(model).__name__}.")
    if mpu is not None:
        raise ConfigError("mpu: model parallelism is not supported; leave it out.")
    place = find_place()
    settings = _settings(args, config, config_params, place)
    wanted = _Wanted(optimizer, model_parameters, lr_scheduler, training_data, collate_fn, device, distributed_port)
    with Aside(model) as aside:
        return _initialize(aside, settings, place, wanted, may_create=dist_init_required is not False)


def _initialize(
    aside: Aside, settings: Config, place: Place, wanted: _Wanted, *, may_create: bool
) -> tuple[Engine, torch.optim.Optimizer, DataLoader[Any] | None, Any]:
    model = aside.model
    recipe = _recipe(settings, wanted.optimizer, trains=any(p.requires_grad for p in model.parameters()))
    target = _device(wanted.device, place)
    if settings.stage_is_open:
        settings = _decide(settings, model, place, target, wanted)
    refuse_owned(model)
    spec = describe(model)
    plan = build_plan(settings, spec, world=place.world)
    check_recipe(recipe, sharded=plan.is_sharded(Role.OPTIM), offloaded=plan.offload.optimizer is not Home.DEVICE)
    layout = build_layout(plan, spec)
    bounds = _bounds(settings, spec, place, recipe, target)
    os.environ.setdefault("MASTER_PORT", str(wanted.port))
    how = plan.communication
    transport, joined = join(place, target, how.timeout_s, may_create=may_create, wire=how.wire)
    _pin(plan, target)
    meter = MemoryMeter(target, model_bytes=_bytes_on(target, model))
    parts: Parts | None = None
    try:
        settings, plan = settings.agreed(transport.wire), plan.agreed(transport.wire)
        _compare(plan, transport)
        _refuse_what_cannot_fit(bounds, settings, target, (model, wanted), transport)
        trained = [p.name for p in spec.parameters if p.trainable]
        groups = groups_of(_group_source(wanted), parameter_names(model), trained)
        offload = _offload(plan, layout, (recipe, groups), transport, target)
        parts = assemble(Site(model, plan, layout, transport, target, offload))
        parts.forwards.adopt(aside, [unit.module for unit in parts.units[1:]], released=parts.released)
        made, pieces = _build_optimizer(parts, recipe, groups)
        stepper = Stepper(parts.units, pieces, made, transport, plan, offload)
        engine = Engine(model, plan, layout, parts, made, stepper, meter)
        engine.lr_scheduler = _scheduler(settings, wanted.lr_scheduler, made)
        if settings.shardledger.compile is not None:
            engine.compile(**settings.shardledger.compile.arguments)
        state = TrainingState(engine, parts, [names for _, names in groups])
        parts.saver = Checkpoints(state, transport, _checkpoint_settings(settings))
    except BaseException as error:
        _tell_shortage(error, bounds, meter)
        _end_badly(error, transport, parts, joined)
        raise
    parts.advise, parts.on_destroy = bounds.advise, leave if joined else None
    if target.type == "cpu" and Home.DISK not in (plan.offload.optimizer, plan.offload.params):
        keep_freed_memory()
    engine.config = settings
    engine.training_dataloader = _loader(wanted, settings, plan, transport)
    return engine, made, engine.training_dataloader, engine.lr_scheduler


def _end_badly(error: BaseException, transport: Transport, parts: Parts | None, joined: bool) -> None:
    """Undo what initialize has begun."""
    part_with(transport, error)
    if parts is not None:
        take_apart(parts)
    if joined:
        leave()


def _tell_shortage(error: BaseException, bounds: Bounds, meter: MemoryMeter) -> None:
    """When memory ran out while the engine was made: the account of its states, and what would help."""
    live = {"framework": meter.baseline_bytes, "params": max(0, meter.current_bytes() - meter.baseline_bytes)}
    tell_at_birth(error, rank=bounds.rank, needed=bounds.row, live=live, advise=bounds.advise)


def plan(  # noqa: PLR0913  # what the command asks, asked from Python
    model: nn.Module | Callable[[], nn.Module] | str,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
    *,
    world_size: int,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    micro_batch: int | Sequence[int] | None = None,
    seq_len: int = 1024,
    batch: Any = None,
    trainable: str = "all",
    device: str = "cuda",
    framework: str | int | None = None,
    memory_budget: str | int | None = None,
    bandwidth: str | float | None = None,
    flops: str | float | None = None,
    per_machine: int = 8,
    task_samples: int | None = None,
) -> Forecast:
    """Predict every byte of one rank, for every stage, offload and recomputation. Needs no GPU and no process group.

    The engine itself is run on tensors without values at ``world_size`` ranks; nothing is allocated.

    Args:
        model: a module on any device, a function that returns one, or a name as on the command line.
        config: as for ``initialize``; its stage and offload are replaced by each in turn. None: bf16 and AdamW.
        world_size: ranks.
        device_memory: of one device, ``"80GiB"`` or bytes; with it a choice is recommended.
        host_memory: of one machine, for offload.
        micro_batch: samples per rank and micro-batch, or several to plan; None takes the configuration's.
        seq_len: tokens per sample, for models that are called with tokens and targets (int64 [B, T]).
        batch: the model's positional arguments for one micro-batch (values do not matter), or a function that returns
            them for a number of samples; None: tokens and targets.
        trainable: ``"all"`` (as the model says), or ``"lora:r=16"``: the base frozen, adapters of rank 16.
        device: ``"cuda"``: ranks talk as NCCL's do and the model comes from the host; ``"cpu"``: as gloo's do, and the
            model counts.
        framework: what the process has on the device before the model, ``"0.6GiB"`` or bytes; None counts nothing.
        memory_budget: recommend, for every unit, the cheapest choice whose peak stays under it, as ``"stage": "auto"``
            would choose; instead of ``device_memory``.
        bandwidth: what a rank sends per second, as ``"50GB/s"``; flops: what it computes, as ``"400TFLOP/s"``. With both,
            the recommendation knows whether stage 3's traffic hides.
        per_machine: ranks that share the memory of one machine.
        task_samples: samples there are to learn from; few make it name adapters first.

    Returns:
        ``rows``, one for each choice (``shardledger.ledger.row.Row``); ``recommended`` with its ``row`` and ``reasons``
        (None without ``device_memory``); ``notes`` on what could not be planned.

    Raises:
        ConfigError: the configuration, the model's name or an argument is wrong.
        PlanError: the model cannot be laid out, or cannot be run without values.
    """
    from shardledger.budget import within  # half a second that training does without
    from shardledger.forecast import Links, Question, forecast

    if world_size < 1:
        raise ConfigError(f"plan: world_size = {world_size}; at least one rank is needed.")
    if memory_budget is not None and device_memory is not None:
        raise ConfigError("plan: memory_budget and device_memory are two questions; ask one of them.")
    sizes = () if micro_batch is None else (micro_batch,) if isinstance(micro_batch, int) else tuple(micro_batch)
    question = Question(
        model=model,
        config=config,
        world=world_size,
        micro_batches=sizes,
        seq_len=seq_len,
        batch=batch,
        trainable=trainable,
        device=device,
        device_memory=_amount("device_memory", device_memory, byte_size),
        host_memory=_amount("host_memory", host_memory, byte_size),
        framework_bytes=_amount("framework", framework, byte_size) or 0,
        links=Links(
            bandwidth=_amount("bandwidth", bandwidth, bytes_per_second),
            flops=_amount("flops", flops, flop_rate),
            ranks_per_machine=per_machine,
            task_samples=task_samples,
        ),
    )
    found = forecast(question)
    budget = _amount("memory_budget", memory_budget, byte_size)
    return found if budget is None else within(question, found, budget)


def _amount(name: str, amount: Any, read: Callable[[object], Number]) -> Number | None:
    try:
        return None if amount is None or amount == 0 and name == "framework" else read(amount)
    except ValueError as error:
        raise ConfigError(f"plan: {name}: {error}.") from None


def _decide(settings: Config, model: nn.Module, place: Place, device: torch.device, wanted: _Wanted) -> Config:
    """The stage by the memory budget; rank 0 says which and why."""
    from shardledger.budget import batch_of, decide  # the dry run needs half a second to import

    batch = batch_of(wanted.training_data, wanted.collate_fn, settings.train_micro_batch_size_per_gpu)
    decided = decide(settings, model, batch, world=place.world, device=device.type)
    if place.rank == 0:
        print(f"shardledger: {decided.resolutions[-1]}", flush=True)
    return decided


def _bounds(settings: Config, spec: ModelSpec, place: Place, recipe: Any, device: torch.device) -> Bounds:
    return Bounds(
        stage=settings.zero_optimization.stage,
        rank=place.rank,
        model=spec,
        optimizer=probe_recipe(recipe),
        make_plans=lambda: at_every_stage(settings, spec, world=place.world),
        one_memory=_is_host_memory(device),
    )


def _refuse_what_cannot_fit(
    bounds: Bounds, settings: Config, device: torch.device, what: tuple[nn.Module, _Wanted], transport: Transport
) -> None:
    """Before anything is allocated: a plan that is too large is refused, on all ranks together.

    Without a batch that is one whose states and largest unit alone are. With ``training_data`` and
    ``shardledger.device_memory`` a step is run dry, and its highest moment counts.

    Raises:
        DoesNotFitError: with the bytes by category and what would help.
    """
    budget, where = settings.shardledger.device_memory, "shardledger.device_memory"
    if budget is None and device.type == "cuda":
        where = f"free on {device}"
        budget = torch.cuda.mem_get_info(device)[0] + _bytes_on(device, what[0])
    if budget is None:
        return
    foreseen = None
    if bounds.row.total <= budget == settings.shardledger.device_memory:
        foreseen = _foresee(settings, what, transport.world, device)
    need = max(bounds.row.total, foreseen.total if foreseen is not None else 0)
    short = torch.tensor([max(0, need - budget)], dtype=torch.float64)
    missing = [row[0] for row in transport.exchange(short, "comparison with the device memory").tolist()]
    ranks = [rank for rank, bytes_missing in enumerate(missing) if bytes_missing]
    if not ranks:
        return
    if transport.rank not in ranks:
        raise DoesNotFitError(
            f"rank {transport.rank}: the plan does not fit the device of ranks {ranks}; they say why."
        )
    raise DoesNotFitError(bounds.refusal(budget, where, foreseen))


def _foresee(settings: Config, what: tuple[nn.Module, _Wanted], world: int, device: torch.device) -> Row | None:
    """The highest moment of a step, where the batch is known."""
    model, wanted = what
    if wanted.training_data is None or wanted.optimizer is not None:
        return None
    from shardledger.budget import batch_of, foreseen  # the dry run needs half a second to import

    batch = batch_of(wanted.training_data, wanted.collate_fn, settings.train_micro_batch_size_per_gpu)
    return foreseen(settings, model, batch, world=world, device=device.type)


def _bytes_on(device: torch.device, model: nn.Module) -> int:
    """Bytes of the model's storages on ``device``."""
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers())
        if t.device.type == device.type and device.index in (None, t.device.index)
    }
    return sum(found.values())


def _offload(
    plan: Plan, layout: Layout, optimizer: tuple[Recipe, Groups], transport: Transport, device: torch.device
) -> Offload | None:
    """What keeps states away from the device; rank 0 says what that is worth."""
    if not plan.offload.active:
        return None
    one_memory = _is_host_memory(device)
    homes = {plan.offload.optimizer, plan.offload.params}
    if one_memory and Home.HOST in homes and transport.rank == 0:
        print(
            f"shardledger: offload to cpu saves nothing on {device}: its memory is the host's. It is done all the same; "
            f'"device": "nvme" would lower the memory in use.',
            flush=True,
        )
    return Offload(plan, layout, probe_states(*optimizer), transport, device, one_memory=one_memory)


def _build_optimizer(parts: Parts, recipe: Recipe, groups: Groups) -> tuple[torch.optim.Optimizer, list[Piece]]:
    """The optimizer and what it holds; where states rest elsewhere, tiles learn which of it is theirs."""
    whole = needs_whole_parameters(recipe_class(recipe))
    pieces = make_pieces(parts.units, whole=whole, tile_numel=parts.plan.offload.tile_numel)
    made = build_optimizer(recipe, groups, pieces)
    if parts.offload is not None:
        parts.offload.take_over(pieces, made)
    return made, pieces


def _is_host_memory(device: torch.device) -> bool:
    return device.type == "cpu"


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
    digests = plan.fingerprints
    words = [int(digest[:12], 16) for digest in digests.values()]  # as many bits as a float64 holds
    rows = transport.exchange(torch.tensor(words, dtype=torch.float64), "comparison of plans").tolist()
    different = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if different:
        parts = [part for part, *column in zip(digests, *rows, strict=True) if len(set(column)) > 1]
        raise RanksDisagreeError(
            f"rank {transport.rank}: ranks {different} have another plan than rank 0; they differ in: {', '.join(parts)}. All "
            f"ranks must pass the same model structure, requires_grad flags and configuration. This rank: stage {plan.stage}, "
            f"{len(plan.units)} units, {sum(len(u.parameters) for u in plan.units)} parameters."
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
