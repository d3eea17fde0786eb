"""The training engine: what ``shardledger.initialize`` returns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shardledger.errors import EngineStateError
from shardledger.layout.build import Layout
from shardledger.plan.plan import Plan
from shardledger.runtime.account import Account
from shardledger.runtime.assemble import Parts
from shardledger.runtime.census import probe_optimizer
from shardledger.runtime.checks import FullChecks
from shardledger.runtime.clock import StepClock
from shardledger.runtime.compile_calls import CompileCalls
from shardledger.runtime.consolidate import full_state_dict, load_full_state_dict
from shardledger.runtime.conversions import CONVERSIONS, conversion
from shardledger.runtime.describe import dtype_of
from shardledger.runtime.engine_values import (
    agree_on_order,
    autocast,
    cast_floats,
    describe_loss,
    device_of,
    difference,
    plain,
)
from shardledger.runtime.gathered import announce
from shardledger.runtime.last_words import end, listen_for_the_end
from shardledger.runtime.offload_calls import OffloadCalls
from shardledger.runtime.out_of_memory import telling_shortage
from shardledger.runtime.step import Stepper, Window
from shardledger.telemetry.memory import MemoryMeter


class Engine(OffloadCalls, CompileCalls):
    """Trains a sharded module. Calls and counters carry DeepSpeed's names where DeepSpeed has them."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        layout: Layout,
        parts: Parts,
        optimizer: torch.optim.Optimizer,
        stepper: Stepper,
        meter: MemoryMeter,
    ) -> None:
        self.module = module
        self.plan = plan
        self.layout = layout
        self.optimizer = optimizer
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.config: Any = None
        self.device: torch.device = parts.units[0].flats[0].device if parts.units[0].flats else device_of(parts)
        self._parts: Parts | None = parts
        self._clock = StepClock(
            every=plan.reporting.every,
            precise=plan.reporting.breakdown,
            speaks=parts.transport.rank == 0,
            device=self.device,
        )
        self._stepper = stepper
        self._account = Account(plan, layout, meter, probe_optimizer(optimizer))
        self._checks = FullChecks(parts.units, parts.transport) if plan.step.full_checks else None
        self._progress = parts.progress
        parts.stepper, account = stepper, self._account
        parts.explain = lambda error, phase: account.shortage(error, phase, parts, optimizer)
        self._progress.traffic_at_start = parts.transport.counters.snapshot()
        self._progress.traffic_at_step = parts.transport.counters.snapshot()
        announce(parts)
        listen_for_the_end()
        self._set_boundary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        parts = self._live()
        if torch.is_grad_enabled():
            parts.watch.check()
        if self._checks is not None and torch.is_grad_enabled():
            self._checks.note_batch((args, kwargs))
        if self.plan.precision.cast_inputs:
            args, kwargs = cast_floats((args, kwargs), dtype_of(self.plan.precision.compute))
        parts.enter("forward")
        try:
            with self._at("forward", parts), self._saved_tensors(parts), autocast(self.plan, self.device):
                return self.module(*args, **kwargs)
        except BaseException:
            self._abort(parts)
            raise

    forward = __call__

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        denominator: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the backward pass and return ``loss`` as it came: gradients are averaged at the step, not through it.

        Args:
            loss: a scalar that requires gradients.
            retain_graph: as in ``torch.Tensor.backward``.
            scale_wrt_gas: False when the loss has been divided by the accumulation steps already.
            denominator: what ``loss`` is a mean over (its tokens, say). The step then divides by the sum over all
                micro-batches and ranks, so that every token weighs the same. 0 counts the micro-batch as absent, even
                when its loss is NaN.

        Raises:
            EngineStateError: the loss has no graph, or micro-batches of one step disagree on having a denominator.
        """
        parts = self._live()
        if not isinstance(loss, torch.Tensor) or loss.grad_fn is None and not loss.requires_grad:
            raise EngineStateError(
                f"engine.backward needs a loss that depends on trainable parameters; got {describe_loss(loss)}. Was the "
                f"forward pass run under torch.no_grad(), or the loss detached?"
            )
        weight = None if denominator is None else float(denominator)
        self._progress.weigh(weight)
        factor = (weight or 1.0) * (1 if scale_wrt_gas else self.plan.step.accumulation)
        target = self.scale(loss)
        parts.mode.mute = weight == 0
        try:
            with self._at("backward", parts):
                (target * factor if factor != 1.0 else target).backward(retain_graph=retain_graph)
        except BaseException:
            self._abort(parts)
            raise
        finally:
            parts.mode.mute = False
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for ``scaled.backward()`` in fp16; the loss itself without a loss scale."""
        self._live().scaled = True
        scaler = self._stepper.scaler
        return loss.float() * scaler.scale if scaler.active else loss

    def step(self) -> None:
        """Count one micro-batch; at the accumulation boundary clip, update the weights and advance the scheduler.

        Raises:
            EngineStateError: a backward pass is unfinished, or gradients are not finite and the run is to end.
        """
        parts = self._live()
        if parts.schedule.in_backward:
            self._abort(parts)
            raise EngineStateError("engine.step was called while a backward pass is unfinished (it raised?).")
        progress = self._progress
        boundary = self.is_gradient_accumulation_boundary()
        progress.count_micro_batch(self.plan.step.micro_batch * self.plan.world)
        if boundary:
            self._take_step(parts)
        self._set_boundary()

    def flush(self) -> None:
        """Step now if micro-batches have been accumulated (an epoch ended inside a window), averaging over those.

        Collective: every rank calls it. Without accumulated micro-batches it does nothing.
        """
        parts = self._live()
        if self._progress.window:
            self._take_step(parts)
            self._set_boundary()

    def _take_step(self, parts: Parts) -> None:
        progress = self._progress
        if parts.executor.pinned:
            raise EngineStateError(
                "engine.step was called inside GatheredParameters: what the block holds would be stale after the update, "
                "or undo it. Leave the block first."
            )
        if self.optimizer is not self._stepper.optimizer:
            raise EngineStateError(
                "engine.optimizer was replaced after shardledger.initialize, and the new one does not know the shards: pass "
                "it to initialize (optimizer=...)."
            )
        parts.watch.check(thorough=parts.executor.measuring or self._checks is not None)
        first = progress.last is None
        try:
            if parts.unsynced:
                parts.executor.reduce_everything()
                parts.unsynced = False
            parts.enter("step")
            window = Window(progress.window_weight, self.plan.step.clip_norm, progress.global_steps + 1)
            progress.end_window()
            parts.mode.widen = not parts.executor.sync
            if self._checks is not None:
                self._checks.before_step(window.step)
            with self._at("step", parts):
                outcome = self._stepper.step(parts.executor, window)
        except BaseException:
            self._abort(parts)
            raise
        progress.last = outcome
        parts.executor.measuring = first
        if outcome.applied:
            parts.saved.updates += 1
            parts.watch.note_update()
            progress.global_steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            progress.skipped_steps += 1
            warnings.warn(
                f"step {window.step} skipped on all ranks, gradients are not finite: {outcome.blame}. Weights, counters "
                f"and learning rate did not move ({progress.skipped_steps} skipped so far"
                f"{f', loss scale now {self.loss_scale:g}' if self._stepper.scaler.active else ''}).",
                stacklevel=3,
            )
        if first:
            self._agree_on_order(parts)
        now = parts.transport.counters.snapshot()
        progress.traffic_of_step = difference(now, progress.traffic_at_step)
        progress.traffic_at_step = now
        if parts.saver is not None:
            self._set_boundary()  # first: an asynchronous save may raise here, and training may go on
            parts.saver.after_step()
        if outcome.applied:
            self._clock.report(progress.global_steps, progress.skipped_steps, self.get_lr(), outcome.grad_norm)

    def _agree_on_order(self, parts: Parts) -> None:
        agree_on_order(parts)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before the optimizer step."""
        if self._progress.forced_boundary is not None:
            return self._progress.forced_boundary
        return self._progress.window + 1 >= self.plan.step.accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide for the current micro-batch whether ``step`` updates the weights."""
        self._progress.forced_boundary = is_boundary
        self._set_boundary()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients local; the next one outside, or the step, reduces the sum."""
        parts = self._live()
        if self.plan.reproducible:
            raise EngineStateError(
                "no_sync adds micro-batches on each rank before ranks are added, so the result would depend on the "
                "number of ranks: it cannot be combined with shardledger.reproducible."
            )
        before = parts.executor.sync
        parts.executor.sync, parts.mode.widen = False, True
        try:
            yield
        finally:
            parts.executor.sync, parts.mode.widen = before, not before

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.plan.step.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch and rank."""
        return self.plan.step.micro_batch

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.plan.step.micro_batch * self.plan.step.accumulation * self.plan.world

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._live().transport.rank

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.plan.world

    @property
    def global_steps(self) -> int:
        """Optimizer steps that changed the weights."""
        return self._progress.global_steps

    @property
    def micro_steps(self) -> int:
        """Calls of ``step``."""
        return self._progress.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradient was not finite."""
        return self._progress.skipped_steps

    @property
    def global_samples(self) -> int:
        """Samples seen by all ranks."""
        return self._progress.global_samples

    @property
    def comm_wait_s(self) -> float:
        """Seconds this rank has waited in collectives since initialize."""
        return self._live().transport.counters.wait_s

    def was_step_applied(self) -> bool:
        """Whether the last optimizer step changed the weights."""
        return self._progress.last is not None and self._progress.last.applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of the averaged gradient over all ranks before clipping, at the last step; None before the first."""
        return self._progress.last.grad_norm if self._progress.last else None

    def get_clip_coefficient(self) -> float | None:
        """What the last step multiplied the gradient with to clip it; 1.0 when it was within bounds."""
        return self._progress.last.clip_coefficient if self._progress.last else None

    def get_lr(self) -> list[float]:
        """Learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with now; 1.0 without fp16."""
        return self._stepper.scaler.scale

    def fp16_enabled(self) -> bool:
        """Whether weights compute in fp16."""
        return self.plan.precision.compute == "float16"

    def bfloat16_enabled(self) -> bool:
        """Whether weights compute in bf16."""
        return self.plan.precision.compute == "bfloat16"

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.plan.stage

    def communication(self) -> dict[str, dict[str, dict[str, int]]]:
        """Bytes, elements and calls sent from this rank by kind: during the last step, since the start, and before it."""
        progress = self._progress
        now = self._live().transport.counters.snapshot()
        return {
            "step": plain(progress.traffic_of_step),
            "training": plain(difference(now, progress.traffic_at_start)),
            "initialize": plain(progress.traffic_at_start),
        }

    def ledger(self) -> dict[str, dict[str, int | None]]:
        """Bytes on this rank by category, predicted from the layout and measured from live storages."""
        return self._account.ledger(self._live(), self.optimizer)

    def gather_scalars(self, values: list[float]) -> list[list[float]]:
        """Every rank's ``values`` (equally many), by rank; collective."""
        rows = self._live().transport.exchange(torch.tensor(values, dtype=torch.float64), "exchange of records")
        return [list(map(float, row)) for row in rows.tolist()]

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The keys of ``module.state_dict()`` with whole fp32 CPU tensors on rank 0, ``{}`` elsewhere; collective."""
        parts = self._live()
        return full_state_dict(self.module, parts, all_ranks=all_ranks)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights and buffers into masters and weights, at every stage; collective, rank 0's dict counts.

        Raises:
            EngineStateError: on all ranks, naming missing, unexpected and misshapen keys.
        """
        parts = self._live()
        load_full_state_dict(self.module, parts, state_dict, strict=strict)
        parts.saved.updates += 1
        parts.watch.note_update()

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that a continued run needs as ``save_dir/tag`` (``global_step{N}``); every rank calls it.

        ``client_state`` is rank 0's: plain values and tensors, given back by ``load_checkpoint``. Returns True. Raises
        CheckpointError, the same on all ranks; the last complete checkpoint stays what it was.
        """
        return self.checkpoints.save(
            save_dir, tag, client_state, latest=save_latest, exclude_frozen=exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from ``load_dir/tag``, or from the latest one; any number of ranks and any stage may have saved it.

        Every rank calls it. Returns the checkpoint's path and its client state; ``(None, {})`` without a ``latest``.
        Raises CheckpointError, the same on all ranks, before anything was changed unless reading itself failed.
        """
        return self.checkpoints.load(
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    @property
    def checkpoints(self) -> Any:
        """What saves and loads this engine (``checkpoint.Checkpoints``): ``wait``, ``take_reports``, ``last_load``."""
        return self._live().saver

    def train(self, mode: bool = True) -> Engine:
        """As ``nn.Module.train``."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As ``nn.Module.eval``."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients accumulated since the last step."""
        self._live().executor.settle_reductions()
        self._stepper.discard()
        self._progress.end_window()
        self._set_boundary()

    def destroy(self) -> None:
        """Detach from the module and free the engine's memory. Ends the process group if initialize made it.

        Collective: waits until every rank's engine ends. While an exception is handled it does not wait, but tells the
        other ranks of the exception.

        Raises:
            RanksDisagreeError: another rank goes on to train (it had more batches, say).
        """
        parts, self._parts = self._parts, None
        if parts is None:
            return
        end(parts, sys.exc_info()[1])

    def __getattr__(self, name: str) -> Any:
        """Attributes the engine does not have are the module's."""
        if name.startswith("__") or "module" not in self.__dict__:
            raise AttributeError(name)
        if name in CONVERSIONS and self._parts is not None:
            return conversion(self, name)
        return getattr(self.module, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """An engine is part of a conversation between processes: it cannot be copied or pickled."""
        raise EngineStateError(
            "an engine cannot be copied, pickled or given to torch.save: use engine.save_checkpoint(...) or "
            "engine.state_dict(), and copy the model before shardledger.initialize."
        )

    def _live(self) -> Parts:
        if self._parts is None:
            raise EngineStateError("this engine was destroyed: call shardledger.initialize again.")
        return self._parts.usable()

    def _abort(self, parts: Parts) -> None:
        """Clean up after an exception; the accumulation window starts anew."""
        parts.abort()
        self._progress.end_window()
        self._set_boundary()

    def _set_boundary(self) -> None:
        self._live().executor.boundary = self.is_gradient_accumulation_boundary()

    @contextmanager
    def _saved_tensors(self, parts: Parts) -> Iterator[None]:
        """Look at what autograd saves: weights always, for their safety; everything once, to measure activations."""
        with ExitStack() as stack:
            if torch.is_grad_enabled():
                measured = self._progress.micro_steps == 0 and self.module.training
                meter = self._account.begin_forward(parts) if measured else None
                if parts.saved.needed:
                    stack.enter_context(parts.saved.watch(meter.note if meter else None))
                elif meter:
                    stack.enter_context(meter.watch())
            yield

    @contextmanager
    def _at(self, phase: str, parts: Parts) -> Iterator[None]:
        """Time a phase, and tell the ledger when memory runs out in it."""
        with self._clock.time(phase), telling_shortage(lambda error: parts.explain(error, phase)):
            yield
