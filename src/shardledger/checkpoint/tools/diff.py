"""Two checkpoints, tensor by tensor; they may be of different ranks, stages and precisions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardledger.checkpoint.manifest import Manifest
from shardledger.checkpoint.tools.find import Stored
from shardledger.checkpoint.tools.tensors import StoredTensors


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """One tensor that is not the same in both, or not in both."""

    name: str
    role: str
    """``"value"``, or the optimizer's name of a state."""
    largest: float | None
    """Largest absolute difference of an element; inf where one is not a number; None when they cannot be compared."""
    at: tuple[int, ...] | None = None
    """Where it is."""
    values: tuple[Any, Any] | None = None
    """The two values there."""
    why: str = ""
    """For those that cannot be compared: ``only in A``, shapes."""


def compare(one: Stored, other: Stored, *, weights_only: bool, tolerance: float = 0.0) -> Iterator[TensorDifference]:
    """What differs by more than ``tolerance``, in the model's order. Memory: one tensor of each.

    Raises:
        CheckpointError: a file of one of them is damaged.
    """
    first, second = StoredTensors(one), StoredTensors(other)
    left, right = _rows(first, weights_only), _rows(second, weights_only)
    for name, role in [*left, *(row for row in right if row not in left)]:
        if (name, role) not in right or (name, role) not in left:
            side = "A" if (name, role) in left else "B"
            yield TensorDifference(name=name, role=role, largest=None, why=f"only in {side}")
            continue
        found = _difference(name, role, left[name, role](), right[name, role]())
        if found is not None and (found.largest is None or not found.largest <= tolerance):
            yield found


def _rows(tensors: StoredTensors, weights_only: bool) -> dict[tuple[str, str], Any]:
    """Everything to compare, with a function that reads it."""
    rows: dict[tuple[str, str], Any] = {}
    manifest = tensors.manifest
    for name, role in tensors.rows():
        value = role == tensors.value_role(name)
        if value or not weights_only:
            rows[name, "value" if value else role] = lambda name=name, role=role: tensors.read(name, role)
    for name, numbers in {} if weights_only else _numbers(manifest).items():
        for role, number in numbers.items():
            rows[name, role] = lambda number=number: torch.tensor(number)
    return rows


def _numbers(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Optimizer states that are plain numbers."""
    values = manifest.optimizer.values if manifest.optimizer is not None else {}
    return {n: {k: v for k, v in states.items() if isinstance(v, (int, float))} for n, states in values.items()}


def _difference(name: str, role: str, one: torch.Tensor, other: torch.Tensor) -> TensorDifference | None:
    if one.shape != other.shape:
        why = f"shape {list(one.shape)} in A, {list(other.shape)} in B"
        return TensorDifference(name=name, role=role, largest=None, why=why)
    if one.dtype == other.dtype and torch.equal(one, other):
        return None
    common = torch.promote_types(one.dtype, other.dtype)
    wide = torch.complex128 if common.is_complex else torch.float64 if common.is_floating_point else common
    largest, index = 0.0, -1
    # In runs, because the wide copies of a large tensor would take four times its size.
    for start in range(0, max(1, one.numel()), _RUN):
        a = one.reshape(-1)[start : start + _RUN].to(wide)
        b = other.reshape(-1)[start : start + _RUN].to(wide)
        gap = (a != b).double() if wide == torch.bool else (a - b).abs().double()
        gap[(a == b) | (a.isnan() & b.isnan())] = 0.0  # inf - inf
        gap.nan_to_num_(nan=math.inf, posinf=math.inf)
        if gap.numel() and float(gap.max()) > largest:
            largest, index = float(gap.max()), start + int(gap.argmax())
    if index < 0:
        return None  # equal numbers in different dtypes, or NaN in both
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), one.shape)) if one.dim() else ()
    values = (one.reshape(-1)[index].item(), other.reshape(-1)[index].item())
    return TensorDifference(name=name, role=role, largest=largest, at=at, values=values)


_RUN = 1 << 20
"""Elements compared at once."""
