"""Module hooks that turn what happens in the model into events, and do nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable

from shardledger.errors import EngineStateError
from shardledger.runtime.compiled import load_compiler
from shardledger.runtime.executor import Executor
from shardledger.runtime.schedule import Action, Schedule
from shardledger.runtime.unit import Unit

_NOT_TRACED = "shardledger gathers and releases the parameters of a unit around its forward"


class Hooks:
    """Attaches to every unit's module; events go to the schedule, its actions to the executor."""

    def __init__(
        self,
        units: list[Unit],
        schedule: Schedule,
        executor: Executor,
        *,
        on_forward_begin: Callable[[bool], None],
        on_backward_begin: Callable[[], None],
        on_backward_end: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """``on_forward_begin`` is told whether an earlier backward pass died half-way."""
        self._units = units
        self._schedule = schedule
        self._executor = executor
        self._on_forward_begin = on_forward_begin
        self._on_backward_begin = on_backward_begin
        self._on_backward_end = on_backward_end
        self._on_failure = on_failure
        self._complete = [0] * len(units)
        """Flats of each unit whose gradients are complete in the current backward pass."""
        self._handles: list[Any] = []
        load_compiler()
        before = torch.compiler.disable(self._pre_forward, reason=_NOT_TRACED)
        after = torch.compiler.disable(self._post_forward, reason=_NOT_TRACED)
        for unit in units:
            self._handles.append(
                unit.module.register_forward_pre_hook(partial(before, unit), with_kwargs=True, prepend=True)
            )
            self._handles.append(unit.module.register_forward_hook(partial(after, unit)))

    def remove(self) -> None:
        """Detach from the model. Graphs that are still around are refused their backward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._schedule.in_backward = False
        self._on_forward_begin = self._on_backward_begin = self._on_backward_end = _ended
        self._on_failure = _say_nothing

    def gather_on_demand(self, unit: int) -> None:
        """A backward pass that no output announced needs a unit's weights."""
        if not self._schedule.in_backward:
            self._begin_backward(unit)
        self._perform(self._schedule.demand(unit))

    def gradient_arrived(self) -> None:
        """A parameter received a gradient: the backward pass has begun, if nothing else told so."""
        if not self._schedule.in_backward:
            self._begin_backward(0)

    def flat_busy(self) -> None:
        """A gradient arrived while the flat's previous ones are being reduced: that reduction must end first."""
        self._executor.settle_reductions()

    def room_wanted(self) -> None:
        """A good part of a gathered unit's gradients has come: what is being reduced must end first."""
        self._executor.finish_reductions()

    def flat_begun(self, unit: int) -> None:
        """A good part of the gradients of a unit has come."""
        self._executor.measure()
        self._perform(self._schedule.gradients_begun(unit))

    def flat_complete(self, unit: int) -> None:
        """Every parameter of one flat of a unit has received a gradient."""
        self._complete[unit] += 1
        if self._complete[unit] == len(self._units[unit].gradients):
            self._perform(self._schedule.gradients_complete(unit))

    def _pre_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # First: it may refuse, and then the schedule must not have moved.
        self._on_forward_begin(unit.index == 0 and self._schedule.in_backward and not _running_backward())
        self._perform(self._schedule.pre_forward(unit.index, graph=torch.is_grad_enabled()))
        if not torch.is_grad_enabled() or unit.index == 0:
            return
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if not inputs:
            self._schedule.untracked_call(unit.index)
        elif self._schedule.track_call(unit.index):
            left = [len(inputs)]
            if len(inputs) > 1:
                inputs[0].register_hook(partial(self._first_input_gradient, unit))
            for tensor in inputs:
                tensor.register_hook(partial(self._input_gradient, unit, left))

    def _post_forward(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            found = tensors_in(output)
            for tensor in found:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._output_gradient, unit))
        self._perform(self._schedule.post_forward(unit.index))

    def _output_gradient(self, unit: Unit, gradient: torch.Tensor) -> None:
        if not self._schedule.in_backward:
            self._begin_backward(unit.index)
        self._perform(self._schedule.pre_backward(unit.index))

    def _input_gradient(self, unit: Unit, left: list[int], gradient: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] == 0:
            self._perform(self._schedule.post_backward(unit.index))

    def _first_input_gradient(self, unit: Unit, gradient: torch.Tensor) -> None:
        self._perform(self._schedule.input_reached(unit.index))

    def _begin_backward(self, first: int) -> None:
        self._on_backward_begin()
        for unit in self._units:
            self._complete[unit.index] = 0
            for gradients in unit.gradients:
                gradients.begin_backward()
        self._perform(self._schedule.pre_backward(first))
        Variable._execution_engine.queue_callback(self._on_backward_end)  # type: ignore[attr-defined]

    def _perform(self, actions: list[Action]) -> None:
        if not actions:
            return
        try:
            self._executor.perform(actions)
        except (MemoryError, RuntimeError) as error:  # under a bare loss.backward() nobody else of the engine's sees it
            self._on_failure(error)
            raise


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, SimpleNamespace):
        yield from tensors_in(vars(value))


def _say_nothing(error: BaseException) -> None:
    return


def _ended(*_: object) -> None:
    raise EngineStateError(
        "the backward pass reached a module whose engine was destroyed: its gradients have nowhere to go. Run backward "
        "before engine.destroy(), or build a new graph."
    )


def _running_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
