"""Learning-rate schedules of DeepSpeed's configuration, as values for torch's LambdaLR.

DeepSpeed counts iterations from ``last_batch_iteration`` = -1, so that the first step and the second both use the value
of iteration 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from shardledger.errors import ConfigError

Value = Callable[[int], float]
"""Learning rate at an iteration."""


def build_scheduler(name: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Make the scheduler that ``scheduler.type`` names.

    Args:
        name: WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler.
        params: its keyword arguments, complete for the first three.
        optimizer: whose groups it drives.

    Raises:
        ConfigError: no such schedule, or wrong parameters for it.
    """
    makers: dict[str, Callable[[Mapping[str, Any], float], Value]] = {
        "WarmupLR": _warmup,
        "WarmupDecayLR": _warmup_decay,
        "WarmupCosineLR": _warmup_cosine,
    }
    if name in makers:
        values = [makers[name](params, float(group["lr"])) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["initial_lr"] = 1.0  # the values are learning rates themselves, not factors of one
        offset = int(params["last_batch_iteration"])
        return lr_scheduler.LambdaLR(optimizer, [_from_epochs(value, offset) for value in values])
    cls = getattr(lr_scheduler, name, None)
    if not (isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler)):
        raise ConfigError(
            f"scheduler.type: {name!r} is neither WarmupLR, WarmupDecayLR or WarmupCosineLR nor a class of "
            f"torch.optim.lr_scheduler."
        )
    try:
        return cls(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler.params: torch.optim.lr_scheduler.{name} refuses them: {error}.") from error


def _from_epochs(value: Value, last_batch_iteration: int) -> Value:
    return lambda epoch: value(max(epoch + last_batch_iteration, 0))


def _warmup(params: Mapping[str, Any], lr: float) -> Value:
    low, high = float(params["warmup_min_lr"]), params["warmup_max_lr"]
    high = lr if high is None else float(high)
    ramp, steps = _ramp(params)
    return lambda iteration: low + (high - low) * (ramp(iteration) if iteration < steps else 1.0)


def _warmup_decay(params: Mapping[str, Any], lr: float) -> Value:
    total = int(params["total_num_steps"])
    rise = _warmup(params, lr)
    low, (_, steps) = float(params["warmup_min_lr"]), _ramp(params)

    def value(iteration: int) -> float:
        left = 1.0 if iteration < steps else max(0.0, (total - iteration) / max(1.0, total - steps))
        return low + (rise(iteration) - low) * left

    return value


def _warmup_cosine(params: Mapping[str, Any], lr: float) -> Value:
    total = int(params["total_num_steps"])
    start, floor = float(params["warmup_min_ratio"]), float(params["cos_min_ratio"])
    ramp, steps = _ramp(params)

    def value(iteration: int) -> float:
        if iteration < steps:
            return lr * (start + (1.0 - start) * ramp(iteration))
        progress = min(1.0, (iteration - steps + 1) / max(1, total - steps))
        return lr * (floor + (1.0 - floor) * (1 + math.cos(math.pi * progress)) / 2)

    return value


def _ramp(params: Mapping[str, Any]) -> tuple[Value, int]:
    """The rise from 0 to 1 over the warm-up, and the number of iterations it takes."""
    steps = max(2, int(params["warmup_num_steps"]))
    if params["warmup_type"] == "linear":
        return lambda iteration: iteration / steps, steps
    return lambda iteration: math.log(iteration + 1) / math.log(steps), steps
