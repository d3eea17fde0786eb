"""Any torch.optim optimizer, run over this rank's pieces of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from shardledger.errors import ConfigError, EngineStateError
from shardledger.layout.tiles import tiles_of
from shardledger.runtime.compiled import load_compiler
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.released import placeholder
from shardledger.runtime.unit import Unit

WHOLE_PARAMETER_OPTIMIZERS = frozenset({"Adafactor", "Muon", "SparseAdam"})
"""Optimizers whose update of one element depends on the parameter's shape or on other elements."""

_FUSED_ON_CPU = frozenset({"Adam", "AdamW"})


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer by name, as a configuration gives it."""

    class_name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that this rank's optimizer updates."""

    name: str
    flat: FlatParameters
    start: int
    """First element in the flat's masters."""
    values: torch.Tensor
    """The leaf that the optimizer holds: a view of the masters, 1-D, or in the parameter's shape when it is whole."""


Recipe = OptimizerRecipe | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
"""What can become the optimizer."""

Groups = Sequence[tuple[Mapping[str, Any], Sequence[str]]]
"""Param groups as ``(options, parameter names)``."""


def make_pieces(units: Iterable[Unit], *, whole: bool, tile_numel: int | None = None) -> list[Piece]:
    """This rank's non-empty pieces of trainable parameters.

    Where every rank updates everything (stage 0), parameters are still cut where the shards of the other stages end:
    torch's fused kernels round differently at the tail of a tensor, and the stages are to agree to the last bit.

    Args:
        whole: leaves them in one, in their own shape, for optimizers that need that.
        tile_numel: elements at which parameters whose states are offloaded are cut.
    """
    pieces = []
    for unit in units:
        for flat in unit.flats:
            layout = flat.layout
            if not layout.trainable:
                continue
            if whole:
                spans = [(slot.name, slot.start, slot.numel, slot.shape) for slot in layout.slots if slot.numel]
            else:
                tiles = tiles_of(layout, flat.rank, tile_numel if flat.homes.moved else None)
                spans = [(piece.name, piece.start, piece.numel, (-1,)) for tile in tiles for piece in tile.pieces]
            for name, start, numel, shape in spans:
                if flat.master is None:  # it rests on disk
                    values = placeholder((numel,), flat.master_dtype, torch.device("cpu"))
                else:
                    values = flat.master[start : start + numel].view(shape)
                pieces.append(Piece(name, flat, start, values.detach().requires_grad_()))
    return pieces


def point(piece: Piece, gradient: torch.Tensor | None, present: Mapping[str, bool]) -> None:
    """Point a piece at its part of its flat's gradient. Without a gradient on any rank it has none."""
    values = piece.values
    if gradient is None or not present[piece.name]:
        values.grad = None
    else:
        part = gradient.narrow(0, piece.start, values.numel())
        values.grad = part if values.dim() == 1 else part.view(values.shape)


def recipe_class(recipe: Recipe) -> type[torch.optim.Optimizer]:
    """The class that a recipe makes.

    Raises:
        ConfigError: torch.optim has no such class, or the callable fails.
    """
    if isinstance(recipe, torch.optim.Optimizer):
        return type(recipe)
    if isinstance(recipe, OptimizerRecipe):
        cls = getattr(torch.optim, recipe.class_name, None)
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or cls is torch.optim.Optimizer:
            near = get_close_matches(recipe.class_name, [n for n in dir(torch.optim) if n[0].isupper()], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"optimizer.type: torch.optim has no optimizer {recipe.class_name!r}.{hint}")
        return cls
    try:
        made = recipe([{"params": [torch.zeros(2, 2, requires_grad=True)]}])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the optimizer callable given to initialize fails on param groups: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"the optimizer callable given to initialize returned a {type(made).__name__}.")
    return type(made)


def needs_whole_parameters(cls: type) -> bool:
    """Whether the class, or one it derives from, cannot work on pieces."""
    return any(base.__name__ in WHOLE_PARAMETER_OPTIMIZERS for base in cls.__mro__)


def check_recipe(recipe: Recipe, *, sharded: bool, offloaded: bool = False) -> None:
    """Refuse what cannot work before anything is allocated.

    Raises:
        ConfigError: no such class, options that it does not take, or a class that cannot work on parts of parameters.
        EngineStateError: the user's optimizer has stepped already.
    """
    load_compiler()
    cls = recipe_class(recipe)
    if any(base.__name__ == "LBFGS" for base in cls.__mro__):
        raise ConfigError(f"optimizer {cls.__name__} needs a closure that runs the model again; use a first-order one.")
    if sharded and needs_whole_parameters(cls):
        raise ConfigError(
            f"optimizer {cls.__name__} needs whole parameters, and stages 1 to 3 give each rank parts of them. Use "
            f"stage 0, or an element-wise optimizer such as AdamW."
        )
    if offloaded and needs_whole_parameters(cls):
        raise ConfigError(
            f"zero_optimization.offload_optimizer: optimizer {cls.__name__} needs whole parameters, and offload steps parts "
            f"of them. Use an element-wise optimizer such as AdamW, or train without offload."
        )
    if isinstance(recipe, torch.optim.Optimizer) and any(recipe.state.values()):
        raise EngineStateError(
            "the optimizer given to initialize has stepped already, and its states cannot follow the parameters to "
            "their shards. Pass a fresh optimizer and load its states from a checkpoint."
        )
    if isinstance(recipe, torch.optim.Optimizer) and not any(group["params"] for group in recipe.param_groups):
        raise EngineStateError(
            "the optimizer given to initialize has no parameters: an engine that was destroyed has taken them. Build a new "
            "one over the model's parameters."
        )
    if isinstance(recipe, OptimizerRecipe):
        _construct(cls, [{"params": [torch.zeros(2, 2, requires_grad=True)]}], recipe.options)


def build_optimizer(recipe: Recipe, groups: Groups, pieces: Sequence[Piece]) -> torch.optim.Optimizer:
    """Make an optimizer over ``pieces``, or point the user's own at them.

    Raises:
        ConfigError: the user's callable fails.
    """
    held: dict[str, list[torch.Tensor]] = {}
    for piece in pieces:
        held.setdefault(piece.name, []).append(piece.values)
    local = [({**options}, [v for name in names for v in held.get(name, ())]) for options, names in groups]
    if isinstance(recipe, torch.optim.Optimizer):
        recipe.state.clear()
        for group, (_, params) in zip(recipe.param_groups, local, strict=True):
            group["params"] = params
        return recipe
    as_groups = [{**options, "params": params} for options, params in local]
    if isinstance(recipe, OptimizerRecipe):
        return _construct(recipe_class(recipe), as_groups, recipe.options)
    try:
        return recipe(as_groups)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the optimizer callable given to initialize failed: {error}") from error


def _construct(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    options = dict(options)
    if cls.__name__ in _FUSED_ON_CPU and not {"fused", "foreach", "amsgrad"} & options.keys():
        # Several times faster than the loop that torch picks by default on CPU.
        options["fused"] = True
    try:
        return cls(groups, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: torch.optim.{cls.__name__} refuses them: {error}.") from error


def groups_of(
    source: Iterable[Any] | torch.optim.Optimizer | None, names: Mapping[int, str], trainable: Sequence[str]
) -> Groups:
    """Param groups by name, from parameters, group dicts, an optimizer, or (None) all trainable parameters.

    Raises:
        ConfigError: a parameter that the model does not have.
    """
    if source is None:
        return [({}, list(trainable))]
    entries = list(source.param_groups if isinstance(source, torch.optim.Optimizer) else source)
    if not entries:
        raise ConfigError("model_parameters is empty: pass the parameters to train, or leave it out.")
    if not isinstance(entries[0], Mapping):
        entries = [{"params": [e[1] if isinstance(e, tuple) else e for e in entries]}]
    allowed = set(trainable)
    groups = []
    for number, entry in enumerate(entries):
        params = entry["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        found = []
        for parameter in params:
            parameter = parameter[1] if isinstance(parameter, tuple) else parameter
            if id(parameter) not in names:
                raise ConfigError(
                    f"param group {number} holds a parameter of shape {tuple(parameter.shape)} that the model does not "
                    f"have. Build the optimizer from the parameters of the model given to initialize."
                )
            if names[id(parameter)] in allowed:
                found.append(names[id(parameter)])
        groups.append(({k: v for k, v in entry.items() if k != "params"}, found))
    return groups


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Canonical name of each parameter by ``id``."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
