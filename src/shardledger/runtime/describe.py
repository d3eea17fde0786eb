"""From a module to plain data (``ModelSpec``), and back from names to the places where parameters hang."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardledger.errors import PlanError
from shardledger.plan.spec import DTYPE_BYTES, ModelSpec, ModuleSpec, ParameterSpec
from shardledger.runtime.compiled import is_compiled
from shardledger.runtime.leaves import is_leaf


def describe(model: nn.Module) -> ModelSpec:
    """Describe a module; the model may be on any device, meta included.

    Raises:
        PlanError: a parameter of a kind that cannot be laid out (sparse, quantized, or of an unknown dtype).
    """
    for path, module in model.named_modules():
        if is_compiled(module):
            raise PlanError(
                f"{path or type(model).__name__} is compiled, and a compiled module cannot be run without values: give the "
                f"plan the module uncompiled. shardledger.initialize takes it as it is."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise PlanError(
                f"{path or type(model).__name__} is an {type(module).__name__} with sparse=True: sparse gradients cannot "
                f"be reduced into flat buffers. Build it with sparse=False."
            )
    first_name: dict[int, str] = {}
    normalising = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in module._parameters
    }
    parameters, aliases = [], []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first_name:
            aliases.append((name, first_name[id(parameter)]))
            continue
        first_name[id(parameter)] = name
        parameters.append(_parameter(name, parameter, keeps_dtype=name in normalising))
    return ModelSpec(
        class_name=type(model).__name__,
        parameters=tuple(parameters),
        modules=tuple(_modules(model, first_name)),
        aliases=tuple(aliases),
        buffers=tuple((name, tuple(b.shape), dtype_name(b.dtype)) for name, b in model.named_buffers()),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``torch.float32`` for ``"float32"``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each canonical parameter name, every ``(module, attribute)`` under which it is registered."""
    names = {id(p): name for name, p in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(names[id(parameter)], []).append((module, attribute))
    return places


def _parameter(name: str, parameter: nn.Parameter, *, keeps_dtype: bool) -> ParameterSpec:
    dtype = dtype_name(parameter.dtype)
    if parameter.layout != torch.strided or dtype not in DTYPE_BYTES:
        raise PlanError(
            f"parameter {name!r} is {parameter.layout}, {parameter.dtype}: only dense tensors of ordinary dtypes can be "
            f"sharded. Convert it, or register it as a buffer."
        )
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise PlanError(
            f"parameter {name!r} has no shape yet (a lazy module): run one forward pass before shardledger.initialize."
        )
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=dtype,
        trainable=parameter.requires_grad,
        keeps_dtype=keeps_dtype,
    )


def _modules(model: nn.Module, first_name: dict[int, str]) -> Iterator[ModuleSpec]:
    containers: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kind = "list" if isinstance(module, nn.ModuleList) else "sequential"
            containers.update({id(child): kind for child in module})
        yield ModuleSpec(
            path=path,
            class_name=type(module).__name__,
            container=containers.get(id(module), ""),
            composite=next(module.children(), None) is not None,
            parameters=tuple(dict.fromkeys(first_name[id(p)] for p in module.parameters())),
            leaf=is_leaf(module),
        )
