"""Learning-rate schedules of DeepSpeed's configuration, as factors for torch's LambdaLR.

DeepSpeed counts iterations from -1: the first step and the second use the value of iteration 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from shardledger.errors import ConfigError


def build_scheduler(name: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Make the scheduler that ``scheduler.type`` names.

    Raises:
        ConfigError: neither a schedule of DeepSpeed's known here nor a class of torch.optim.lr_scheduler, or wrong
            parameters for it.
    """
    makers = {"WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay, "WarmupCosineLR": _warmup_cosine}
    if name in makers:
        per_group = [makers[name](params, float(group["lr"])) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["initial_lr"] = 1.0  # the factors are learning rates themselves
        return lr_scheduler.LambdaLR(optimizer, per_group)
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


def _warmup(params: Mapping[str, Any], lr: float) -> Callable[[int], float]:
    low = float(params.get("warmup_min_lr", 0.0))
    high = params.get("warmup_max_lr")
    high = lr if high is None else float(high)
    ramp = _ramp(params)
    steps = _warmup_steps(params)

    def value(epoch: int) -> float:
        iteration = max(epoch - 1, 0)
        return low + (high - low) * (ramp(iteration) if iteration < steps else 1.0)

    return value


def _warmup_decay(params: Mapping[str, Any], lr: float) -> Callable[[int], float]:
    low = float(params.get("warmup_min_lr", 0.0))
    high = params.get("warmup_max_lr", 0.001)
    high = lr if high is None else float(high)
    total = int(params["total_num_steps"])
    ramp = _ramp(params)
    steps = _warmup_steps(params)

    def value(epoch: int) -> float:
        iteration = max(epoch - 1, 0)
        if iteration < steps:
            return low + (high - low) * ramp(iteration)
        return low + (high - low) * max(0.0, (total - iteration) / max(1.0, total - steps))

    return value


def _warmup_cosine(params: Mapping[str, Any], lr: float) -> Callable[[int], float]:
    total = int(params["total_num_steps"])
    start = float(params.get("warmup_min_ratio", 0.0))
    floor = float(params.get("cos_min_ratio", 1e-4))
    ramp = _ramp(params)
    steps = _warmup_steps(params)

    def value(epoch: int) -> float:
        iteration = max(epoch - 1, 0)
        if iteration < steps:
            return lr * (start + (1.0 - start) * ramp(iteration))
        progress = (iteration - steps + 1) / max(1, total - steps)
        cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        return lr * max(0.0, floor + (1.0 - floor) * cosine)

    return value


def _warmup_steps(params: Mapping[str, Any]) -> int:
    return max(2, int(params.get("warmup_num_steps", 1000)))


def _ramp(params: Mapping[str, Any]) -> Callable[[int], float]:
    steps = _warmup_steps(params)
    if params.get("warmup_type", "log") == "linear":
        return lambda iteration: iteration / steps
    return lambda iteration: math.log(iteration + 1) / math.log(steps)
