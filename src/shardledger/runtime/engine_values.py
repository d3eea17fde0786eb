"""Small things the engine does to values: casts, differences of counts, words for messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from shardledger.runtime.assemble import Parts
from shardledger.transport import Traffic


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Nested tuples, lists and dicts with every fp32 tensor cast to ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype == torch.float32 else value
    if type(value) is dict:
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value


def difference(now: Mapping[str, Traffic], then: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """What was sent between two readings, by kind."""
    result = {kind: traffic.minus(then.get(kind, Traffic())) for kind, traffic in now.items()}
    return {kind: traffic for kind, traffic in result.items() if traffic.calls}


def plain(traffic: Mapping[str, Traffic]) -> dict[str, dict[str, int]]:
    """Counts as plain dictionaries."""
    return {kind: asdict(t) for kind, t in traffic.items()}


def device_of(parts: Parts) -> torch.device:
    """The device that parameters are on."""
    return next(flat.device for unit in parts.units for flat in unit.flats)


def describe_loss(loss: object) -> str:
    """What was passed as a loss, for messages."""
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)} without a graph"
    return f"a {type(loss).__name__}"


def agree_on_order(parts: Parts) -> None:
    """Launch reductions from now on in the order in which rank 0's first backward pass completed the units."""
    schedule = parts.schedule
    if len(schedule.reduce_order) < 2:
        return
    seen = [u for u in schedule.completed if u in schedule.reduce_order]
    order = seen + [u for u in schedule.reduce_order if u not in seen]
    rows = parts.transport.exchange(torch.tensor(order, dtype=torch.float64), "exchange of the reduction order")
    schedule.reduce_order = tuple(int(u) for u in rows[0].tolist())
