"""DeepSpeed's ``deepspeed.utils`` by its names: training state by parameter, and leaf modules.

``safe_get_*`` and ``safe_set_*`` are described in ``shardledger.runtime.access`` and ``access_states``. Two things differ
from DeepSpeed: local values exist at every stage and are empty tensors, not None, on ranks that hold no part; and setting
an fp32 value also refreshes the weights that the ranks compute with.

A *leaf* is a module that is never cut into units: it is gathered and reduced as one with everything below it, or as a
part of the block that it lies in. Declare mixtures of experts, whose ranks take different branches. Where the module got
a gradient on any rank, its parameters without one (experts without tokens) get zeros. Configurations declare leaves in
``zero_optimization.leaf_module``.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardledger.errors import EngineStateError
from shardledger.runtime.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)
from shardledger.runtime.access_states import (
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from shardledger.runtime.gathered import live
from shardledger.runtime.leaves import Wanted, find, is_leaf, mark

__all__ = [
    "get_z3_leaf_modules",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Wanted] | Wanted, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Declare modules leaves, before ``shardledger.initialize``; returns them.

    Args:
        model: where to look.
        leaf_module_classes: module classes, their names (bare, or with their module), or paths of single modules.
        raise_if_not_found: False lets one that the model does not have pass.

    Raises:
        PlanError: the model does not have one of them.
        EngineStateError: an engine trains the model already.
    """
    return _mark_all(model, leaf_module_classes, leaf=True, must_find=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[Wanted] | Wanted, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take declarations back; returns the modules meant, leaves or not.

    Raises:
        PlanError: the model does not have one of them.
        EngineStateError: an engine trains the model already.
    """
    return _mark_all(model, leaf_module_classes, leaf=False, must_find=raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Declare ``model`` itself a leaf, or take that back.

    Raises:
        EngineStateError: an engine trains the model already.
    """
    _check_not_cut([model])
    mark(model, leaf=flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether ``model`` itself was declared a leaf."""
    return is_leaf(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Every module of ``model`` that was declared a leaf by these functions."""
    return [module for module in model.modules() if is_leaf(module)]


def _mark_all(model: nn.Module, wanted: Iterable[Wanted] | Wanted, *, leaf: bool, must_find: bool) -> list[nn.Module]:
    found = find(model, wanted, must_find=must_find)
    _check_not_cut(found)
    for module in found:
        mark(module, leaf=leaf)
    return found


def _check_not_cut(modules: Iterable[nn.Module]) -> None:
    held = {id(p) for parts in live() for unit in parts.units for flat in unit.flats for p in flat.parameters}
    for module in modules:
        if any(id(p) in held for p in module.parameters()):
            raise EngineStateError(
                f"leaves are declared before shardledger.initialize, and an engine has already cut the model of this "
                f"{type(module).__name__} into units. Declare them first, on the model that initialize is given."
            )
