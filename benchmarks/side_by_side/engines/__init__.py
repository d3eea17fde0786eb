"""The engines, each behind the same few calls. A module of this package imports its engine at its top."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Protocol

from side_by_side.cases import Case, Contender

if TYPE_CHECKING:
    from torch import Tensor, nn

_MODULES = {"shardledger": "ours", "DDP": "ddp", "DDP+ZeRO": "ddp", "FSDP2": "fsdp2", "DeepSpeed": "deep_speed"}


class Trainer(Protocol):
    """What an engine must be able to do to be measured."""

    def __init__(self, model: nn.Module, contender: Contender, case: Case) -> None:
        """Take over ``model`` (fp32, on CPU, the same on every rank). The process group exists."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step on this rank's micro-batch; returns its loss, detached.

        Gradients of the step before are dropped at the start, not at the end: so what is alive between two steps is
        weights, gradients and optimizer states, for every engine.
        """

    def sent_bytes(self) -> int | None:
        """Bytes this rank has sent since the start, by the engine's own count; None when it does not count."""

    def save(self, folder: str) -> None:
        """Write weights and optimizer states as the engine's users do."""

    def load(self, folder: str) -> None:
        """Read them back."""

    def close(self) -> None:
        """End."""


def trainer_class(contender: Contender) -> type[Trainer]:
    """Import the engine and return its class.

    Raises:
        ImportError: it is not installed.
    """
    module = importlib.import_module(f"side_by_side.engines.{_MODULES[contender.engine]}")
    found: type[Trainer] = module.TRAINER
    return found


def missing(contender: Contender) -> str:
    """Why this engine cannot run here; empty when it can. Imports nothing."""
    if contender.engine != "DeepSpeed":
        return ""
    found = importlib.util.find_spec("deepspeed")
    return "" if found else "deepspeed is not installed (pip install deepspeed==0.19.8)"
