"""Live bytes, counted exactly: every storage that an operator makes, until the moment it is freed.

The same counter runs over real tensors, where it measures, and over fake ones, where it predicts. It sees what the
operators of PyTorch see: kernels' own workspaces stay hidden, on both sides alike. It costs a Python call for every
operator, so it is for dry runs and for verification, not for training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardledger.ledger import CATEGORIES

PHASES = ("init", "forward", "backward", "step", "checkpoint")


@dataclass(frozen=True)
class Reading:
    """Bytes alive at one moment."""

    total: int
    by_category: dict[str, int]
    phase: str
    """``"init"``, ``"forward"``, ``"backward"``, ``"step"`` or ``"checkpoint"``."""
    unit: str
    """Label of the unit at work; empty where there is none."""


@dataclass
class _Storage:
    """One live storage."""

    reference: Any  # keeps the callback of its death alive
    nbytes: int
    category: str


@dataclass
class Scope:
    """Where the program stands: decides the category of new storages."""

    phase: str = "init"
    unit: str = ""
    communicating: int = 0
    """Depth of transport calls under way."""

    def category(self) -> str:
        """Category of what is allocated now.

        A forward pass, and its repetition inside a backward pass, makes activations; autograd itself runs with
        gradients off.
        """
        if self.communicating:
            return "communication"
        if self.phase == "forward" or self.phase == "backward" and torch.is_grad_enabled():
            return "activations"
        return "temporary"


@dataclass
class Peaks:
    """The highest moments so far."""

    readings: dict[str, Reading] = field(default_factory=dict)
    """The highest reading of each phase."""
    timeline: list[tuple[str, str, int]] = field(default_factory=list)
    """Phase, unit and most bytes of every stay of the program in a unit, in order."""
    birth: list[tuple[_Storage, int]] = field(default_factory=list)
    """What was alive at the highest moment of ``init``, when nothing had a meaning yet, and its bytes."""

    @property
    def highest(self) -> Reading:
        """The highest of all; of equal ones the one that comes first in a step."""
        return max(self.readings.values(), key=lambda reading: reading.total)


class LiveBytes(TorchDispatchMode):
    """A context in which every allocation is counted.

    ``reattribute`` is asked at every new peak for bytes that have changed their meaning since they were allocated: a
    mapping of ``(from, to)`` categories to bytes.
    """

    def __init__(
        self,
        scalar: Callable[[torch.Tensor], Any] | None = None,
        note: Callable[[Any, Any], None] | None = None,
    ) -> None:
        """``scalar`` answers where a program asks a fake tensor for its value; ``note`` is shown each operator and its
        result."""
        super().__init__()
        self.scope = Scope()
        self.peaks = Peaks()
        self.total = 0
        self.by_category = dict.fromkeys(CATEGORIES, 0)
        self.reattribute: Callable[[], dict[tuple[str, str], int]] = dict
        self._storages: dict[int, _Storage] = {}
        self._resizes: list[Any] = []
        self._elsewhere: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._scalar = scalar
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._scalar is not None and func is torch.ops.aten._local_scalar_dense.default:
            return self._scalar(args[0])
        result = func(*args, **(kwargs or {}))
        if self._note is not None:
            self._note(func, result)
        with torch._C.DisableTorchFunctionSubclass():
            self._see(args)
            if kwargs:
                self._see(kwargs.values())
            self._see((result,))
        self.sample()
        return result

    def __enter__(self) -> LiveBytes:
        """Count from now on."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            known = self._storages.get(storage._cdata)
            if known is not None:
                self._resize(known, storage.nbytes())
                self.sample()

        # The one way to give memory back that no operator shows: gathered parameters are released by it.
        self._resizes.append(resize)
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self._resizes.pop()  # type: ignore[method-assign]
        super().__exit__(*args)

    def assign(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what the storages of ``tensors`` are for, whether seen before or not."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                known = self._storages.get(storage._cdata) or self._add(storage)
                if known is None:
                    continue
                self.by_category[known.category] -= known.nbytes
                known.category = category
                self.by_category[category] += known.nbytes

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out what lies on another device."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                # Marked by its object: its address may belong to another storage once it is freed.
                self._elsewhere.add(storage)

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self.scope.phase = phase
        if phase != "backward":  # it begins where the forward pass ended
            self.scope.unit = ""
        self.sample()

    def sample(self) -> None:
        """Take a reading; keep it when it is the highest of its phase."""
        peaks, phase, unit = self.peaks, self.scope.phase, self.scope.unit
        before = peaks.readings.get(phase)
        if before is None or self.total >= before.total:
            peaks.readings[phase] = self.reading()
            if phase == "init" and (before is None or self.total > before.total):
                peaks.birth = [(known, known.nbytes) for known in self._storages.values()]
        line = peaks.timeline
        if line and line[-1][0] == phase and line[-1][1] == unit:
            if self.total > line[-1][2]:
                line[-1] = (phase, unit, self.total)
        else:
            line.append((phase, unit, self.total))

    def reading(self) -> Reading:
        """What is alive now."""
        by_category = dict(self.by_category)
        for (source, target), nbytes in self.reattribute().items():
            by_category[source] -= nbytes
            by_category[target] += nbytes
        return Reading(self.total, by_category, self.scope.phase, self.scope.unit)

    def born(self) -> None:
        """Everything made in ``init`` has been assigned: say what its highest moment was made of."""
        reading = self.peaks.readings.get("init")
        if reading is not None:
            for category in CATEGORIES:
                reading.by_category[category] = sum(n for known, n in self.peaks.birth if known.category == category)
        self.peaks.birth = []

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """What is allocated inside is the transport's."""
        self.scope.communicating += 1
        try:
            yield
        finally:
            self.scope.communicating -= 1

    def _see(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.is_meta:
                    continue
                storage = value.untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None:
                    self._add(storage)
                else:
                    self._resize(known, storage.nbytes())
            elif isinstance(value, (list, tuple)):
                self._see(value)

    def _add(self, storage: torch.UntypedStorage) -> _Storage | None:
        key = storage._cdata
        if storage in self._elsewhere:
            return None
        category = self.scope.category()
        known = _Storage(None, storage.nbytes(), category)
        storages = self._storages

        def freed(_: Any) -> None:
            gone = storages.pop(key, None)
            if gone is not None:
                self.total -= gone.nbytes
                self.by_category[gone.category] -= gone.nbytes

        known.reference = weakref.ref(storage, freed)
        storages[key] = known
        self.total += known.nbytes
        self.by_category[category] += known.nbytes
        return known

    def _resize(self, known: _Storage, nbytes: int) -> None:
        if nbytes != known.nbytes:
            self.total += nbytes - known.nbytes
            self.by_category[known.category] += nbytes - known.nbytes
            known.nbytes = nbytes
