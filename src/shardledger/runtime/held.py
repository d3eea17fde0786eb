"""What stands at ``p.grad`` after a backward pass: the gradient itself is in the engine.

``p.grad = None`` would let a clip or a log of gradients do nothing without a word. The stand-in takes no memory and
refuses every use by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardledger.errors import EngineStateError

_SHAPE_QUESTIONS = frozenset(
    [
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "is_sparse", "layout")
    ]
    + [torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.__hash__]
)


class HeldGradient(torch.Tensor):
    """Stand-in for a gradient that the engine holds. Made by ``stand_in``."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about shape; refuse the rest."""
        if func in _SHAPE_QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise EngineStateError(
            f"{getattr(func, '__name__', func)!r} was used on p.grad, but gradients are in the engine, summed over ranks "
            f"and possibly sharded, so a change to p.grad would have no effect. To clip, set gradient_clipping in the "
            f"configuration; the norm before clipping is engine.get_global_grad_norm(). To read or edit one, use "
            f"shardledger.utils.safe_get_full_grad(p) and safe_set_full_grad(p, value)."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HeldGradient(shape={tuple(self.shape)})"


def stand_in(parameter: torch.Tensor) -> torch.Tensor:
    """A stand-in for the gradient of ``parameter``: one element, expanded."""
    with torch._C.DisableTorchFunctionSubclass():
        one = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        expanded = one.expand(parameter.shape)
        # The class of a dry run's tensor is its dispatch.
        return expanded if isinstance(expanded, FakeTensor) else expanded.as_subclass(HeldGradient)


class StandIns:
    """What is at ``p.grad`` of the parameters of one flat while the engine holds their gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._parameters = list(parameters)
        self._names = names
        self._made: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._shown: list[torch.Tensor | None] = [None] * len(self._parameters)

    def show(self, present: Sequence[bool]) -> None:
        """Put stand-ins where there is a gradient."""
        made, shown = self._made, self._shown
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter answers, but slowly
            for index, parameter in enumerate(self._parameters):
                if present[index]:
                    one = made[index]
                    if one is None:
                        one = made[index] = stand_in(parameter)
                    shown[index] = parameter.grad = one

    def hide(self) -> None:
        """Take away whatever is there."""
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter answers, but slowly
            for parameter in self._parameters:
                parameter.grad = None
        self._shown = [None] * len(self._parameters)

    def refuse_changes(self) -> None:
        """Refuse that someone has put something else at ``p.grad``, or cleared it.

        Raises:
            EngineStateError: names the parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            found = [parameter.grad for parameter in self._parameters]
        for name, grad, shown in zip(self._names, found, self._shown, strict=True):
            if grad is not shown:
                self.hide()
                raise EngineStateError(
                    f"p.grad of parameter {name!r} was {'cleared' if grad is None else 'set'} between a backward pass and "
                    f"the next one or the step, but gradients are in the engine, so that would have no effect. "
                    f"engine.zero_grad() drops what has been accumulated (model.zero_grad() does not reach it); to edit a "
                    f"gradient, use shardledger.utils.safe_set_full_grad(p, value)."
                )

    def forget(self) -> None:
        """Take all stand-ins away for good."""
        self.hide()
        self._parameters, self._made, self._shown = [], [], []
