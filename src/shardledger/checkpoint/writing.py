"""One rank's files of a checkpoint: tensors unit by unit, so that never more than one unit is held twice."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from shardledger.checkpoint.files import Files
from shardledger.checkpoint.manifest import BUFFER, Entry, FileRecord, entry_key, tensor_file_name
from shardledger.checkpoint.port import Held
from shardledger.checkpoint.shared_folder import await_draft
from shardledger.checkpoint.stream import crc32_of, memory_of, parts_of
from shardledger.layout.flat import Interval
from shardledger.layout.portion import Portion

_CHECKERS = 2
"""Threads that compute checksums: together they keep up with the writing."""
_SETTLERS = 2
"""Threads that wait for the disk. While one is told that a file is whole, the disk works on that of the other."""


class RankWriter:
    """Writes files below a draft. While one is written, those before it are checked and brought to the disk."""

    def __init__(self, files: Files, draft: Path, rank: int) -> None:
        self._files = files
        self._draft = draft
        self._rank = rank
        self._records: list[_Written] = []
        self._checkers = ThreadPoolExecutor(_CHECKERS, thread_name_prefix="shardledger-check")
        self._settler = ThreadPoolExecutor(_SETTLERS, thread_name_prefix="shardledger-fsync")

    def open(self) -> None:
        """Make this rank's folder.

        Raises:
            CheckpointError: rank 0's draft is not seen here.
        """
        if self._rank:
            await_draft(self._draft, self._rank)
        self._files.make_folder(self._folder)

    def unit(self, index: int, held: Iterable[Held]) -> None:
        """Write one unit; nothing when this rank holds none of it."""
        items = [(portion, on_disk(tensor)) for portion, tensor in held]
        if items:
            self._tensors(tensor_file_name(self._rank, index), items)

    def buffers(self, buffers: Mapping[str, torch.Tensor], *, shared: bool) -> None:
        """Write buffers: those of all ranks (``shared``), or what this rank's alone are."""
        items = [
            (Portion(name, BUFFER, Interval(0, tensor.numel())), on_disk(tensor.reshape(-1)))
            for name, tensor in buffers.items()
        ]
        if items:
            self._tensors(buffer_file_name(self._rank), items, entries=shared)

    def content(self, name: str, content: bytes) -> None:
        """Write a file as it is."""
        self._write(name, (), [memoryview(content)])

    def close(self) -> list[FileRecord]:
        """Wait until everything is on the disk; returns what was written."""
        try:
            records = []
            for item in self._records:
                item.settled.result()
                records.append(
                    FileRecord(name=item.name, bytes=item.bytes, crc32=item.check.result(), entries=item.entries)
                )
            self._files.sync_folder(self._folder)
        finally:
            self.cancel()
        return records

    def cancel(self) -> None:
        """End the threads; after an error, what they have not begun is dropped."""
        self._checkers.shutdown(cancel_futures=True)
        self._settler.shutdown(cancel_futures=True)

    @property
    def _folder(self) -> Path:
        return (self._draft / tensor_file_name(self._rank, 0)).parent

    def _tensors(self, name: str, items: list[tuple[Portion, torch.Tensor]], *, entries: bool = True) -> None:
        records = [_entry(portion, tensor) for portion, tensor in items]
        tensors = {record.key: tensor for record, (_, tensor) in zip(records, items, strict=True)}
        self._write(name, tuple(records) if entries else (), parts_of(tensors))

    def _write(self, name: str, entries: tuple[Entry, ...], parts: list[memoryview]) -> None:
        """Write a file while its checksum is computed, and have it brought to the disk."""
        for item in self._records[:-_CHECKERS]:
            item.check.result()  # tensors that came from a device are freed when they have been checked
        for item in self._records:
            if item.settled.done():
                item.settled.result()  # an error of the disk ends the save now, not after gigabytes more
        path = self._draft / name
        check = self._checkers.submit(crc32_of, parts)
        self._files.write_parts(path, parts)
        settled = self._settler.submit(self._files.settle, path)
        self._records.append(_Written(name, entries, sum(map(len, parts)), check, settled))


@dataclass(frozen=True)
class _Written:
    """A file on its way."""

    name: str
    entries: tuple[Entry, ...]
    bytes: int
    check: Future[str]
    settled: Future[None]


def on_disk(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is stored: on the CPU, complex numbers as pairs. Memory is shared where it can be."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to("cpu").contiguous()


def buffer_file_name(rank: int) -> str:
    """Name of the file with a rank's buffers."""
    return f"rank-{rank:05d}/buffers.safetensors"


def checksum(tensor: torch.Tensor) -> int:
    """A number that tells whether two ranks have the same buffer."""
    stored = on_disk(tensor.reshape(-1)).reshape(-1)
    return zlib.crc32(memory_of(stored))


def _entry(portion: Portion, tensor: torch.Tensor) -> Entry:
    pairs = tensor.dim() == 2 and not portion.scalar
    dtype = {torch.float32: "complex64", torch.float64: "complex128"}[tensor.dtype] if pairs else _name(tensor.dtype)
    return Entry(
        key=entry_key(portion.name, portion.role, portion.elements.start),
        of=portion.name,
        role=portion.role,
        dtype=dtype,
        start=portion.elements.start,
        stop=portion.elements.stop,
        scalar=portion.scalar,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
