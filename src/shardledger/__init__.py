"""shardledger: ZeRO training that accounts for every byte.

engine, optimizer, loader, scheduler = shardledger.initialize(model=model, config="ds_config.json")
loss = engine(x, y); engine.backward(loss); engine.step()
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "initialize": "shardledger.api",
    "plan": "shardledger.api",
    "Engine": "shardledger.runtime.engine",
    "GatheredParameters": "shardledger.runtime.gathered",
    "Config": "shardledger.config",
    "load_config": "shardledger.config",
    "ShardledgerError": "shardledger.errors",
    "ConfigError": "shardledger.errors",
    "PlanError": "shardledger.errors",
    "TransportError": "shardledger.errors",
    "PeerLostError": "shardledger.errors",
    "RanksDisagreeError": "shardledger.errors",
    "EngineStateError": "shardledger.errors",
    "ReleasedParameterError": "shardledger.errors",
}

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "EngineStateError",
    "GatheredParameters",
    "PeerLostError",
    "PlanError",
    "RanksDisagreeError",
    "ReleasedParameterError",
    "ShardledgerError",
    "TransportError",
    "initialize",
    "load_config",
    "plan",
]

if TYPE_CHECKING:
    from shardledger.api import initialize, plan
    from shardledger.config import Config, load_config
    from shardledger.errors import (
        ConfigError,
        EngineStateError,
        PeerLostError,
        PlanError,
        RanksDisagreeError,
        ReleasedParameterError,
        ShardledgerError,
        TransportError,
    )
    from shardledger.runtime.engine import Engine
    from shardledger.runtime.gathered import GatheredParameters


class _Door(ModuleType):
    """This package. The import system would bind the room ``plan`` to the name of the public function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "plan" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that ``import shardledger`` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardledger' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
