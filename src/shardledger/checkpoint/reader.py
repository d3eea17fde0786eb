"""Reads elements of a checkpoint's parameters, wherever they lie: only what is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardledger.checkpoint.manifest import GRADIENT, VALUES, Entry, FileRecord, Manifest
from shardledger.errors import CheckpointError
from shardledger.layout.flat import Interval

_OPEN_FILES = 8


class CheckpointReader:
    """A ``StateSource`` over the files of one checkpoint. Use as a context; it keeps a few files open."""

    def __init__(self, folder: Path, manifest: Manifest, names: Mapping[str, str] | None = None) -> None:
        """``names``: under which name each of the model's parameters was saved; absent: they have not changed."""
        self.manifest = manifest
        self.elements_read = 0
        self._folder = folder
        self._names = {p.name: p.name for p in manifest.parameters} if names is None else names
        self._records = {p.name: p for p in manifest.parameters}
        self._numbers = manifest.optimizer.values if manifest.optimizer is not None else {}
        self._pieces: dict[tuple[str, str], list[tuple[int, FileRecord, Entry]]] = {}
        self._open: OrderedDict[str, Any] = OrderedDict()
        for file, entry in manifest.entries():
            self._pieces.setdefault((entry.of, entry.role), []).append((entry.start, file, entry))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        self._open.clear()

    def has(self, name: str) -> bool:
        """Whether there is a value of this parameter."""
        return name in self._names

    def read(self, name: str, elements: Interval, out: torch.Tensor) -> None:
        """Copy these elements of the parameter's value into ``out`` (1-D), cast to its dtype.

        Raises:
            CheckpointError: they are in no file, or a file is damaged.
        """
        record = self._records[self._names[name]]
        self.read_of(record.name, record.value_role, elements, out)

    def trained(self, name: str) -> bool:
        """Whether optimizer states were kept for the parameter, if only none yet."""
        return name in self._names and self._records[self._names[name]].trainable

    def states(self, name: str) -> dict[str, tuple[str, bool]]:
        """Optimizer states of the parameter: by name, the dtype and whether it is a scalar."""
        saved = self._names[name]
        return {
            role: (pieces[0][2].dtype, pieces[0][2].scalar)
            for (of, role), pieces in self._pieces.items()
            if of == saved and role not in VALUES and not role.startswith(GRADIENT)
        }

    def gradients(self, name: str) -> dict[str, str]:
        """Gradients of an unfinished accumulation window: by role, the dtype."""
        saved = self._names.get(name)
        return {
            role: pieces[0][2].dtype
            for (of, role), pieces in self._pieces.items()
            if of == saved and role.startswith(GRADIENT)
        }

    def read_state(self, name: str, state: str, elements: Interval, out: torch.Tensor) -> None:
        """Copy these elements of a state into ``out`` (1-D). Raises CheckpointError as ``read`` does."""
        self.read_of(self._names[name], state, elements, out)

    def scalar(self, name: str, state: str) -> torch.Tensor:
        """A state that is not one number per element. Raises CheckpointError as ``read`` does."""
        _, file, entry = self._pieces[self._names[name], state][0]
        return _from_disk(self._call(file, entry, lambda handle: handle.get_tensor(entry.key)), entry).clone()

    def numbers(self, name: str) -> Mapping[str, Any]:
        """States that are plain numbers."""
        return self._numbers.get(self._names[name], {})

    def read_of(self, saved: str, role: str, elements: Interval, out: torch.Tensor) -> None:
        """Copy elements of any role, by its name in the checkpoint. Raises CheckpointError as ``read`` does."""
        pieces = self._pieces.get((saved, role), [])
        at = elements.start
        first = max(0, bisect_right(pieces, elements.start, key=lambda piece: piece[0]) - 1)
        for _, file, entry in pieces[first:]:
            if entry.start > at or at >= elements.stop:
                break
            stop = min(entry.stop, elements.stop)
            if stop <= at:
                continue
            part = self._slice(file, entry, Interval(at - entry.start, stop - entry.start))
            out[at - elements.start : stop - elements.start].copy_(part)
            self.elements_read += stop - at
            at = stop
        if at < elements.stop:
            raise CheckpointError(
                f"{self._folder}: elements {at} to {elements.stop} of {role} of {saved!r} are in no file."
            )

    def _slice(self, file: FileRecord, entry: Entry, rows: Interval) -> torch.Tensor:
        part = self._call(file, entry, lambda handle: handle.get_slice(entry.key)[rows.start : rows.stop])
        if part.shape[0] != rows.numel:
            raise CheckpointError(f"{self._folder / file.name} is damaged: {entry.key!r} is too short.")
        return _from_disk(part, entry)

    def _call(self, file: FileRecord, entry: Entry, action: Any) -> torch.Tensor:
        try:
            result: torch.Tensor = action(self._handle(file))
            return result
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self._folder / file.name} cannot be read ({entry.key!r}: {error}). The checkpoint is damaged: use "
                f"another one."
            ) from error

    def _handle(self, file: FileRecord) -> Any:
        handle = self._open.pop(file.name, None)
        if handle is None:
            handle = safe_open(self._folder / file.name, framework="pt", device="cpu")
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)
        self._open[file.name] = handle
        return handle


def _from_disk(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    return torch.view_as_complex(tensor) if entry.dtype.startswith("complex") else tensor
