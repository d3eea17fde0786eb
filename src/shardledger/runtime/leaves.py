"""Which modules were declared leaves: one unit with everything below, because not every rank runs all of it.

The mark is an attribute of the module, so that a copy of a model keeps its leaves.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardledger.errors import PlanError

_MARK = "_shardledger_leaf"

Wanted = type[nn.Module] | str
"""A module class, its name (bare, or with its module), or the path of one module."""


def is_leaf(module: nn.Module) -> bool:
    """Whether ``module`` was declared a leaf."""
    return bool(module.__dict__.get(_MARK, False))


def mark(module: nn.Module, *, leaf: bool) -> None:
    """Declare one module a leaf, or take that back."""
    if leaf:
        module.__dict__[_MARK] = True
    else:
        module.__dict__.pop(_MARK, None)


def find(model: nn.Module, wanted: Iterable[Wanted] | Wanted, *, must_find: bool) -> list[nn.Module]:
    """Every module that one of ``wanted`` means, in that order.

    Raises:
        PlanError: one of them is nowhere in the model, and ``must_find``.
    """
    found: dict[int, nn.Module] = {}
    for item in [wanted] if isinstance(wanted, (str, type)) else wanted:
        matches = [module for path, module in model.named_modules() if _is_meant(item, path, module)]
        if not matches and must_find:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise PlanError(
                f"{item!r} is no class, class name or path of a module in this {type(model).__name__}, so it cannot be a "
                f"leaf. Its classes: {', '.join(classes)}."
            )
        found.update({id(module): module for module in matches})
    return list(found.values())


def _is_meant(item: Wanted, path: str, module: nn.Module) -> bool:
    if not isinstance(item, str):
        return isinstance(module, item)
    cls = type(module)
    return item in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") or bool(path) and item == path
