"""torch.compile and the engine: the forward of a unit is compiled, the hooks around it are not.

``nn.Module.compile`` and ``torch.compile(module)`` compile a module's call, hooks included. The engine's hooks gather
and release parameters: traced into a graph, that would be done once, while tracing. So a module that comes compiled is
taken apart into the plain module, whose names carry no prefix, and its compiler, which is then given the ``forward``
alone. Every graph so ends where a unit ends; at stage 3 it starts with the unit's parameters gathered.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardledger.errors import ConfigError, PlanError

Forward = Callable[..., Any]
Compiler = Callable[[Forward], Forward]
"""What ``torch.compile`` was told, ready to be applied to a function."""


def load_compiler() -> None:
    """Import what torch imports when the first optimizer of a process is made, and clean up after it.

    That import leaves the frames it was called from in a reference cycle: ours would keep the model and every shard alive
    until Python looks for cycles.
    """
    if "torch._dynamo" not in sys.modules:
        importlib.import_module("torch._dynamo")
        gc.collect()


def is_compiled(module: nn.Module) -> bool:
    """Whether the call of ``module`` goes through torch.compile."""
    return _is_wrapper(module) or module._compiled_call_impl is not None


class Aside:
    """What was compiled of one model, set aside: ``model`` is the plain module, until ``put_back``."""

    def __init__(self, model: nn.Module) -> None:
        """Take the model apart, in place.

        Raises:
            PlanError: a wrapper of torch.compile's has hooks of its own, or it cannot be told how a module was compiled.
        """
        self.compilers: list[tuple[nn.Module, Compiler]] = []
        """Outer modules first."""
        self._wrappers: list[tuple[nn.Module, str, nn.Module]] = []
        self._calls: list[tuple[nn.Module, Any]] = []
        try:
            self.model = self._unwrapped(model, type(model).__name__)
            for path, parent in list(self.model.named_modules()):
                if _is_wrapper(parent):
                    continue
                self._take_call(parent, path or type(parent).__name__)
                for name, child in list(parent._modules.items()):
                    if child is not None and _is_wrapper(child):
                        parent._modules[name] = self._unwrapped(child, f"{path}.{name}" if path else name)
                        self._wrappers.append((parent, name, child))
        except BaseException:
            self.put_back()
            raise

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.put_back()

    def put_back(self) -> None:
        """Make the model what it was."""
        for parent, name, wrapper in self._wrappers:
            parent._modules[name] = wrapper
        for module, call in self._calls:
            module._compiled_call_impl = call
        self._wrappers, self._calls = [], []

    def _unwrapped(self, module: nn.Module, path: str) -> nn.Module:
        while _is_wrapper(module):
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
                raise PlanError(
                    f"{path} was wrapped by torch.compile and has hooks on the wrapper, which the engine replaces by the "
                    f"module inside. Register them on {path}._orig_mod, or compile in place with module.compile()."
                )
            inner = module._orig_mod
            assert isinstance(inner, nn.Module)
            self.compilers.append((inner, _compiler(module.dynamo_ctx, path)))
            module = inner
        return module

    def _take_call(self, module: nn.Module, path: str) -> None:
        call = module._compiled_call_impl
        if call is None:
            return
        if inspect.isfunction(call):  # torch.compile(..., disable=True) leaves the method itself
            self.compilers.append((module, _compiler(inspect.getclosurevars(call).nonlocals.get("self"), path)))
        self._calls.append((module, call))
        module._compiled_call_impl = None


class Forwards:
    """Replaces the forward of modules: recomputed in backward, compiled, or both. Recomputation is outside."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._plain: dict[int, tuple[nn.Module, Any]] = {}
        """Modules, and the forward that they carried themselves (None: their class's)."""
        self._compiled: dict[int, Forward] = {}
        self._recomputed: set[int] = set()
        self._on_restore: list[Callable[[], None]] = []

    @property
    def compiled(self) -> bool:
        """Whether any forward is compiled."""
        return bool(self._compiled)

    def recompute(self, module: nn.Module) -> None:
        """Keep only the inputs of ``module`` for backward."""
        self._remember(module)
        self._recomputed.add(id(module))
        self._put(module)

    def compile(self, compiler: Compiler, modules: Sequence[nn.Module], *, released: bool) -> None:
        """Compile the forward of ``modules`` with ``compiler``; ``released``: some of their weights are not always there.

        Raises:
            ConfigError: torch does not take the compiler's options, or they need weights that stay where they are.
        """
        made = [compiler(self._remember(module)) for module in modules]
        settings = getattr(made[0], "get_compiler_config", dict)() if made else None
        if released and self._device_type == "cuda" and (settings or {}).get("triton.cudagraphs"):
            raise ConfigError(
                "torch.compile was asked for CUDA graphs (mode 'reduce-overhead' or 'max-autotune'), which replay kernels on "
                "fixed addresses; weights that are sharded are gathered anew for each pass. Use mode "
                "'max-autotune-no-cudagraphs' or the default one, or a stage below 3."
            )
        for module, forward in zip(modules, made, strict=True):
            self._compiled[id(module)] = forward
            self._put(module)

    def adopt(self, aside: Aside, units: Sequence[nn.Module], *, released: bool) -> None:
        """Compile what came compiled: a unit, what lies within one, or, of what holds ``units``, each of them."""
        for module, compiler in reversed(aside.compilers):  # inner ones first: they were asked for by name
            below = {id(inner) for inner in module.modules()} - {id(module)}
            targets = [unit for unit in units if id(unit) in below] or [module]
            left = [target for target in targets if id(target) not in self._compiled]
            self.compile(compiler, left, released=released)
        self._on_restore.append(aside.put_back)

    def restore(self) -> None:
        """Give every module its own forward back."""
        for module, carried in self._plain.values():
            module.__dict__.pop("forward", None)
            if carried is not None:
                module.forward = carried
        for action in self._on_restore:
            action()
        self._plain, self._compiled, self._recomputed, self._on_restore = {}, {}, set(), []

    def _remember(self, module: nn.Module) -> Forward:
        """The forward of ``module`` before anything was done to it."""
        _, carried = self._plain.setdefault(id(module), (module, module.__dict__.get("forward")))
        return carried if carried is not None else MethodType(type(module).forward, module)

    def _put(self, module: nn.Module) -> None:
        forward = self._compiled.get(id(module)) or self._remember(module)
        if id(module) in self._recomputed:
            forward = partial(checkpoint, forward, use_reentrant=False)
        module.forward = forward  # type: ignore[method-assign]


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule"


def _compiler(context: Any, path: str) -> Compiler:
    if not callable(context):
        raise PlanError(
            f"{path} is compiled in a way that cannot be repeated for its forward alone. Give initialize the module "
            f"uncompiled and call engine.compile(), or compile before: module.forward = torch.compile(module.forward)."
        )
    compiler: Compiler = context
    return compiler
