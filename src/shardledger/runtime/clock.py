"""Where the seconds of a step go, for ``wall_clock_breakdown``, and the line of ``steps_per_print``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepClock:
    """Seconds in forward, backward and step since the last printed line.

    On a GPU the device is synchronised around each part when ``precise``; otherwise the figures are launch times.
    """

    def __init__(self, *, every: int | None, precise: bool, speaks: bool, device: torch.device) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        self._every = every
        self._precise = precise
        self._speaks = speaks
        self._device = device

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Count the block as ``part``."""
        if not self._precise:
            yield
            return
        self._synchronise()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronise()
            self.seconds[part] += time.perf_counter() - start

    def report(self, step: int, skipped: int, lr: list[float], grad_norm: float) -> None:
        """Say the line when it is due, on rank 0."""
        if not self._every or step % self._every:
            return
        if self._speaks:
            rates = ",".join(f"{rate:.3e}" for rate in lr)
            line = f"step={step} skipped={skipped} lr={rates} grad_norm={grad_norm:.4f}"
            if self._precise:
                line += "".join(f" {part}_ms={s / self._every * 1e3:.2f}" for part, s in self.seconds.items())
            print(f"shardledger: {line}", flush=True)
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
