"""Calls that convert a module to another dtype or device. A live engine lays its module's memory out, so it refuses them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardledger.errors import EngineStateError
from shardledger.runtime.describe import dtype_of

_DTYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_DEVICES = ("cpu", "cuda", "xpu", "ipu", "mtia")
CONVERSIONS = frozenset({"to", "type", "to_empty", "share_memory", *_DTYPES, *_DEVICES})
"""Methods of ``nn.Module`` that give every parameter other memory."""


def conversion(engine: Any, name: str) -> Callable[..., Any]:
    """What ``engine.half`` and the like are while the engine lives: nothing to do, or an error when called."""
    return partial(_convert, engine, name)


def _convert(engine: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return the engine when its module has the dtype and device asked for.

    Raises:
        EngineStateError: it has not.
    """
    dtype, device = _DTYPES.get(name), torch.device(name) if name in _DEVICES else None
    if name == "to":
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    elif name == "type" and args and isinstance(args[0], torch.dtype):
        dtype = args[0]
    known = dtype is not None or device is not None
    here = device is None or device.type == engine.device.type and device.index in (None, engine.device.index)
    if known and here and dtype in (None, dtype_of(engine.plan.precision.compute)):
        return engine
    raise EngineStateError(
        f"engine.{name}(...) would give the parameters other memory than the engine has laid out (weights compute in "
        f"{engine.plan.precision.compute} on {engine.device}). The precision is set by the configuration "
        f'("bf16": {{"enabled": true}}), the device by shardledger.initialize(device=...). To convert a trained model, take '
        f"engine.state_dict(), or call engine.destroy() first."
    )
