"""Counters of a run, and the weights of the micro-batches of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardledger.errors import EngineStateError
from shardledger.runtime.step import StepOutcome
from shardledger.transport import Traffic


@dataclass
class Progress:
    """What an engine counts."""

    global_steps: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    global_samples: int = 0
    window: int = 0
    """Micro-batches since the last step."""
    window_weight: float = 0.0
    """Sum of their weights: each 1, or its denominator."""
    weighted: bool | None = None
    """Whether this window's micro-batches have denominators; None before the first says."""
    weight: float | None = None
    """Denominator of the current micro-batch."""
    forced_boundary: bool | None = None
    last: StepOutcome | None = None
    traffic_at_step: dict[str, Traffic] = field(default_factory=dict)
    traffic_of_step: dict[str, Traffic] = field(default_factory=dict)
    traffic_at_start: dict[str, Traffic] = field(default_factory=dict)

    def weigh(self, weight: float | None) -> None:
        """Note the denominator of a backward pass.

        Raises:
            EngineStateError: it is negative, or others of this step have one and this has none, or the reverse, or
                another backward pass of the same micro-batch had another.
        """
        given = weight is not None
        if weight is not None and not 0 <= weight < float("inf"):
            raise EngineStateError(f"denominator={weight:g}: it must be a finite number, 0 or more.")
        if self.weighted is not None and self.weighted != given:
            raise EngineStateError(
                "engine.backward was called with a denominator for some micro-batches of this step and without for "
                "others: their weights cannot be compared. Pass denominator=... for all of them."
            )
        if given and self.weight is not None and self.weight != weight:
            raise EngineStateError(
                f"two backward passes of one micro-batch have the denominators {self.weight:g} and {weight:g}: call "
                f"engine.step() between micro-batches, or give both passes the same."
            )
        self.weighted, self.weight = given, weight

    def count_micro_batch(self, samples: int) -> None:
        """One micro-batch is done."""
        self.micro_steps += 1
        self.window += 1
        self.window_weight += 1.0 if self.weight is None else self.weight
        self.weight = None
        self.global_samples += samples
        self.forced_boundary = None

    def end_window(self) -> None:
        """The next micro-batch starts a new step."""
        self.window = 0
        self.window_weight = 0.0
        self.weighted = self.weight = None
