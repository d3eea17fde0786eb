"""The loss scale of fp16: pure bookkeeping, no tensors.

Rules of DeepSpeed's dynamic scaler: the scale halves when ``hysteresis`` overflows have come (at once when it is spent),
and doubles after ``window`` good steps since the last overflow. One thing differs: the gradients of a step are always
divided by the scale that its losses were multiplied with, also on the step where the scale grows.
"""

from __future__ import annotations

from typing import Any

from shardledger.plan.plan import LossScale


class LossScaler:
    """Owns the current scale. Without fp16 the scale is 1 and nothing changes it."""

    def __init__(self, rule: LossScale | None) -> None:
        self.rule = rule
        self.scale = rule.initial if rule else 1.0
        self._steps = 0
        self._last_overflow = -1
        self._hysteresis = rule.hysteresis if rule else 1

    @property
    def active(self) -> bool:
        """Whether losses must be scaled."""
        return self.rule is not None

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self.rule is not None and self.rule.dynamic

    @property
    def at_minimum(self) -> bool:
        """Whether the next overflow cannot be answered with a smaller scale."""
        return self.rule is not None and self.dynamic and self.scale <= self.rule.minimum and self._hysteresis == 1

    def update(self, overflow: bool) -> None:
        """Count one step, after its gradients have been unscaled."""
        rule = self.rule
        if rule is None or not rule.dynamic:
            return
        if overflow:
            if self._hysteresis == 1:
                self.scale = max(self.scale / 2, rule.minimum)
            else:
                self._hysteresis -= 1
            self._last_overflow = self._steps
        else:
            if rule.consecutive_hysteresis:
                self._hysteresis = rule.hysteresis
            if (self._steps - self._last_overflow) % rule.window == 0:
                self._hysteresis = rule.hysteresis
                self.scale *= 2
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "scale": self.scale,
            "steps": self._steps,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``."""
        self.scale = float(state["scale"])
        self._steps = int(state["steps"])
        self._last_overflow = int(state["last_overflow"])
        self._hysteresis = int(state["hysteresis"])
