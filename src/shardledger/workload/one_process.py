"""Training in one process with plain PyTorch: what ``shardledger check`` holds the engine to.

It sees every rank's every micro-batch, adds their gradients, and takes one step with a torch optimizer on whole
parameters. No shards, no hooks, no buckets; this room cannot import the engine. Two things are taken over from a run on
ranks, because they decide how numbers are rounded and nothing else: the dtypes, and the order in which gradients are added
(ranks as a balanced tree, ``(0 + 1) + (2 + 3)``).

Buffers belong to a rank, as they do in any data-parallel run: each rank's micro-batches find the buffers that the same
rank's earlier ones left. Everything else that a module keeps between calls is shared by all, as in one process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardledger.workload.models import loss_of

MicroBatch = tuple[Tensor, ...]
Gradients = list["Tensor | None"]
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How numbers are rounded and in which order gradients are added."""

    compute: torch.dtype
    """Dtype of weights in forward and backward; masters are fp32."""
    accumulate: torch.dtype
    """Dtype of sums over ranks."""
    local_accumulate: torch.dtype
    """Dtype of a rank's sum over its micro-batches, where it adds them before ranks are added."""
    wire: torch.dtype
    """What a rank's contribution is rounded to before ranks are added, when there are several."""
    rounding: torch.dtype
    """Dtype in which sums over ranks are taken: the wire's where the backend takes them; only ``jitter`` asks."""
    autocast: torch.dtype | None
    """Dtype of torch.autocast around the forward pass."""
    every_micro_batch: bool
    """Ranks are added for every micro-batch, not once for the sums over micro-batches."""
    micro_batch_tree: bool
    """The sums of micro-batches are then added as a tree, not one after the other."""
    average: bool
    """Mean over ranks (else sum). Over micro-batches it is always the mean."""
    clip_norm: float
    """Largest norm of the gradient; 0 is no clipping."""
    norm_order: float
    """2, or inf: which norm that is."""
    world: int
    accumulation: int


class Scaler(Protocol):
    """The loss scale of fp16."""

    scale: float

    def update(self, overflow: bool) -> None:
        """Count one step."""


@dataclass(frozen=True, kw_only=True)
class Makers:
    """What steps the weights: a torch optimizer from its parameters, a schedule from the optimizer."""

    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    scaler: Scaler | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step: losses by rank and micro-batch, and the norm of the averaged gradient before clipping."""

    losses: list[list[float]]
    grad_norm: float


class OneProcess:
    """A module that is trained in one process.

    ``jitter`` moves what rounding may move by chance: every initial weight and every gradient by one rounding, drawn from
    this generator. Two runs, one of them with jitter, show how far rounding alone takes this model.
    """

    def __init__(
        self,
        module: nn.Module,
        arithmetic: Arithmetic,
        makers: Makers,
        device: torch.device,
        jitter: torch.Generator | None = None,
    ) -> None:
        self.module = module
        self.arithmetic = arithmetic
        self._device = device
        self._jitter = jitter
        self._scaler = makers.scaler
        self._weights: list[nn.Parameter] = []  # trainable ones, in forward and backward
        self._masters: list[Tensor] = []  # what the optimizer updates; the weights themselves when those are fp32
        self._place()
        self._slots = [
            (owner, name) for owner in module.modules() for name, value in owner._buffers.items() if value is not None
        ]
        first = [self._buffer(*slot).to(device) for slot in self._slots]
        self._buffers = [first, *([value.clone() for value in first] for _ in range(arithmetic.world - 1))]
        self._show_buffers(0)
        self._optimizer = makers.optimizer(self._masters)
        self._scheduler = makers.scheduler(self._optimizer) if makers.scheduler else None

    def step(self, batches: Sequence[Sequence[MicroBatch]], before: Callable[[int, int], None]) -> StepResult:
        """One optimizer step on ``batches[rank][micro-batch]``; ``before(rank, micro_batch)`` precedes each of them."""
        plan = self.arithmetic
        losses = [[math.nan] * plan.accumulation for _ in range(plan.world)]

        def gradients(rank: int, micro: int) -> Gradients:
            before(rank, micro)
            losses[rank][micro], found = self._run(rank, batches[rank][micro])
            return found

        total = self._sum_each(gradients) if plan.every_micro_batch else self._sum_once(gradients)
        return StepResult(losses=losses, grad_norm=self._update(total))

    def state(self) -> dict[str, Tensor]:
        """Copies of whole tensors on CPU under the names of ``state_dict()``: fp32 masters, and rank 0's buffers."""
        self._show_buffers(0)
        masters = {id(weight): master for weight, master in zip(self._weights, self._masters, strict=True)}
        named = named_tensors(self.module)
        return {name: _widened(masters.get(id(value), value)).detach().to("cpu", copy=True) for name, value in named}

    def kinds(self) -> dict[str, str]:
        """``"weight"`` (trained), ``"frozen weight"`` or ``"buffer"`` for every name of ``state()``."""
        trained = {id(weight) for weight in self._weights}
        frozen = {id(weight) for weight in self.module.parameters()} - trained
        return {
            name: "weight" if id(value) in trained else "frozen weight" if id(value) in frozen else "buffer"
            for name, value in named_tensors(self.module)
        }

    def split_buffers(self) -> list[str]:
        """Names of the buffers that are no longer equal on all ranks."""
        names = {(id(owner), name): path for path, owner, name in _buffer_paths(self.module)}
        return [
            names[id(owner), name]
            for index, (owner, name) in enumerate(self._slots)
            if any(not torch.equal(self._buffers[0][index], other[index]) for other in self._buffers[1:])
        ]

    @torch.no_grad()
    def loss_with_buffers(self, rank: int, batch: MicroBatch) -> float:
        """The loss of a micro-batch that finds the buffers of ``rank``. Moves those buffers as training would."""
        self._show_buffers(rank)
        return float(self._forward(batch))

    @torch.no_grad()
    def loss_of_two(self, batches: Sequence[Sequence[MicroBatch]]) -> float | None:
        """The loss of two micro-batches taken as one, over the mean of their losses, in eval mode: 1 for a mean over
        samples, 2 for a sum. None when there is only one, or the model does not take them, or does not repeat itself."""
        pair = [batch for row in batches for batch in row][:2]
        if len(pair) < 2:
            return None
        modes = [(owner, owner.training) for owner in self.module.modules()]
        self.module.eval()
        try:
            apart = [float(self._forward(batch)) for batch in pair]
            together = float(self._forward(tuple(torch.cat(parts) for parts in zip(*pair, strict=True))))
            repeats = float(self._forward(pair[0])) == apart[0]
        except Exception:  # a model may insist on its batch size: then there is nothing to say
            return None
        finally:
            for owner, mode in modes:
                owner.training = mode
        return 2 * together / sum(apart) if repeats and sum(apart) else None

    def _place(self) -> None:
        kept = {id(p) for m in self.module.modules() if isinstance(m, _BatchNorm) for p in m.parameters(recurse=False)}
        for weight in self.module.parameters():
            values = weight.detach().to(self._device)
            ordinary = values.dtype in (torch.float32, *SIXTEEN_BIT)
            dtype = self.arithmetic.compute if ordinary and id(weight) not in kept else values.dtype
            if not weight.requires_grad:
                weight.data = values.to(dtype)
                continue
            master = _widened(values).clone()
            if self._jitter is not None:
                self._shake(master, torch.finfo(master.dtype).eps / 2)
            weight.data = master if master.dtype == dtype else master.to(dtype)
            self._weights.append(weight)
            self._masters.append(weight if master.dtype == dtype else master.requires_grad_())

    def _run(self, rank: int, batch: MicroBatch) -> tuple[float, Gradients]:
        self._show_buffers(rank)
        loss = self._forward(batch)
        (loss.float() * self._scaler.scale if self._scaler else loss).backward()
        self._buffers[rank] = [self._buffer(*slot) for slot in self._slots]
        found: Gradients = [weight.grad for weight in self._weights]
        for weight in self._weights:
            weight.grad = None
        return float(loss.detach()), found

    def _forward(self, batch: MicroBatch) -> Tensor:
        lowered = self.arithmetic.autocast
        with torch.autocast(self._device.type, lowered, cache_enabled=False) if lowered else contextlib.nullcontext():
            return loss_of(self.module(*(part.to(self._device) for part in batch)))

    def _sum_each(self, gradients: Callable[[int, int], Gradients]) -> Gradients:
        dtypes = self._dtypes(self.arithmetic.accumulate)
        total = _Tree(dtypes) if self.arithmetic.micro_batch_tree else _Row(dtypes)
        for micro in range(self.arithmetic.accumulation):
            ranks = _Tree(dtypes)
            for rank in range(self.arithmetic.world):
                ranks.add(self._as_sent(gradients(rank, micro)))
            total.add(ranks.total())
        return total.total()

    def _sum_once(self, gradients: Callable[[int, int], Gradients]) -> Gradients:
        ranks = _Tree(self._dtypes(self.arithmetic.accumulate))
        for rank in range(self.arithmetic.world):
            own = _Row(self._dtypes(self.arithmetic.local_accumulate))
            for micro in range(self.arithmetic.accumulation):
                own.add(gradients(rank, micro))
            ranks.add(self._as_sent(own.total()))
        return ranks.total()

    def _dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        """``dtype``, or the weight's own where that is wider than fp32."""
        return [dtype if master.dtype == torch.float32 else master.dtype for master in self._masters]

    def _as_sent(self, gradients: Gradients) -> Gradients:
        """A rank's contribution to the sum over ranks, rounded to the wire's dtype where there are others."""
        sent = gradients if self.arithmetic.world == 1 else _in(gradients, self._dtypes(self.arithmetic.wire))
        if self._jitter is None:
            return sent
        # Every contribution by one rounding, not their sum: where contributions cancel, sums in another order are further
        # apart than one rounding of the sum.
        wide = _in(sent, self._dtypes(self.arithmetic.accumulate))
        for part, own in zip(wide, self._dtypes(self.arithmetic.rounding), strict=True):
            if part is not None:
                self._shake(part, torch.finfo(own).eps / 2)
        return wide

    def _update(self, total: Gradients) -> float:
        """Average, clip, step; returns the norm before clipping. A norm that is not finite changes nothing."""
        plan = self.arithmetic
        divisor = plan.accumulation * (plan.world if plan.average else 1) * (self._scaler.scale if self._scaler else 1)
        for master, gradient in zip(self._masters, total, strict=True):
            if gradient is None:
                continue
            master.grad = gradient.to(master.dtype).div_(divisor)
        present = [master.grad for master in self._masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm([gradient.abs().double() for gradient in present], plan.norm_order)
        applied = bool(norm.isfinite())
        if applied:
            if plan.clip_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self._masters, plan.clip_norm, norm)
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None
            if weight is not master:
                weight.data.copy_(master.detach())
        if self._scaler:
            self._scaler.update(overflow=not applied)
        return float(norm)

    @torch.no_grad()
    def _shake(self, tensor: Tensor, size: float) -> None:
        noise = torch.randint(2, tensor.shape, generator=self._jitter).mul_(2).sub_(1).to(tensor.device)
        tensor.add_(tensor * noise, alpha=size)

    def _show_buffers(self, rank: int) -> None:
        for (owner, name), value in zip(self._slots, self._buffers[rank], strict=True):
            owner._buffers[name] = value

    @staticmethod
    def _buffer(owner: nn.Module, name: str) -> Tensor:
        value = owner._buffers[name]
        assert value is not None
        return value


class _Row:
    """Adds gradients one after the other."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        self.dtypes = dtypes
        self._held: list[tuple[Gradients, int]] = []
        """Sums, and how many contributions are in each."""

    def add(self, gradients: Gradients) -> None:
        """One more contribution."""
        if self._held:
            gradients = _added(self._held.pop()[0], gradients, self.dtypes)
        self._held.append((_in(gradients, self.dtypes), 0))

    def total(self) -> Gradients:
        """The sum of all; last sums first."""
        total = self._held.pop()[0]
        while self._held:
            total = _added(self._held.pop()[0], total, self.dtypes)
        return _in(total, self.dtypes)


class _Tree(_Row):
    """Adds them, in the order in which they come, as a balanced binary tree, holding few of them at a time.

    After k contributions it holds one sum per binary digit of k; the last ones are added first. That is the tree which
    splits at the largest power of two below.
    """

    def add(self, gradients: Gradients) -> None:
        """One more contribution."""
        size = 1
        while self._held and self._held[-1][1] == size:
            gradients = _added(self._held.pop()[0], gradients, self.dtypes)
            size *= 2
        self._held.append((gradients, size))


def _in(gradients: Gradients, dtypes: Sequence[torch.dtype]) -> Gradients:
    return [None if g is None else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]


def _added(left: Gradients, right: Gradients, dtypes: Sequence[torch.dtype]) -> Gradients:
    """Sums in ``dtypes``, in the memory of ``left`` where that has the dtype; None counts as zero."""
    wide = _in(left, dtypes)
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(wide, right, strict=True)]


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in SIXTEEN_BIT else tensor


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under the names of ``state_dict()``, in its order; tied ones under each name."""
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield prefix + name, buffer


def _buffer_paths(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for name in owner._buffers:
            yield (f"{path}.{name}" if path else name), owner, name


@torch.no_grad()
def adopt(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give ``module`` these weights and buffers; one born on the meta device is brought to life first."""
    lives: dict[int, Tensor] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for name, value in table.items():
                if value is not None and value.is_meta:
                    if id(value) not in lives:
                        empty = torch.empty_like(value, device="cpu")
                        lives[id(value)] = (
                            nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty
                        )
                    table[name] = lives[id(value)]  # type: ignore[assignment]
    if lives:
        for owner in module.modules():
            reset = getattr(owner, "reset_parameters", None)
            if reset is not None:
                reset()  # for buffers that no state dict holds
    for name, value in named_tensors(module):
        value.copy_(values[name])


def equal_tensors(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules of the same make hold the same weights and buffers, bit for bit."""
    pairs = zip(named_tensors(one), named_tensors(other), strict=True)
    return all(name == name_ and torch.equal(value, value_) for (name, value), (name_, value_) in pairs)
