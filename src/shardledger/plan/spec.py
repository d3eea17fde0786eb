"""What a model is, as plain data: the input of planning. Made by ``runtime.describe``, read without torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from math import prod

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element of every dtype a parameter may have."""

REAL_FLOATS = frozenset({"float32", "bfloat16", "float16"})
"""Dtypes that the configured precision replaces; all others are kept as they are."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter, under the first name it is registered with."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    keeps_dtype: bool = False
    """Whether the configured precision leaves it alone (weights of batch norms, whose statistics are fp32)."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """One module that could become a unit."""

    path: str
    class_name: str
    container: str
    """What holds it: ``"list"`` (ModuleList), ``"sequential"`` or ``""``."""
    composite: bool
    """Whether it has child modules of its own."""
    parameters: tuple[str, ...]
    """Canonical names of every parameter at or below it."""
    leaf: bool = False
    """Whether it was declared a leaf: never cut, whatever is below it."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: its parameters in registration order, its modules, and the other names of tied parameters."""

    class_name: str
    parameters: tuple[ParameterSpec, ...]
    modules: tuple[ModuleSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """``(other name, canonical name)`` for parameters registered more than once."""
    buffers: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    """``(name, shape, dtype)`` of every buffer."""

    @property
    def numel(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(p.numel for p in self.parameters)

    @property
    def digest(self) -> str:
        """Hex digest of everything that ranks must agree on: names, shapes, dtypes, trainability, ties, buffers."""
        content = {"parameters": [asdict(p) for p in self.parameters], "aliases": self.aliases, "buffers": self.buffers}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
