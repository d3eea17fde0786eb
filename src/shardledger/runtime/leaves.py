"""Which modules were declared leaves: one unit with everything below, because not every rank runs all of it.

The mark is an attribute of the module, so that a copy of a model keeps its leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from shardledger.errors import EngineStateError, PlanError
from shardledger.runtime.gathered import live

_MARK = "_shardledger_leaf"


def is_leaf(module: nn.Module) -> bool:
    """Whether ``module`` was declared a leaf."""
    return bool(module.__dict__.get(_MARK, False))


def mark(module: nn.Module, leaf: bool) -> None:
    """Declare one module a leaf, or take that back.

    Raises:
        EngineStateError: an engine already holds its parameters: units are cut in initialize.
    """
    held = {id(p) for parts in live() for unit in parts.units for flat in unit.flats for p in flat.parameters}
    if any(id(p) in held for p in module.parameters()):
        raise EngineStateError(
            f"a {type(module).__name__} was declared a leaf, or no leaf any more, after shardledger.initialize, which "
            f"has already cut the model into units. Declare leaves before it, or destroy the engine first."
        )
    if leaf:
        module.__dict__[_MARK] = True
    else:
        module.__dict__.pop(_MARK, None)


def mark_all(
    model: nn.Module, wanted: Iterable[type[nn.Module] | str], *, leaf: bool, must_find: bool
) -> list[nn.Module]:
    """Declare every module of these classes, class names (bare or with their module) or paths; returns them.

    Raises:
        EngineStateError: see ``mark``.
        PlanError: one of ``wanted`` is nowhere in the model and ``must_find``; nothing has been marked then.
    """
    asked = [wanted] if isinstance(wanted, (str, type)) else list(wanted)
    found: list[nn.Module] = []
    for item in asked:
        matches = list(_matching(model, _is_asked(item)))
        if not matches and must_find:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise PlanError(
                f"{item!r} is no class, class name or path of a module in this {type(model).__name__}, so no leaf can "
                f"be declared. Its classes: {', '.join(classes)}."
            )
        found += [module for module in matches if not any(module is known for known in found)]
    for module in found:
        mark(module, leaf)
    return found


def _is_asked(item: type[nn.Module] | str) -> Callable[[str, nn.Module], bool]:
    if isinstance(item, type):
        return lambda _, module: isinstance(module, item)
    return lambda path, module: item in (
        path,
        type(module).__name__,
        f"{type(module).__module__}.{type(module).__qualname__}",
    )


def _matching(model: nn.Module, test: Callable[[str, nn.Module], bool]) -> Iterator[nn.Module]:
    return (module for path, module in model.named_modules() if test(path, module))
