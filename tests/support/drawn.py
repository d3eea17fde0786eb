"""Random models as plain data: what a test draws, what a rank builds from it, and the plain loop it is held to.

A `Drawn` holds numbers, strings and tuples only, so it travels to the ranks, prints as JSON and can be replayed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.oracle import make_optimizer, micro_batches
from support.training import config

OPTIMIZERS = {
    "SGD": {"lr": 0.05},
    "momentum": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01},
    # A large eps: where a gradient is zero but for rounding, a small one turns the rounding into a step.
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
    "RMSprop": {"lr": 0.002, "eps": 1e-2, "momentum": 0.5},
}


@dataclass(frozen=True)
class Part:
    """One layer of a block; `size` is a number of elements, 0, 1, 3, 5 or 7."""

    kind: str
    size: int = 3
    frozen: bool = False
    bias: bool = True


@dataclass(frozen=True)
class Run:
    """How the engine is asked to train: what must not change the result."""

    stage: int
    bucket: int | None = None
    overlap: bool = True
    prefetch: bool = True
    threshold: int = 0
    habit: str = "engine"
    """The loop: engine, loss (`loss.backward()`), no_sync, evaluate (between steps), idle (a forward without backward)."""
    recompute: str = "none"


@dataclass(frozen=True)
class Drawn:
    """A model, its data and its training. `orders[step % len]` are the blocks that run, in that order."""

    seed: int = 0
    width: int = 3
    tokens: bool = False
    tied: bool = False
    blocks: tuple[tuple[Part, ...], ...] = ()
    container: str = "list"
    orders: tuple[tuple[int, ...], ...] = ((),)
    extras: tuple[tuple[int, ...], ...] = ()
    extra_use: str = "all"
    frozen_end: str = ""
    born: str = "float32"
    units: tuple[str, ...] | None = None
    world: int = 1
    accumulation: int = 1
    micro: int = 1
    steps: int = 5
    precision: str = "fp32"
    optimizer: str = "SGD"
    clip: float = 0.0
    average: bool = True
    runs: tuple[Run, ...] = (Run(0), Run(3))

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(asdict(self))


def from_json(text: str) -> Drawn:
    """A drawn model from what `to_json` printed."""
    raw = json.loads(text)
    raw["blocks"] = tuple(tuple(Part(**part) for part in block) for block in raw["blocks"])
    raw["runs"] = tuple(Run(**run) for run in raw["runs"])
    for key in ("orders", "extras"):
        raw[key] = tuple(map(tuple, raw[key]))
    raw["units"] = None if raw["units"] is None else tuple(raw["units"])
    return Drawn(**raw)


class PartModule(nn.Module):
    """A part of a block, built as its kind says; x[n, width] -> x[n, width]."""

    def __init__(self, part: Part, width: int, shared: nn.Linear) -> None:
        super().__init__()
        self.kind = part.kind
        if part.kind == "shared":
            self.first = shared
        elif part.kind == "tied":
            self.first = nn.Linear(width, width, bias=part.bias)
            self.first.weight = shared.weight
        elif part.kind == "norm":
            self.first = nn.LayerNorm(width, eps=1e-2)  # of one element, rounding times 1 / sqrt(eps) is all there is
        elif part.kind == "scale":
            self.gain = nn.Parameter(torch.full((), 0.9) if part.bias else torch.full((width,), 1.1))
        elif part.kind == "empty":
            self.nothing = nn.Parameter(torch.empty(0, part.size))
        elif part.kind in ("bottleneck", "lora"):
            self.first = nn.Linear(width, part.size, bias=part.bias)
            self.second = nn.Linear(part.size, width, bias=part.bias)
        else:  # linear, twice, idle
            self.first = nn.Linear(width, width, bias=part.bias)
        if part.kind == "lora":
            self.base = nn.Linear(width, width)
            self.base.requires_grad_(False)
        if part.frozen and part.kind not in ("shared", "tied"):
            self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "idle":
            return x
        if self.kind == "empty":
            return x + self.nothing.sum()
        if self.kind == "scale":
            return x * self.gain
        if self.kind == "bottleneck":
            return x + self.second(torch.tanh(self.first(x)))
        if self.kind == "lora":
            return torch.tanh(self.base(x) + self.second(self.first(x)))
        if self.kind == "twice":
            return torch.tanh(self.first(torch.tanh(self.first(x))))
        return torch.tanh(self.first(x))


class DrawnBlock(nn.Module):
    """Parts one after another."""

    def __init__(self, parts: Sequence[Part], width: int, shared: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList(PartModule(part, width, shared) for part in parts)
        self.recompute = "none"

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            if self.recompute.startswith("inside"):
                x = checkpoint(part, x, use_reentrant=self.recompute.endswith("reentrant"))
            else:
                x = part(x)
        return x


class DrawnModel(nn.Module):
    """Batch (x or tokens, y), the step, and which micro-batch of the global batch it is; returns the loss."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.recompute = "none"
        width = drawn.width
        self.enter = nn.Embedding(5, width) if drawn.tokens else nn.Linear(3, width)
        self.shared = nn.Linear(width, width)
        blocks = [DrawnBlock(parts, width, self.shared) for parts in drawn.blocks]
        if drawn.container == "attributes":
            for index, block in enumerate(blocks):
                self.add_module(f"block{index}", block)
        else:
            self.blocks = nn.Sequential(*blocks) if drawn.container == "sequential" else nn.ModuleList(blocks)
        self.extras = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.5) for shape in drawn.extras)
        self.head = nn.Linear(width, 5 if drawn.tokens else 3, bias=not drawn.tied)
        if drawn.tied:
            self.head.weight = self.enter.weight if drawn.tokens else self.head.weight
        if drawn.frozen_end:
            getattr(self, drawn.frozen_end).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))  # always used, always trainable: the loss always has a graph

    def forward(self, x: Tensor, y: Tensor, step: int, who: int) -> Tensor:
        drawn = self.drawn
        x = self.enter(x)
        order = drawn.orders[step % len(drawn.orders)]
        if self.recompute.startswith("segment") and order:
            half = (len(order) + 1) // 2
            for part in (order[:half], order[half:]):
                if part:
                    x = checkpoint(self.run, x, part, use_reentrant=self.recompute.endswith("reentrant"))
        else:
            x = self.run(x, order)
        # The tanh keeps losses small whatever was drawn: a run that diverges says nothing about rounding.
        loss = F.mse_loss((self.head(torch.tanh(x)) * self.gain).float(), y.float())
        for index, extra in enumerate(self.extras):
            turn = {"all": index, "none": -1, "step": step % 3, "rank": who % 3}[drawn.extra_use]
            if turn == index % 3 or drawn.extra_use == "all":
                loss = loss + (extra.float() ** 2).sum() * 0.1
        return loss

    def run(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """The blocks of `order`, one after another."""
        for index in order:
            block = getattr(self, f"block{index}", None) or self.blocks[index]
            if self.recompute.startswith("block"):
                x = checkpoint(block, x, use_reentrant=self.recompute.endswith("reentrant"))
            else:
                x = block(x)
        return x


def make(drawn: Drawn, recompute: str = "none") -> DrawnModel:
    """The model, its weights from the seed."""
    torch.manual_seed(drawn.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers without elements cannot be initialised
        model = DrawnModel(drawn).to(getattr(torch, drawn.born))
    model.recompute = recompute
    for module in model.modules():
        if isinstance(module, DrawnBlock):
            module.recompute = recompute
    return model


def batch_of(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """The global batch: x[samples, 3] or tokens[samples], and y[samples, 3 or 5]."""
    samples = drawn.world * drawn.accumulation * drawn.micro
    generator = torch.Generator().manual_seed(drawn.seed + 1)
    y = torch.randn(samples, 5 if drawn.tokens else 3, generator=generator)
    if drawn.tokens:
        return torch.randint(5, (samples,), generator=generator), y
    return torch.randn(samples, 3, generator=generator), y


def settings_of(drawn: Drawn, run: Run) -> dict[str, Any]:
    """The DeepSpeed JSON of one run."""
    zero = {"overlap_comm": run.overlap, "stage3_param_persistence_threshold": run.threshold}
    if run.bucket is not None:
        zero["reduce_bucket_size"] = run.bucket
    ours: dict[str, Any] = {"prefetch": run.prefetch, "activation_checkpointing": run.recompute == "units"}
    if drawn.units is not None:
        ours["units"] = list(drawn.units)
    settings = config(
        run.stage,
        optimizer="SGD" if drawn.optimizer == "momentum" else drawn.optimizer,
        optimizer_params=OPTIMIZERS[drawn.optimizer],
        accumulation=drawn.accumulation,
        precision=drawn.precision,
        zero=zero,
        gradient_clipping=drawn.clip,
        gradient_allreduce_op="mean" if drawn.average else "sum",
        shardledger=ours,
    )
    settings["train_micro_batch_size_per_gpu"] = drawn.micro
    return settings


@dataclass
class Result:
    """What a training arrived at; `losses[step]` is the sum over this rank's micro-batches."""

    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[float]


def train_drawn(drawn: Drawn, run: Run, rank: int) -> Result:
    """Train on this rank of a process group that is up already."""
    import shardledger as sl

    engine = sl.initialize(model=make(drawn, run.recompute), config=settings_of(drawn, run))[0]
    result = Result({}, [], [])
    mine = micro_batches(batch_of(drawn), rank, drawn.world, drawn.accumulation)
    for step in range(drawn.steps):
        total = 0.0
        for index, part in enumerate(mine):
            total += _micro_step(engine, run.habit, (*part, step, rank * drawn.accumulation + index))
        result.losses.append(total)
        result.norms.append(engine.get_global_grad_norm())
    result.weights = engine.state_dict()
    engine.destroy()
    return result


def _micro_step(engine: Any, habit: str, arguments: tuple[Any, ...]) -> float:
    if habit == "idle":
        engine(*arguments)
    if habit == "evaluate":
        engine.eval()
        with torch.no_grad():
            before = float(engine(*arguments))
        engine.train()
    if habit == "no_sync" and not engine.is_gradient_accumulation_boundary():
        with engine.no_sync():
            loss = engine.backward(engine(*arguments))
    else:
        loss = engine(*arguments)
        if habit == "loss":
            loss.backward()
        else:
            engine.backward(loss)
    if habit == "evaluate" and before != float(loss.detach()):
        raise AssertionError(f"evaluation gave {before}, training {float(loss.detach())}")
    engine.step()
    return float(loss.detach())


def plain(drawn: Drawn) -> Result:
    """One process, plain torch, the whole global batch, fp32."""
    model = make(drawn).float()
    trainable = [p for p in model.parameters() if p.requires_grad]
    name = "SGD" if drawn.optimizer == "momentum" else drawn.optimizer
    optimizer = make_optimizer(name, **OPTIMIZERS[drawn.optimizer])(trainable)
    result = Result({}, [], [])
    pieces = drawn.world * drawn.accumulation
    divisor = pieces if drawn.average else drawn.accumulation
    parts = micro_batches(batch_of(drawn), 0, 1, pieces)
    for step in range(drawn.steps):
        optimizer.zero_grad(set_to_none=True)
        losses = [model(*part, step, who) for who, part in enumerate(parts)]
        (torch.stack(losses).sum() / divisor).backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, drawn.clip or float("inf"))
        optimizer.step()
        result.losses.append(float(torch.stack(losses).sum().detach()))
        result.norms.append(float(norm))
    result.weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return result


def simpler(drawn: Drawn) -> list[Drawn]:
    """What a failing model is replaced by while it still fails: one thing simpler each."""
    found = [replace(drawn, runs=(run,)) for run in drawn.runs if len(drawn.runs) > 1]
    plainest = Drawn()
    for name in ("tied", "tokens", "extra_use", "frozen_end", "born", "units", "precision", "clip", "average"):
        found.append(replace(drawn, **{name: getattr(plainest, name)}))
    for name in ("optimizer", "accumulation", "micro", "container", "steps"):
        found.append(replace(drawn, **{name: getattr(plainest, name)}))
    found += [replace(drawn, world=world) for world in range(1, drawn.world)]
    found += [replace(drawn, steps=steps) for steps in (1, 2, 3) if steps < drawn.steps]
    for index in range(len(drawn.blocks)):
        orders = tuple(tuple(i - (i > index) for i in order if i != index) for order in drawn.orders)
        found.append(replace(drawn, blocks=drawn.blocks[:index] + drawn.blocks[index + 1 :], orders=orders))
        for cut in range(len(drawn.blocks[index])):
            parts = drawn.blocks[index][:cut] + drawn.blocks[index][cut + 1 :]
            if parts:
                found.append(replace(drawn, blocks=(*drawn.blocks[:index], parts, *drawn.blocks[index + 1 :])))
    for index in range(len(drawn.extras)):
        found.append(replace(drawn, extras=drawn.extras[:index] + drawn.extras[index + 1 :]))
    if len(drawn.orders) > 1:
        found += [replace(drawn, orders=(order,)) for order in drawn.orders]
    for turn, order in enumerate(drawn.orders):
        for cut in range(len(order)):
            shorter = order[:cut] + order[cut + 1 :]
            found.append(replace(drawn, orders=(*drawn.orders[:turn], shorter, *drawn.orders[turn + 1 :])))
    for index, run in enumerate(drawn.runs):
        for name, value in asdict(Run(run.stage)).items():
            fewer = replace(run, **{name: value})
            found.append(replace(drawn, runs=(*drawn.runs[:index], fewer, *drawn.runs[index + 1 :])))
    return [candidate for candidate in found if candidate != drawn]
