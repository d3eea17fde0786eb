"""The optimizer step: agree on the norm, decide together, update this rank's pieces, publish the new weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardledger.errors import EngineStateError
from shardledger.plan.plan import Plan
from shardledger.runtime import exact
from shardledger.runtime.bucket_step import BucketStep
from shardledger.runtime.executor import Executor
from shardledger.runtime.gradients import FlatGradients
from shardledger.runtime.loss_scale import LossScaler
from shardledger.runtime.offload import Offload
from shardledger.runtime.optimizer import Piece, point
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.tile_step import TileStep
from shardledger.runtime.unit import Unit
from shardledger.transport import Transport

FLAGS_PER_NUMBER = 48
"""Presence flags per number of the exchange: integers below 2**48 survive a float64."""


_ROW = 4096
"""Elements whose squares are added in fp32 before the sum goes on in fp64."""


@dataclass(frozen=True)
class Window:
    """The micro-batches that one step is made of, on this rank."""

    weight: float
    """Sum of their weights: their number, or the tokens they hold."""
    clip_norm: float
    step: int
    """Number of the step, for messages."""


@dataclass(frozen=True)
class StepOutcome:
    """What one step decided, the same on every rank."""

    grad_norm: float
    """Global norm of the averaged, unscaled gradient, before clipping."""
    clip_coefficient: float
    """What the gradients were multiplied with to meet the clipping norm; 1 when they met it."""
    applied: bool
    """Whether the optimizer ran: not when the norm is infinite or NaN."""
    blame: str = ""
    """Where the non-finite values are: parameter, inf or NaN, ranks."""


class Stepper:
    """Owns the optimizer's pieces between backward passes."""

    def __init__(
        self,
        units: Sequence[Unit],
        pieces: Sequence[Piece],
        optimizer: torch.optim.Optimizer,
        transport: Transport,
        plan: Plan,
        offload: Offload | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.offload = offload
        self.running = False
        """Whether the optimizer is called by the engine."""
        self.scaler = LossScaler(plan.precision.loss_scale)
        self.skipped_in_a_row = 0
        self._gradients = [g for unit in units for g in unit.gradients]
        self._gradients_of = {id(g.flat): g for g in self._gradients}
        self._names = [slot.name for gradients in self._gradients for slot in gradients.flat.layout.slots]
        self._pieces = pieces
        self._held = _tensors_of(optimizer)
        self._guards = (
            optimizer.register_step_pre_hook(self._refuse_others),
            optimizer.register_load_state_dict_pre_hook(self._refuse_states),
        )
        self.own_hooks = {self._guards[0].id}
        """Hooks on the optimizer's steps that may fire several times a step."""
        self._buckets = BucketStep(units, pieces, optimizer) if offload is None else None
        self._transport = transport
        self._plan = plan

    def step(self, executor: Executor, window: Window) -> StepOutcome:
        """Take one optimizer step from the gradients of a window of micro-batches.

        Raises:
            EngineStateError: on all ranks, when gradients are not finite and the plan says to raise, when too many
                steps in a row were skipped, or when the loss scale cannot get smaller.
        """
        try:
            self._refuse_changes()
            executor.complete()
            norm_of_sum, weight, present = self._agree(window.weight)
            divisor = self.divisor(weight)
            norm = norm_of_sum / divisor if divisor else 0.0
            applied = math.isfinite(norm)
            coefficient = min(1.0, window.clip_norm / (norm + 1e-6)) if window.clip_norm > 0 and applied else 1.0
            blame = "" if applied else self._find_blame()
            if applied:
                self._update(executor, coefficient / divisor if divisor else 0.0, present)
        except BaseException:
            # Some may be scaled, others in flight: the engine drains and resets them, so that none comes into the next step.
            self._let_go()
            raise
        self.discard()
        self._judge(applied, blame, window.step)
        return StepOutcome(norm, coefficient, applied, blame)

    def _update(self, executor: Executor, factor: float, present: Mapping[str, bool]) -> None:
        """Scale the gradients, update the masters, and bring the new weights to every rank."""
        sum_of = partial(self._sum_of, factor)
        if self.offload is not None:
            TileStep(self.offload, self.optimizer, self._run_optimizer).run(executor, self._pieces, present, sum_of)
        elif self._buckets is not None and self._buckets.pays(self.own_hooks):
            self._buckets.run(executor, self._run_optimizer, present, sum_of)
        else:
            self._hand_over(factor, present)
            self._run_optimizer()
            executor.publish()

    def _sum_of(self, factor: float, flat: FlatParameters) -> torch.Tensor | None:
        """The scaled gradient of a flat, where its optimizer step is taken."""
        found = scaled_sum(self._gradients_of[id(flat)], factor)
        if found is None or self.offload is None or not flat.homes.moved or self._gradients_of[id(flat)].sum_is_away:
            return found
        return self.offload.on_host(found)

    def _run_optimizer(self) -> None:
        self.running = True
        try:
            self.optimizer.step()
        finally:
            self.running = False

    def _judge(self, applied: bool, blame: str, step: int) -> None:
        """Move the loss scale; end the run where going on would only hide the trouble."""
        exhausted = not applied and self.scaler.at_minimum
        scale = self.scaler.scale
        self.scaler.update(overflow=not applied)
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if applied:
            return
        if exhausted:
            raise EngineStateError(
                f"step {step}: the loss scale is already at its minimum {scale:g} and gradients still are not finite: "
                f'{blame}. fp16 cannot hold these values: train in bf16 ("bf16": {{"enabled": true}}), or look at '
                f"that parameter and the loss."
            )
        rule = self._plan.step
        if rule.raise_on_nonfinite:
            raise EngineStateError(
                f"step {step}: gradients are not finite: {blame}. No weight was changed. (shardledger.nonfinite is "
                f'"raise"; "skip" skips such steps with a warning.)'
            )
        limit = rule.max_consecutive_skips
        if self.skipped_in_a_row >= limit and not self.scaler.dynamic:
            raise EngineStateError(
                f"step {step}: {self.skipped_in_a_row} steps in a row were skipped because gradients are not finite: "
                f"{blame}. The run is not learning any more: lower the learning rate, clip gradients, or check the data "
                f"and the loss. (shardledger.max_consecutive_skips is {limit}.)"
            )

    def _find_blame(self) -> str:
        """Name the parameters that are not finite, and the ranks whose own gradients were not; collective."""
        report = []
        for index, gradients in enumerate(self._gradients):
            names = []
            if gradients.has_sum:
                shard = gradients.reduced_shard()
                for piece in gradients.flat.layout.pieces(gradients.flat.rank):
                    part = shard[piece.in_shard.start : piece.in_shard.stop]
                    if not bool(part.isfinite().all()):
                        slots = [slot.name for slot in gradients.flat.layout.slots]
                        names.append((slots.index(piece.name), bool(part.isnan().any())))
            own = gradients.probe is not None and not bool(gradients.probe.isfinite().all())
            first = names[0] if names else (-1, False)
            report += [float(index), float(first[0]), float(first[1]), float(own)]
        rows = self._transport.exchange(
            torch.tensor(report, dtype=torch.float64), "exchange of non-finite parameters"
        ).tolist()
        found = []
        for index, gradients in enumerate(self._gradients):
            cells = [row[4 * index : 4 * index + 4] for row in rows]
            bad = sorted((int(cell[1]), bool(cell[2])) for cell in cells if cell[1] >= 0)
            if not bad:
                continue
            ranks = [rank for rank, cell in enumerate(cells) if cell[3]]
            name = gradients.flat.layout.slots[bad[0][0]].name
            kind = "NaN" if any(is_nan for slot, is_nan in bad if slot == bad[0][0]) else "inf"
            whose = f"from rank {', '.join(map(str, ranks))}" if ranks else "from the sum over ranks"
            found.append(f"{name!r} has {kind} {whose}")
        return "; ".join(found[:3]) + (f"; and {len(found) - 3} more units" if len(found) > 3 else "")

    @property
    def pieces(self) -> Sequence[Piece]:
        """What the optimizer holds on this rank."""
        return self._pieces

    def divisor(self, weight: float) -> float:
        """What summed gradients are divided by. ``weight``: of all micro-batches so far, over all ranks."""
        return weight / (1 if self._plan.communication.average else self._transport.world) * self.scaler.scale

    def discard(self) -> None:
        """Forget the gradients of this accumulation window."""
        for gradients in self._gradients:
            gradients.clear()
        self._let_go()

    def _let_go(self) -> None:
        """The optimizer has no gradients any more."""
        for piece in self._pieces:
            piece.values.grad = None

    def forget(self) -> None:
        """Let go of all tensors; the optimizer has no parameters from now on, and refuses to step over none."""
        self._gradients, self._gradients_of = [], {}
        self._pieces = []
        self.offload = self._buckets = None
        for guard in self._guards:
            guard.remove()
        self.optimizer.register_step_pre_hook(_refuse_ended)
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []

    def _refuse_changes(self) -> None:
        for gradients in self._gradients:
            gradients.refuse_changes()
        held = _tensors_of(self.optimizer)
        if held != self._held:
            raise EngineStateError(
                f"the optimizer's param groups hold {held} tensors now, and the engine gave it {self._held}: what was "
                f"added is not trained. Parameters and their groups are set before shardledger.initialize "
                f"(model_parameters=...); learning rates and other options may change any time."
            )

    def _refuse_states(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Before ``optimizer.load_state_dict``: states have the shapes of this rank's pieces, or are another layout's."""
        held = [values for group in optimizer.param_groups for values in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for values, number in zip(held, numbers, strict=False):
            for key, item in state["state"].get(number, {}).items():
                if isinstance(item, torch.Tensor) and item.dim() and item.shape != values.shape:
                    name = next(piece.name for piece in self._pieces if piece.values is values)
                    raise EngineStateError(
                        f"optimizer.load_state_dict: {key!r} of shape {tuple(item.shape)} does not fit this rank's part of "
                        f"parameter {name!r}, {tuple(values.shape)}. This optimizer works on shards: continue with "
                        f"engine.load_checkpoint, which fits any number of ranks and any stage, or set single states with "
                        f"shardledger.utils.safe_set_full_optimizer_state."
                    )

    def _refuse_others(self, *_: Any) -> None:
        if not self.running:
            raise EngineStateError(
                "optimizer.step() was called directly. The gradients are in the engine: call engine.step(), which "
                "reduces, clips, updates and advances the scheduler."
            )

    def _agree(self, weight: float) -> tuple[float, float, dict[str, bool]]:
        """Global norm of the summed gradients, summed weight, and which parameters had a gradient on any rank.

        Squares are added over this rank's shards in fp64, then over ranks in rank order, at every stage alike. Where the
        plan's norm is the largest absolute value, that is what travels instead.
        """
        flags = [flag for gradients in self._gradients for flag in gradients.present]
        by_largest = self._plan.step.norm == "inf"
        norm = self._exact_norm() if self._plan.reproducible and not by_largest else None
        measure = exact.largest(self._shards()) if by_largest else self._local_square() if norm is None else 0.0
        words = _words(flags)
        rows = self._transport.exchange(
            torch.tensor([measure, weight, *words], dtype=torch.float64), "exchange of the gradient norm"
        ).tolist()
        if by_largest:
            norm = largest_of(row[0] for row in rows)
        total = total_weight = 0.0
        for row in rows:
            total += row[0]
            total_weight += row[1]
        merged = [0] * len(words)
        for row in rows:
            merged = [a | int(b) for a, b in zip(merged, row[2:], strict=True)]
        if merged == words and all(flags):
            present = dict.fromkeys(self._names, True)
        else:
            bits = (merged[i // FLAGS_PER_NUMBER] >> (i % FLAGS_PER_NUMBER) & 1 for i in range(len(flags)))
            present = {name: bool(bit) for name, bit in zip(self._names, bits, strict=True)}
        return math.sqrt(total) if norm is None else norm, total_weight, present

    def _shards(self) -> list[torch.Tensor]:
        return [gradients.reduced_shard() for gradients in self._gradients if gradients.has_sum]

    def _local_square(self) -> float:
        return sum(square_sum(shard) for shard in self._shards())

    def _exact_norm(self) -> float:
        """The same norm to the last bit however the gradient is spread over ranks; two more small exchanges."""
        shards = self._shards()
        rows = self._transport.exchange(
            torch.tensor([exact.largest(shards)], dtype=torch.float64), "exchange of the largest gradient"
        )
        bound = largest_of(row[0] for row in rows.tolist())
        if bound == 0 or not math.isfinite(bound):
            return bound
        sums = self._transport.exchange(
            torch.tensor(exact.square_sum(shards, bound), dtype=torch.float64), "exchange of exact gradient squares"
        )
        return exact.norm(sums.tolist(), bound)

    def _hand_over(self, factor: float, present: Mapping[str, bool]) -> None:
        """Point each piece at its part of the reduced gradient, scaled."""
        ready = {id(g.flat): scaled_sum(g, factor) for g in self._gradients}
        for piece in self._pieces:
            point(piece, ready.get(id(piece.flat)), present)


def scaled_sum(gradients: FlatGradients, factor: float) -> torch.Tensor | None:
    """The reduced gradient of a flat as the optimizer takes it, 1-D like the masters; None without one."""
    if not gradients.has_sum:
        return None
    flat = gradients.flat
    reduced = gradients.reduced if not flat.layout.optim_sharded else gradients.reduced_shard()
    if reduced.dtype != flat.master_dtype:
        reduced = reduced.to(flat.master_dtype)
    return reduced if factor == 1.0 else reduced.mul_(factor)


def _words(flags: Sequence[bool]) -> list[int]:
    """Flags as bits of numbers, ``FLAGS_PER_NUMBER`` each, the first one lowest."""
    digits = "".join("1" if flag else "0" for flag in flags)
    return [int(digits[i : i + FLAGS_PER_NUMBER][::-1], 2) for i in range(0, len(digits), FLAGS_PER_NUMBER)]


def _tensors_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _refuse_ended(*_: Any) -> None:
    raise EngineStateError(
        "the engine of this optimizer was destroyed, and with it what the optimizer had to update. Build a new optimizer "
        "over the model's parameters."
    )


def largest_of(values: Iterable[float]) -> float:
    """The largest; infinite when one is NaN."""
    return max(value if value == value else math.inf for value in values)


def square_sum(tensor: torch.Tensor) -> float:
    """Sum of squares of a 1-D tensor: rows in fp32, where the kernel runs at memory speed, rows added in fp64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    whole = tensor.numel() // _ROW * _ROW
    total = 0.0
    for part in (tensor[:whole].view(-1, _ROW), tensor[whole:].view(1, -1)):
        if part.numel():
            total += float(torch.linalg.vector_norm(part, dim=1, dtype=wide).double().square().sum())
    return total
