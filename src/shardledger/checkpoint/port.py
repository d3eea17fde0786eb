"""What a checkpoint needs of an engine. ``runtime.training_state`` is one; a test may bring another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from shardledger.layout.build import Layout
from shardledger.layout.portion import Portion, StateSource
from shardledger.plan.plan import Plan

Held = tuple[Portion, torch.Tensor]
"""Numbers and the tensor they lie in: 1-D, or of any shape for a scalar state. A view of live memory."""


class TrainingState(Protocol):
    """The state of a live engine on this rank. Tensors are read and written unit by unit."""

    plan: Plan
    layout: Layout
    device: torch.device

    def ready_to_save(self) -> None:
        """Raise EngineStateError when a backward pass is unfinished, or its micro-batch is not counted."""

    def ready_to_load(self) -> None:
        """Drop accumulated gradients; raise EngineStateError when parameters are gathered."""

    def tied(self) -> Mapping[str, str]:
        """Other names of parameters."""

    def buffers(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Persistent buffers by their first name."""

    def held(self, unit: int) -> Iterable[Held]:
        """What this rank writes of a unit: over all ranks every element of every role once."""

    def numbers(self) -> Mapping[str, Mapping[str, Any]]:
        """Optimizer states that are plain numbers, of the parameters whose first element is in this rank's shard."""

    def read_weights(self, unit: int, source: StateSource) -> None:
        """Read this rank's part of the values of a unit's parameters, those that ``source`` has. No collective."""

    def read_states(self, unit: int, source: StateSource) -> None:
        """Replace this rank's part of the optimizer states of a unit's parameters. No collective."""

    def share_weights(self) -> None:
        """Bring what was read to all ranks that need it; collective."""

    def window(self) -> Mapping[str, Any] | None:
        """This rank's position in an accumulation window, as JSON has it; None at its beginning."""

    def check_window(self, windows: Sequence[Mapping[str, Any]], *, same: bool) -> None:
        """Raise EngineStateError when the engine cannot go on in the window of those ranks.

        ``same``: as many ranks, with the same plan, saved it.
        """

    def read_window(self, windows: Sequence[Mapping[str, Any]], source: StateSource, *, same: bool) -> None:
        """Go on in the window that each saved rank was in. No collective."""

    def param_groups(self) -> Sequence[tuple[Mapping[str, Any], Sequence[str]]]:
        """Hyperparameters and parameter names of each group, all ranks alike."""

    def set_param_group(self, index: int, options: Mapping[str, Any]) -> None:
        """Replace hyperparameters of one group."""

    def optimizer_class(self) -> str:
        """Name of the optimizer's class."""

    def counters(self) -> Mapping[str, int]:
        """What the engine counts."""

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Go on counting from there."""

    def loss_scale(self) -> Mapping[str, Any] | None:
        """State of the loss scaler; None without one."""

    def set_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Go on with that scale; ignored without a scaler."""

    def scheduler(self) -> Any:
        """The learning-rate scheduler, or None."""

    def loader(self) -> Any:
        """The training data's loader where it can tell and take its position, or None."""

    def extra_states(self) -> Mapping[str, Any]:
        """``get_extra_state()`` of the modules that have one, by path."""

    def set_extra_states(self, states: Mapping[str, Any]) -> None:
        """Give them back."""

    def config(self) -> Mapping[str, Any] | None:
        """The resolved configuration."""

    def model_config(self) -> str | None:
        """The model's own configuration as JSON, where it has one."""
