"""The ``scheduler`` section: DeepSpeed's warm-up schedules by their names, or a torch class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from shardledger.config.section import Section

_WARMUP: Mapping[str, tuple[str, Any]] = {
    "warmup_num_steps": ("positive", 1000),
    "warmup_type": ("warmup", "log"),
    "last_batch_iteration": ("int", -1),
}
_BETWEEN: Mapping[str, tuple[str, Any]] = {"warmup_min_lr": ("nonnegative", 0.0)}

SCHEDULES: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "WarmupLR": {**_BETWEEN, "warmup_max_lr": ("nonnegative?", None), **_WARMUP},
    "WarmupDecayLR": {
        "total_num_steps": ("positive", ...),
        **_BETWEEN,
        "warmup_max_lr": ("nonnegative?", 0.001),
        **_WARMUP,
    },
    "WarmupCosineLR": {
        "total_num_steps": ("positive", ...),
        "warmup_min_ratio": ("nonnegative", 0.0),
        "cos_min_ratio": ("nonnegative", 0.0001),
        **_WARMUP,
    },
}
"""Arguments of each warm-up schedule: kind of value and default (``...`` means it must be given)."""

REFUSED_TYPES: Mapping[str, str] = {
    "lrrangetest": "it is not available; torch's CyclicLR can sweep a range",
    "onecycle": "it is not available; use torch's OneCycleLR",
    "lambdalr": "a function cannot stand in JSON; pass lr_scheduler to initialize",
    "multiplicativelr": "a function cannot stand in JSON; pass lr_scheduler to initialize",
    "sequentiallr": "schedulers cannot be nested in JSON; pass lr_scheduler to initialize",
    "chainedscheduler": "schedulers cannot be nested in JSON; pass lr_scheduler to initialize",
    "reducelronplateau": "it needs a validation loss at every step; step one of your own",
}
"""Schedules refused by name (compared without regard to case), with what to do instead."""

TORCH_NAMES = (
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR",
    "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
"""Classes of torch.optim.lr_scheduler that can be built from JSON; their arguments are checked by the runtime."""


class SchedulerSection(Section):
    """Which learning-rate schedule the engine builds and steps."""

    type: str = Field(
        description="WarmupLR, WarmupDecayLR, WarmupCosineLR, or the exact name of a class in torch.optim.lr_scheduler",
        json_schema_extra={"auto": "refuse"},
    )
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the schedule",
        json_schema_extra={"auto": "refuse"},
    )

    def resolved(self) -> tuple[str, dict[str, Any]]:
        """Return the schedule's name and its keyword arguments, defaults filled in for the three warm-up schedules.

        ``warmup_max_lr`` None means: the learning rate of each parameter group of the optimizer.
        """
        defaults = {key: value for key, (_, value) in SCHEDULES.get(self.type, {}).items() if value is not ...}
        return self.type, defaults | self.params
