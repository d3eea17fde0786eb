"""Who may import whom. An import inside a function, or by name through importlib, counts like one at the top."""

from pathlib import Path

import pytest

from support.source import Import, Module, cycles, edges, modules, parse

ALL = {"errors", "config", "plan", "layout", "ledger", "telemetry", "transport", "checkpoint", "runtime", "workload"}
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "plan": {"errors", "config"},
    "layout": {"errors", "plan"},
    "ledger": {"errors", "plan", "layout"},
    "telemetry": {"errors", "ledger"},
    "transport": {"errors", "telemetry"},
    "checkpoint": {"errors", "plan", "layout", "transport", "telemetry"},
    "runtime": {"errors", "plan", "layout", "ledger", "transport", "telemetry"},
    "workload": {"errors"},
    # Parts of the composition root: the dry run of a whole plan, and the choice of a stage by it.
    "forecast": ALL,
    "budget": ALL | {"forecast"},
    "api": ALL | {"door", "forecast", "budget"},
    # A door of its own: DeepSpeed's helpers by DeepSpeed's names.
    "utils": ALL,
    "cli": ALL | {"door", "api", "forecast", "budget"},
    "door": ALL | {"api"},
}
TORCH = {"forecast", "budget", "telemetry", "transport", "checkpoint", "runtime", "workload", "api", "utils", "cli"}
#: The launcher that ships with torch, used as a library, is not communication.
LAUNCHER = ("torch.distributed.launcher", "torch.distributed.elastic", "torch.distributed.run")


def is_in(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


def broken_rules(module: Module) -> list[str]:
    """Every import of a module that the law forbids, as text."""
    return [f"{module.path}:{item.line}: {why}" for item in module.imports for why in rules_broken_by(module, item)]


def rules_broken_by(module: Module, item: Import) -> list[str]:
    found = []
    if item.relative:
        found.append(f"relative import of {item.target!r}")
    if is_in(item.target, "shardledger"):
        # `from shardledger import x` names the room x when there is one, otherwise something of the door.
        room = ([*item.target.split("."), ""])[1]
        room = room if room in MAY_IMPORT else "door"
        if room != module.room and room not in MAY_IMPORT[module.room]:
            found.append(f"{module.room} may not import {room}")
    if is_in(item.target, "torch"):
        if module.room not in TORCH:
            found.append(f"{module.room} may not import torch")
        elif module.room == "cli" and item.at_top:
            found.append("cli imports torch inside its commands only")
    if is_in(item.target, "torch.distributed") and module.room != "transport":
        launcher = module.room == "cli" and item.target.startswith(LAUNCHER)
        if not launcher:
            found.append(f"only transport may touch torch.distributed, {module.room} may not")
    return found


@pytest.fixture(scope="module")
def package() -> list[Module]:
    found = modules()
    assert found, "no source found"
    return found


def test_every_file_stands_in_a_room_that_the_design_names(package):
    assert sorted({module.room for module in package} - set(MAY_IMPORT)) == []


def test_no_module_imports_what_its_room_may_not(package):
    assert [line for module in package if module.room in MAY_IMPORT for line in broken_rules(module)] == []


def test_no_import_cycles_between_modules(package):
    assert [" -> ".join(walk) for walk in cycles(edges(package))] == []


def test_no_import_cycles_between_rooms(package):
    rooms = {module.name: module.room for module in package}
    graph: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, targets in edges(package).items():
        graph[rooms[name]] |= {rooms[target] for target in targets} - {rooms[name]}
    assert [" -> ".join(walk) for walk in cycles(graph)] == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("shardledger.runtime.step", "from shardledger.config import Config", "runtime may not import config"),
        ("shardledger.runtime.step", "def f():\n    import shardledger.config", "runtime may not import config"),
        ("shardledger.runtime.step", "from .engine import Engine", "relative import"),
        ("shardledger.runtime.step", "from shardledger import config", "runtime may not import config"),
        ("shardledger.runtime.step", "import shardledger", "runtime may not import door"),
        ("shardledger.runtime.step", "import torch\ntorch.distributed.barrier()", "only transport"),
        ("shardledger.runtime.step", "from torch import distributed", "only transport"),
        ("shardledger.api", "import torch.distributed as dist", "only transport"),
        ("shardledger.plan.build", "class A:\n    def f(self):\n        import torch", "plan may not import torch"),
        ("shardledger.layout", "import importlib\nimportlib.import_module('torch')", "layout may not import torch"),
        ("shardledger.cli.main", "import torch", "inside its commands"),
        ("shardledger.cli.main", "def f():\n    import torch.distributed", "only transport"),
    ],
)
def test_the_law_notices(name, text, expected):
    assert any(expected in line for line in broken_rules(parse(name, Path("x.py"), text)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "shardledger.transport.gloo",
            "import torch.distributed as dist\nfrom shardledger.errors import TransportError",
        ),
        ("shardledger.cli.main", "def f():\n    import torch\n    from torch.distributed.run import main"),
        ("shardledger.runtime.step", "import torch\nfrom shardledger.runtime.engine import Engine\ntorch.optim.SGD"),
    ],
)
def test_the_law_allows(name, text):
    assert broken_rules(parse(name, Path("x.py"), text)) == []


def test_a_cycle_through_a_function_level_import_is_noticed():
    a = parse("shardledger.plan.a", Path("a.py"), "from shardledger.plan.b import x")
    b = parse("shardledger.plan.b", Path("b.py"), "def f():\n    from shardledger.plan import a")
    assert cycles(edges([a, b])) == [["shardledger.plan.a", "shardledger.plan.b", "shardledger.plan.a"]]
