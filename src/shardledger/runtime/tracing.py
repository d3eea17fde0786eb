"""Attaches a record of spans to an engine: phases, units in forward and backward, collectives, the optimizer.

Made of hooks and of wrappers around the transport and the clock, so an engine that is not traced pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardledger.runtime.engine import Engine
from shardledger.runtime.hooks import tensors_in
from shardledger.runtime.unit import Unit
from shardledger.telemetry.trace import Spans
from shardledger.transport.traced import TracedTransport


class Tracer:
    """Records what ``engine`` does from now on."""

    def __init__(self, engine: Engine, spans: Spans) -> None:
        self.spans = spans
        self._forward: dict[int, list[float]] = {}
        """When the calls of each unit that are under way began."""
        self._backward: tuple[str, float] | None = None
        """The unit whose gradients are being computed, and since when."""
        self._updated = 0.0
        parts = engine._live()
        transport = TracedTransport(parts.transport, spans)
        parts.transport = parts.executor._transport = engine._stepper._transport = transport
        engine._clock = _TracedClock(engine._clock, self)  # type: ignore[assignment]
        self._handles: list[Any] = [
            engine.optimizer.register_step_pre_hook(self._before_update),
            engine.optimizer.register_step_post_hook(self._after_update),
        ]
        engine._stepper.own_hooks |= {handle.id for handle in self._handles}
        for unit in parts.units:
            self._handles.append(unit.module.register_forward_pre_hook(partial(self._enter, unit)))
            self._handles.append(unit.module.register_forward_hook(partial(self._leave, unit), prepend=True))

    def detach(self) -> None:
        """Take the hooks away; transport and clock stay wrapped."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block; the backward pass of the last unit ends with it."""
        with self.spans.span(name, "phase"):
            try:
                yield
            finally:
                self._end_backward()
                self._forward.clear()

    def _enter(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if self._backward is not None:
            # A moment, not a span: autograd may end a recomputation in the middle, by an exception that no hook sees.
            self.spans.mark(f"recompute {unit.label}", "unit")
            return
        self._forward.setdefault(unit.index, []).append(self.spans.now())

    def _leave(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        begun = self._forward.get(unit.index)
        if begun and self._backward is None:
            self.spans.add(f"forward {unit.label}", "unit", begun.pop())
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._returned, unit))

    def _returned(self, unit: Unit, gradient: torch.Tensor) -> None:
        if self._backward is not None and self._backward[0] == unit.label:
            return
        self._end_backward()
        self._backward = (unit.label, self.spans.now())

    def _end_backward(self) -> None:
        if self._backward is not None:
            self.spans.add(f"backward {self._backward[0]}", "unit", self._backward[1])
            self._backward = None

    def _before_update(self, *_: Any) -> None:
        self._updated = self.spans.now()

    def _after_update(self, *_: Any) -> None:
        self.spans.add("optimizer", "update", self._updated)


class _TracedClock:
    """A ``StepClock`` whose parts are recorded."""

    def __init__(self, inner: Any, tracer: Tracer) -> None:
        self.seconds = inner.seconds
        self._inner = inner
        self._tracer = tracer

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """See ``StepClock.time``."""
        with self._tracer.phase(part), self._inner.time(part):
            yield

    def report(self, *facts: Any) -> None:
        """See ``StepClock.report``."""
        self._inner.report(*facts)
