"""Attaches a counter of live bytes to an engine: what each storage is for, which phase and which unit is at work.

Used by the dry run, where it predicts, and by verification, where it measures. Off the hot path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardledger.runtime.engine import Engine
from shardledger.runtime.hooks import tensors_in
from shardledger.runtime.unit import Unit
from shardledger.telemetry.live import LiveBytes, Peaks
from shardledger.transport import Transport
from shardledger.transport.metered import MeteredTransport


class Observer:
    """The counter of one engine. Make it before ``initialize``, inside ``meter``; attach it after."""

    def __init__(self, meter: LiveBytes) -> None:
        self.meter = meter
        self._handles: list[Any] = []
        self._engine: Engine | None = None
        self._unmetered: Transport | None = None

    def attach(self, engine: Engine) -> None:
        """Follow ``engine`` from now on."""
        self._engine = engine
        parts = engine._live()
        self._unmetered = parts.transport
        transport = MeteredTransport(parts.transport, self.meter)
        parts.transport = parts.executor._transport = engine._stepper._transport = transport
        for unit in parts.units:
            for flat in unit.flats:
                self.meter.assign("communication" if flat.layout.param_sharded else "params", [flat.full])
                for tensor in (flat.shard, flat.master):
                    if tensor is not None:
                        self.meter.assign("params" if tensor.dtype == flat.dtype else "master", [tensor])
            self.meter.assign("grads", [t for g in unit.gradients for t in (g.local, g.held_sum) if t is not None])
            self._handles.append(unit.module.register_forward_pre_hook(partial(self._enter, unit), prepend=True))
            self._handles.append(unit.module.register_forward_hook(partial(self._leave, unit), prepend=True))
        self.meter.assign("params", (b for b in engine.module.buffers()))
        if parts.offload is not None and parts.executor.shards is not None:
            self.meter.assign("communication", [*parts.offload.buffers(), *parts.executor.shards.buffers()])
        parts.mode.made = self._sum_made
        self.meter.reattribute = partial(_pending, parts.units)
        self.note_states()
        self.meter.born()

    def detach(self) -> None:
        """Take the hooks away, and unwrap the transport."""
        if self._engine is not None and self._unmetered is not None:
            parts = self._engine._live()
            parts.transport = parts.executor._transport = self._engine._stepper._transport = self._unmetered
            self._unmetered = None
            parts.mode.made = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.meter.reattribute = dict

    def micro_batch(self, batch: Callable[[], tuple[Any, ...]], loss_of: Callable[[Any], torch.Tensor]) -> None:
        """One micro-batch as a training loop runs it; the engine steps when it is due."""
        engine, meter = self._engine, self.meter
        assert engine is not None
        meter.enter("forward")
        inputs = batch()
        meter.assign("activations", tensors_in(inputs))
        loss = loss_of(engine(*inputs))
        engine.backward(loss)
        meter.enter("step")  # also where the engine takes none: between micro-batches
        engine.step()
        self.note_states()
        meter.sample()

    def note_states(self) -> None:
        """The optimizer may have made states: say what they are."""
        assert self._engine is not None
        states = self._engine.optimizer.state.values()
        self.meter.assign("optimizer", [t for state in states for t in state.values() if isinstance(t, torch.Tensor)])

    @property
    def peaks(self) -> Peaks:
        """The highest readings so far."""
        return self.meter.peaks

    def _sum_made(self, tensor: torch.Tensor) -> None:
        self.meter.assign("grads", [tensor])

    def _enter(self, unit: Unit, module: nn.Module, args: Any) -> None:
        self.meter.scope.unit = unit.label

    def _leave(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        assert self._engine is not None
        self.meter.scope.unit = self._engine._live().units[0].label
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._returned, unit))

    def _returned(self, unit: Unit, gradient: torch.Tensor) -> None:
        self.meter.scope.unit = unit.label


def _pending(units: Iterable[Unit]) -> dict[tuple[str, str], int]:
    """Unreduced gradients wait for their collective; they were allocated by the backward pass."""
    waiting = 0
    for unit in units:
        for gradients in unit.gradients:
            if gradients.local is not None and not gradients.keeps_local:
                waiting += gradients.local.untyped_storage().nbytes()
    return {("temporary", "communication"): waiting} if waiting else {}
