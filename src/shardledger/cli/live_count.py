"""What a training run on CPU holds, counted exactly: every live byte of initialize and of the first optimizer steps.

The highest moment of a run is in its first two steps: in the first the optimizer makes its states and the engine learns the
order of units, the second is like all that follow. Counting costs a Python call for each operator, so it ends there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardledger.ledger import CATEGORIES
from shardledger.runtime.compiled import is_compiled
from shardledger.runtime.engine import Engine
from shardledger.runtime.observe import Observer
from shardledger.telemetry.live import LiveBytes

if TYPE_CHECKING:
    from torch import nn

STEPS = 2
"""Optimizer steps that are counted."""


class LiveCount:
    """Counts one engine's first steps. A compiled model is not counted: under the counter it would not run compiled."""

    def __init__(self, model: nn.Module, device: str) -> None:
        compiled = any(is_compiled(m) for m in model.modules())
        self._left = 0 if compiled or device != "cpu" else STEPS
        self._meter = LiveBytes()
        self._observer = Observer(self._meter)
        self._attached = False
        if self._left:
            self._meter.assign("params", (*model.parameters(), *model.buffers()))

    @contextmanager
    def initializing(self) -> Iterator[None]:
        """Around ``initialize``."""
        if not self._left:
            yield
            return
        with self._meter:
            yield

    def attach(self, engine: Any) -> None:
        """Follow ``engine``, which was made inside ``initializing``."""
        if self._left and isinstance(engine, Engine) and not engine.is_compiled:
            self._observer.attach(engine)
            self._attached = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the micro-batches of an optimizer step."""
        if not self._attached or not self._left:
            yield
            return
        self._observer.note_states()
        with self._meter:
            yield
            self._observer.note_states()
            self._meter.sample()
        self._left -= 1
        if not self._left:
            self._observer.detach()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save; the first one is counted."""
        if not self._attached or "checkpoint" in self._observer.peaks.readings:
            yield
            return
        self._observer.note_states()
        self._meter.enter("checkpoint")
        with self._meter:
            yield
            self._meter.sample()

    @property
    def phases(self) -> dict[str, int] | None:
        """Most bytes in each phase that was counted; None where nothing was."""
        if self.highest is None:
            return None
        return {phase: reading.total for phase, reading in self._observer.peaks.readings.items()}

    @property
    def highest(self) -> dict[str, int] | None:
        """Bytes by category, and their total, at the highest moment; None where nothing was counted."""
        if not self._attached or self._left == STEPS:
            return None
        reading = self._observer.peaks.highest
        return {**{category: reading.by_category[category] for category in CATEGORIES}, "total": reading.total}
