"""Which parameters are gathered and reduced together.

A unit is, as a rule, one of the repeated blocks of the model, or a large table outside them. What belongs to no unit, or to
several, is the root unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from shardledger.config.sections import LeafModuleSection
from shardledger.errors import PlanError
from shardledger.plan.spec import ModelSpec, ModuleSpec

ROOT = ""
"""Path of the root unit."""

LEAST_TABLE_NUMEL = 1 << 20
"""Elements below which a collective of its own costs more in latency than the table costs in memory: gloo is at full speed
from 1 MiB a message on."""


def find_units(
    model: ModelSpec, class_names: Sequence[str] | None = None, leaves: Collection[str] = ()
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Split a model into units: ``((module path, parameter names), ...)``, the root unit first, blocks in model order.

    Args:
        model: the model's description.
        class_names: names of the module classes that become units; ``None`` finds the repeated blocks and large tables.
        leaves: paths of modules that are never cut: each is one unit, or part of the block that it lies in.

    Raises:
        PlanError: a class name that no module has.
    """
    chosen = _named_blocks(model, class_names) if class_names is not None else _repeated_blocks(model)
    if class_names is None:
        paths = {block.path for block in chosen} | set(large_tables(model))
        chosen = [module for module in model.modules if module.path in paths]
    if leaves:
        paths = {block.path for block in chosen} | set(leaves)
        chosen = [] if ROOT in leaves else _outermost([m for m in model.modules if m.path in paths and m.parameters])
    holders = Counter(name for block in chosen for name in set(block.parameters))
    tied: dict[str, list[str]] = {}
    for other, canonical in model.aliases:
        tied.setdefault(canonical, [canonical]).append(other)
    blocks = []
    for block in chosen:
        inside = f"{block.path}."
        own = tuple(
            name
            for name in dict.fromkeys(block.parameters)
            if holders[name] == 1 and all(place.startswith(inside) for place in tied.get(name, ()))
        )
        if own:
            blocks.append((block.path, own))
    in_blocks = {name for _, names in blocks for name in names}
    rest = tuple(p.name for p in model.parameters if p.name not in in_blocks)
    return ((ROOT, rest), *blocks)


def large_tables(model: ModelSpec) -> tuple[str, ...]:
    """Paths of embeddings and heads outside the repeated blocks with at least a quarter of the largest block's elements.

    In model order. In the root unit they would be gathered from the start of a pass to its end, which sets the peak where
    ranks are many. Tied ones are found too; ``find_units`` leaves them to the root, which is where modules share a weight.
    See docs/decisions/0033.
    """
    numel = {p.name: p.numel for p in model.parameters}
    sizes = {module.path: sum(numel[name] for name in module.parameters) for module in model.modules}
    blocks = _repeated_blocks(model)
    if not blocks:
        return ()
    least = max(LEAST_TABLE_NUMEL, max(sizes[block.path] for block in blocks) // 4)
    inside = tuple(f"{block.path}." for block in blocks)
    taken = {block.path for block in blocks}
    return tuple(
        m.path
        for m in model.modules
        if _is_table(m) and sizes[m.path] >= least and m.path not in taken and not m.path.startswith(inside)
    )


def _is_table(module: ModuleSpec) -> bool:
    """Whether it is one matrix, which its own forward multiplies or looks up; a list promises no call of each child."""
    named = module.class_name.endswith("Embedding") or module.class_name.endswith("Linear")
    if module.class_name == "NonDynamicallyQuantizableLinear":
        return False  # torch.nn.MultiheadAttention uses its weight without calling it
    return named and module.container != "list" and not module.composite and module.path != ROOT


def leaf_paths(model: ModelSpec, asked: LeafModuleSection | None) -> tuple[str, ...]:
    """Paths of the modules that were declared leaves, in the model or in the configuration, in model order.

    Raises:
        PlanError: the configuration names a class, a path or an ending of paths that no module has.
    """
    found = {m.path for m in model.modules if m.leaf}
    if asked is not None:
        paths, classes = [m.path for m in model.modules if m.path], [m.class_name for m in model.modules]
        for name in asked.classes:
            # DeepSpeed takes a class with its module too.
            found |= _meant("classes", name, [m.path for m in model.modules if m.class_name == _last(name)], classes)
        for name in asked.names:
            found |= _meant("names", name, [path for path in paths if path == name], paths)
        for name in asked.name_suffixes:
            found |= _meant("name_suffixes", name, [path for path in paths if path.endswith(name)], paths)
    return tuple(m.path for m in model.modules if m.path in found)


def _meant(key: str, name: str, found: Sequence[str], known: Sequence[str]) -> set[str]:
    if not found:
        near = get_close_matches(_last(name) if key == "classes" else name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlanError(f"zero_optimization.leaf_module.{key}: no module of the model is meant by {name!r}.{hint}")
    return set(found)


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _repeated_blocks(model: ModelSpec) -> list[ModuleSpec]:
    """Children of a ModuleList or Sequential that have a sibling of the same class; only the outermost ones.

    A leaf of a ModuleList (a plain Linear among several heads, say) is left to the root unit: a list says nothing about
    which of its children a step calls, while a Sequential always calls all of them.
    """
    candidates = [m for m in model.modules if m.parameters and (m.container == "sequential" or _listed_block(m))]
    siblings = Counter((_parent(m.path), m.class_name) for m in candidates)
    repeated = [m for m in candidates if siblings[_parent(m.path), m.class_name] > 1]
    return _outermost(repeated)


def _listed_block(module: ModuleSpec) -> bool:
    return module.container == "list" and module.composite


def _named_blocks(model: ModelSpec, class_names: Sequence[str]) -> list[ModuleSpec]:
    known = sorted({m.class_name for m in model.modules})
    missing = [name for name in class_names if name not in known]
    if missing:
        near = get_close_matches(missing[0], known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlanError(
            f"shardledger.units names the module class {missing[0]!r}, which {model.class_name} does not contain.{hint} "
            f"Its classes: {', '.join(known)}."
        )
    wanted = set(class_names)
    return _outermost([m for m in model.modules if m.class_name in wanted and m.parameters and m.path != ROOT])


def _outermost(modules: Sequence[ModuleSpec]) -> list[ModuleSpec]:
    paths = {m.path for m in modules}

    def inside_another(path: str) -> bool:
        while path:
            path = _parent(path)
            if path and path in paths:
                return True
        return False

    return [m for m in modules if not inside_another(m.path)]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
