"""Reads the package's source as syntax trees: which module imports what, at any depth. Runs none of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "shardledger"
#: Calls that import by name, which an import statement would show.
_IMPORTERS = ("import_module", "__import__")


@dataclass(frozen=True)
class Import:
    """One imported name: absolute dotted `target`, whether it was written relatively, and where it stands."""

    target: str
    line: int
    relative: bool
    at_top: bool  # runs when the module is imported


@dataclass(frozen=True)
class Module:
    """One source file as dotted `name`, with everything it imports or names as `torch.…` in an expression."""

    name: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def room(self) -> str:
        """The first name below the package; `door` for the package's own __init__, `cli` for __main__."""
        parts = self.name.split(".")
        if len(parts) == 1:
            return "door"
        return "cli" if parts[1] == "__main__" else parts[1]


def modules(folder: Path = ROOT / "src" / PACKAGE) -> list[Module]:
    """Every module of the package, sorted by name."""
    return [parse(_dotted(file, folder), file, file.read_text()) for file in sorted(folder.rglob("*.py"))]


def _dotted(file: Path, folder: Path) -> str:
    parts = [PACKAGE, *file.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(name: str, path: Path, text: str) -> Module:
    """A Module from source text."""
    tree = ast.parse(text, filename=str(path))
    return Module(name, path, tree, tuple(_imports(tree, at_top=True)))


def _imports(node: ast.AST, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        deferred = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            deferred = True
        yield from _own_imports(child, at_top)
        yield from _imports(child, at_top and not deferred)


def _own_imports(node: ast.AST, at_top: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, False, at_top) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        yield from (Import(f"{base}.{a.name}".strip("."), node.lineno, node.level > 0, at_top) for a in node.names)
    elif isinstance(node, ast.Attribute):
        dotted = ast.unparse(node)
        # `import torch` alone opens every subpackage: what is reached through the name counts as imported.
        if dotted.startswith("torch.") and dotted.replace(".", "").replace("_", "").isalnum():
            yield Import(dotted, node.lineno, False, at_top)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _IMPORTERS:
        for argument in node.args[:1]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield Import(argument.value, node.lineno, argument.value.startswith("."), at_top)


def edges(found: list[Module]) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, at any depth. A name that is no module is its package."""
    names = {module.name for module in found}
    graph: dict[str, set[str]] = {module.name: set() for module in found}
    for module in found:
        for item in module.imports:
            target = item.target
            while target and target not in names:
                target = target.rpartition(".")[0]
            if target and target != module.name:
                graph[module.name].add(target)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One closed walk for each back edge of a depth-first search; empty when the graph has no cycle."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
            return
        if node in done:
            return
        for following in sorted(graph.get(node, ())):
            visit(following, [*path, node])
        done.add(node)

    for start in sorted(graph):
        visit(start, [])
    return found
