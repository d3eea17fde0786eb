"""A live engine as a checkpoint sees it: everything that a continued run needs, by name.

Fulfils ``checkpoint.port.TrainingState`` without knowing that room.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardledger.errors import EngineStateError
from shardledger.layout.portion import Portion, StateSource
from shardledger.runtime.assemble import Parts
from shardledger.runtime.describe import owners
from shardledger.runtime.state_pieces import (
    held_numbers,
    held_states,
    held_values,
    read_states,
    read_values,
    replicate_values,
)
from shardledger.runtime.step import Stepper
from shardledger.runtime.window import check_counted, held_gradients, position, position_here, take_over

if TYPE_CHECKING:
    from shardledger.runtime.engine import Engine

_HOW = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options of param groups that say how this process computes, not what: never restored."""


class TrainingState:
    """Reads and replaces the state of one engine."""

    def __init__(self, engine: Engine, parts: Parts, names: Sequence[Sequence[str]]) -> None:
        """``names``: the parameters of each param group."""
        self.plan = engine.plan
        self.layout = engine.layout
        self.device = engine.device
        self._engine = engine
        self._parts = parts
        self._names = names

    # --- when ----------------------------------------------------------------------------------------------------

    def ready_to_save(self) -> None:
        """Check that nothing is under way.

        Raises:
            EngineStateError: a backward pass is unfinished or its micro-batch not counted, or parameters are gathered.
        """
        self._check_idle("save_checkpoint")
        check_counted(self._parts, "save_checkpoint")
        self._parts.watch.check()

    def ready_to_load(self) -> None:
        """Drop what has been accumulated.

        Raises:
            EngineStateError: a backward pass is unfinished, or parameters are gathered.
        """
        self._check_idle("load_checkpoint")
        self._engine.zero_grad()

    def _check_idle(self, doing: str) -> None:
        parts = self._parts
        if parts.schedule.in_backward:
            raise EngineStateError(f"{doing} was called while a backward pass is unfinished (it raised?).")
        if parts.executor.pinned:
            raise EngineStateError(f"{doing} was called inside GatheredParameters: leave the block first.")
        parts.executor.settle_reductions()

    @torch.no_grad()
    def share_weights(self) -> None:
        """Bring what has been read to all ranks that compute with it; collective. The weights are others now."""
        for unit in self._parts.units:
            with self._parts.at_hand(unit.flats, write=True):
                replicate_values(unit, self._parts.transport)
        self._parts.saved.updates += 1
        self._parts.watch.note_update()

    # --- tensors -------------------------------------------------------------------------------------------------

    def held(self, unit: int) -> Iterator[tuple[Portion, torch.Tensor]]:
        """What this rank writes of a unit. Raises EngineStateError for optimizer states that cannot be saved."""
        parts, away = self._parts, self._parts.offload is not None
        with parts.at_hand(parts.units[unit].flats):
            for portion, tensor in (
                *held_values(parts.units[unit]),
                *held_states(parts.units[unit], self._stepper.pieces, self._engine.optimizer),
            ):
                yield portion, tensor.clone() if away else tensor  # what rests on disk is gone after this loop
        yield from held_gradients(parts.units[unit], parts.transport.rank)

    def numbers(self) -> Mapping[str, Mapping[str, Any]]:
        """Optimizer states that are plain numbers. Raises EngineStateError for those that are something else."""
        return held_numbers(self._parts.units, self._stepper.pieces, self._engine.optimizer)

    @torch.no_grad()
    def read_weights(self, unit: int, source: StateSource) -> None:
        """Read this rank's part of a unit's weights."""
        with self._parts.at_hand(self._parts.units[unit].flats, write=True):
            read_values(self._parts.units[unit], source)

    @torch.no_grad()
    def read_states(self, unit: int, source: StateSource) -> None:
        """Replace a unit's optimizer states."""
        with self._parts.at_hand(self._parts.units[unit].flats, write=True):
            read_states(self._parts.units[unit], self._stepper.pieces, self._engine.optimizer, source)

    # --- the accumulation window ---------------------------------------------------------------------------------

    def window(self) -> Mapping[str, Any] | None:
        """This rank's position in an accumulation window; None at its beginning."""
        return position(self._parts, self._stepper.scaler.scale)

    def check_window(self, windows: Sequence[Mapping[str, Any]], *, same: bool) -> None:
        """Raise EngineStateError when the engine cannot go on in that window."""
        position_here(self._parts, windows, same=same)

    def read_window(self, windows: Sequence[Mapping[str, Any]], source: StateSource, *, same: bool) -> None:
        """Go on in the window that each saved rank was in. No collective."""
        take_over(self._parts, windows, source, same=same, loss_scale=self._stepper.scaler.scale)
        self._parts.executor.boundary = self._engine.is_gradient_accumulation_boundary()

    @property
    def _stepper(self) -> Stepper:
        assert self._parts.stepper is not None
        return self._parts.stepper

    # --- the module ----------------------------------------------------------------------------------------------

    def tied(self) -> Mapping[str, str]:
        """Other names of parameters."""
        model: nn.Module = self._engine.module
        paths = {id(module): path for path, module in model.named_modules()}
        return {
            full: name
            for name, places in owners(model).items()
            for module, attribute in places
            if (full := _join(paths[id(module)], attribute)) != name
        }

    def buffers(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Persistent buffers, by their first name."""
        model: nn.Module = self._engine.module
        kept = {
            id(buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        return [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) in kept]

    def extra_states(self) -> Mapping[str, Any]:
        """What modules save beside tensors, by path."""
        return {
            path: module.get_extra_state()
            for path, module in self._engine.module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def set_extra_states(self, states: Mapping[str, Any]) -> None:
        """Give modules back what they saved."""
        for path, module in self._engine.module.named_modules():
            if path in states and type(module).set_extra_state is not nn.Module.set_extra_state:
                module.set_extra_state(states[path])

    # --- the rest ------------------------------------------------------------------------------------------------

    def optimizer_class(self) -> str:
        """Name of the optimizer's class."""
        return type(self._engine.optimizer).__name__

    def param_groups(self) -> Sequence[tuple[Mapping[str, Any], Sequence[str]]]:
        """Hyperparameters and parameter names of each group."""
        groups = self._engine.optimizer.param_groups
        return [
            ({k: v for k, v in group.items() if k != "params" and k not in _HOW}, names)
            for group, names in zip(groups, self._names, strict=True)
        ]

    def set_param_group(self, index: int, options: Mapping[str, Any]) -> None:
        """Replace hyperparameters of a group. Tensors are filled, so that what refers to them sees the new value."""
        group = self._engine.optimizer.param_groups[index]
        for key, value in options.items():
            if key in _HOW or key == "params":
                continue
            live = group.get(key)
            if isinstance(live, torch.Tensor) and isinstance(value, (int, float)):
                live.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(live, tuple) and isinstance(value, list) else value

    def counters(self) -> Mapping[str, int]:
        """What the engine counts."""
        progress = self._parts.progress
        return {
            "global_steps": progress.global_steps,
            "micro_steps": progress.micro_steps,
            "skipped_steps": progress.skipped_steps,
            "global_samples": progress.global_samples,
            "skipped_in_a_row": self._stepper.skipped_in_a_row,
        }

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Go on counting from there."""
        progress = self._parts.progress
        progress.global_steps = counters.get("global_steps", 0)
        progress.micro_steps = counters.get("micro_steps", 0)
        progress.skipped_steps = counters.get("skipped_steps", 0)
        progress.global_samples = counters.get("global_samples", 0)
        self._stepper.skipped_in_a_row = counters.get("skipped_in_a_row", 0)

    def loss_scale(self) -> Mapping[str, Any] | None:
        """State of the loss scaler; None without one."""
        scaler = self._stepper.scaler
        return scaler.state_dict() if scaler.active else None

    def set_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Go on with that scale."""
        if self._stepper.scaler.active:
            self._stepper.scaler.load_state_dict(dict(state))

    def scheduler(self) -> Any:
        """The learning-rate scheduler, or None."""
        return self._engine.lr_scheduler

    def loader(self) -> Any:
        """The loader of the training data, where it knows its position."""
        loader = self._engine.training_dataloader
        able = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
        return loader if able else None

    def config(self) -> Mapping[str, Any] | None:
        """The resolved configuration."""
        config = self._engine.config
        return None if config is None else config.to_dict()

    def model_config(self) -> str | None:
        """The model's own ``config`` as JSON: of a Hugging Face model, or any with ``config.to_dict()``."""
        model: nn.Module = self._engine.module
        config = getattr(model, "config", None)
        maker = getattr(config, "to_diff_dict", None) or getattr(config, "to_dict", None)
        try:
            plain = maker() if callable(maker) else None
            if hasattr(config, "to_diff_dict"):
                plain = {**plain, "architectures": plain.get("architectures") or [type(model).__name__]}
            return json.dumps(plain, indent=2, sort_keys=True) + "\n" if isinstance(plain, dict) else None
        except (TypeError, ValueError):  # some user's config of another kind, under that name by chance
            return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
