"""Whole tensors out of a checkpoint's pieces, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardledger.checkpoint.manifest import BUFFER, BufferRecord, Entry, Manifest, ParameterRecord
from shardledger.checkpoint.reader import CheckpointReader
from shardledger.checkpoint.tools.find import Stored
from shardledger.errors import CheckpointError
from shardledger.layout.flat import Interval

_RUN = 1 << 21
"""Elements read at once."""


class StoredTensors:
    """Reads tensors of one checkpoint by what they are: ``(parameter or buffer, role)``."""

    def __init__(self, stored: Stored) -> None:
        self.manifest: Manifest = stored.manifest
        self._folder = stored.folder
        self._reader = CheckpointReader(stored.folder, stored.manifest)
        self._records: dict[str, ParameterRecord | BufferRecord] = {
            record.name: record for record in (*self.manifest.parameters, *self.manifest.buffers)
        }
        self._roles: dict[str, dict[str, Entry]] = {}
        for _, entry in stored.manifest.entries():
            self._roles.setdefault(entry.of, {}).setdefault(entry.role, entry)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Everything stored, values before optimizer states, in the model's order."""
        for name, record in self._records.items():
            value = getattr(record, "value_role", BUFFER)
            roles = self._roles.get(name, {})
            yield from ((name, role) for role in sorted(roles, key=lambda role: (role != value, role)))

    def has(self, name: str, role: str) -> bool:
        """Whether anything is stored of this role."""
        return role in self._roles.get(name, {})

    def value_role(self, name: str) -> str:
        """The role that holds the value of a parameter or buffer."""
        return getattr(self._records[name], "value_role", BUFFER)

    def read(self, name: str, role: str) -> torch.Tensor:
        """The whole tensor, in its parameter's shape (a scalar state in its own), on the CPU.

        Raises:
            CheckpointError: it is not stored, not whole, or a file is damaged.
        """
        record = self._records[name]
        entry = self._roles.get(name, {}).get(role)
        if entry is None:
            if record.numel:
                raise CheckpointError(f"{self._folder} holds no {role} of {name!r}.")
            return torch.empty(record.shape, dtype=dtype_named(record.dtype))
        if entry.scalar:
            return self._reader.scalar(name, role)
        whole = torch.empty(record.numel, dtype=dtype_named(entry.dtype))
        for start in range(0, record.numel, _RUN):
            stop = min(start + _RUN, record.numel)
            self._reader.read_of(name, role, Interval(start, stop), whole[start:stop])
            if stop - start == _RUN:
                self._reader.close()  # pages of a mapped file count as this process's memory for as long as it is open
        return whole.view(record.shape)


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        CheckpointError: this PyTorch has none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"this PyTorch has no dtype {name!r}, which the checkpoint holds; update it.")
    return found
