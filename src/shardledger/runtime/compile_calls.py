"""What an engine's user asks of torch.compile."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardledger.errors import ConfigError, EngineStateError

if TYPE_CHECKING:
    from shardledger.runtime.assemble import Parts


class CompileCalls:
    """Part of ``Engine``."""

    _parts: Parts | None

    def _live(self) -> Parts:
        raise NotImplementedError

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of every unit in place, once for all units that are alike; hooks stay outside.

        What belongs to no unit (embeddings, the head, the loss) runs as it is, unless the model is one single unit.

        Args:
            backend: as of ``torch.compile``.
            compile_kwargs: its other arguments: ``mode``, ``dynamic``, ``fullgraph``, ``options``.
            schedule: refused: a schedule of DeepCompile's passes.
            compiled_autograd_enabled: refused: units are reduced and released by hooks inside backward.

        Raises:
            ConfigError: an argument is refused, by the engine or by torch.
        """
        parts = self._live()
        if schedule is not None or compiled_autograd_enabled:
            name = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise ConfigError(
                f"engine.compile({name}=...): only units are compiled, forward and backward, with the engine's hooks between "
                f"them; the passes of DeepCompile and compiled autograd would run without those. Leave it out."
            )
        modules = [unit.module for unit in parts.units[1:]] or [parts.units[0].module]
        arguments = dict(compile_kwargs or {})
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            # torch's is 8 for all modules of a class; blocks that know their number in the model take one each, or two.
            arguments.setdefault("recompile_limit", 8 + 2 * len(modules))
        compiler = partial(torch.compile, backend=backend, **arguments)
        try:
            parts.forwards.compile(compiler, modules, released=parts.released)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"engine.compile: torch.compile refused its arguments: {error}") from error

    @property
    def is_compiled(self) -> bool:
        """Whether any part of the model runs compiled."""
        return self._parts is not None and self._parts.forwards.compiled

    @property
    def _torchdynamo_orig_callable(self) -> Any:
        """What torch.compile asks of everything that it is given."""
        raise EngineStateError(
            "torch.compile(engine) would compile the engine's bookkeeping: call engine.compile(), which compiles the units "
            'of its module, or set "shardledger": {"compile": {}}.'
        )
