"""What stands in for a parameter whose values live on other ranks.

The parameter keeps its identity, shape and dtype. Its data is one NaN expanded to the full shape, so that code which
reaches it below Python reads poison; and its class refuses every operation by name, so that nothing reads it unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardledger.errors import ReleasedParameterError
from shardledger.runtime.conversions import CONVERSIONS

_AWAY = "_shardledger_away"

_MARK = "_shardledger_released"
"""Attribute of a parameter while it is released: its name and its own class."""

_LOST = "_shardledger_lost"
"""Attribute of a released parameter whose engine was destroyed: it has values nowhere."""


class ReleasedParameter(nn.Parameter):
    """Class of a parameter while it is released. Never constructed: ``__class__`` is switched."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about shape and kind; refuse everything that would read or write values."""
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((_name(a) for a in _flat(args, kwargs) if isinstance(a, ReleasedParameter)), "?")
        if func is torch.Tensor.copy_ and is_lost(args[0]):
            return _revive(args[0]).copy_(*args[1:], **(kwargs or {}))
        getter = getattr(func, "__self__", None)
        operation = getattr(getter if func.__name__ in ("__get__", "__set__") else func, "__name__", str(func))
        if any(is_lost(a) for a in _flat(args, kwargs)):
            raise _lost(name, operation)
        if operation in CONVERSIONS:
            raise ReleasedParameterError(
                f"parameter {name!r} is sharded and its values are not on this rank now, so {operation!r} cannot convert it. "
                f"Precision and device are set by the configuration and by shardledger.initialize(device=...): convert the "
                f"model before, or take engine.state_dict()."
            )
        raise ReleasedParameterError(
            f"parameter {name!r} is sharded and its values are not on this rank now, so {operation!r} cannot use it. "
            f"It is gathered while its own unit runs. To read or edit it elsewhere use shardledger.GatheredParameters "
            f"or engine.state_dict(). If another module uses it in forward, let both share a unit: list the class of "
            f'their common parent in "shardledger": {{"units": [...]}} (the class of the blocks alone, for a table outside '
            f"them that is a unit because of its size), or keep it gathered with "
            f"stage3_param_persistence_threshold."
        )

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refused like the rest; torch does not send this one through ``__torch_function__``."""
        return self.__torch_function__(torch.Tensor.set_, (), (self, *args), kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ReleasedParameter({_name(self)!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if is_lost(self):
            raise _lost(_name(self), "deepcopy")
        raise ReleasedParameterError(
            f"parameter {_name(self)!r} is sharded: copy the model before shardledger.initialize, or "
            f"load engine.state_dict() into a new one."
        )


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element, NaN where the dtype has it, expanded to ``shape``."""
    poison = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), poison, dtype=dtype, device=device).expand(shape)


def away(tensor: torch.Tensor) -> torch.Tensor:
    """What stands in for a tensor of the optimizer that rests on disk."""
    stand_in = placeholder(tuple(tensor.shape), tensor.dtype, tensor.device)
    setattr(stand_in, _AWAY, True)
    return stand_in


def is_away(state: object) -> bool:
    """Whether it was made by ``away``."""
    return hasattr(state, _AWAY)


def release(parameter: nn.Parameter, name: str, stand_in: torch.Tensor) -> None:
    """Swap the values of ``parameter`` for ``stand_in``."""
    if isinstance(parameter, FakeTensor):  # of a dry run: its class is its dispatch, and it has no values to guard
        parameter.data = stand_in
    elif type(parameter) is not ReleasedParameter:
        setattr(parameter, _MARK, (name, type(parameter)))
        parameter.data = stand_in
        parameter.__class__ = ReleasedParameter


def restore(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give ``parameter`` its values back (a view of the gathered flat)."""
    if type(parameter) is ReleasedParameter:
        parameter.__class__ = getattr(parameter, _MARK)[1]
        delattr(parameter, _MARK)
    parameter.data = values


def abandon(parameter: nn.Parameter) -> None:
    """The engine of ``parameter`` ends. If its values are elsewhere now, they are lost: it takes new ones by ``copy_``."""
    if type(parameter) is ReleasedParameter:
        setattr(parameter, _LOST, True)


def is_lost(value: object) -> bool:
    """Whether ``value`` is a parameter that an engine took the values of to its grave."""
    return isinstance(value, ReleasedParameter) and hasattr(value, _LOST)


def _lost(name: str, operation: str) -> ReleasedParameterError:
    return ReleasedParameterError(
        f"parameter {name!r} has no values any more, so {operation!r} cannot use it: the engine that had sharded it was "
        f"destroyed. Take engine.state_dict(all_ranks=True) before engine.destroy(), and fill the model with "
        f"model.load_state_dict(...) after it, or build the model anew."
    )


def _revive(parameter: nn.Parameter) -> nn.Parameter:
    """Give a lost parameter memory of its own, to be written over, and its class back."""
    with torch._C.DisableTorchFunctionSubclass():
        fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    delattr(parameter, _LOST)
    restore(parameter, fresh)
    return parameter


def _name(parameter: ReleasedParameter) -> str:
    return str(getattr(parameter, _MARK)[0])


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *(kwargs or {}).values()):
        found.extend(value) if isinstance(value, (list, tuple)) else found.append(value)
    return found


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_HARMLESS: frozenset[Any] = frozenset(
    [
        _getter(name)
        for name in (
            "shape",
            "dtype",
            "device",
            "requires_grad",
            "grad",
            "is_leaf",
            "ndim",
            "layout",
            "names",
            "grad_fn",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_mps",
            "is_xla",
            "is_mkldnn",
            "itemsize",
            "nbytes",
            "retains_grad",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
        )
        if hasattr(getattr(torch.Tensor, name, None), "__get__")
    ]
    + [
        torch.Tensor.grad.__set__,  # type: ignore[attr-defined]
        torch.Tensor.grad.__delete__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad_,
        torch.Tensor.size,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.__len__,
        torch.Tensor.__hash__,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)
