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
from shardledger.checkpoint.stream import memory_of, parts_of
from shardledger.layout.flat import Interval
from shardledger.layout.portion import Portion

_WRITERS = 4
"""Threads that write a file each: enough to keep the disk busy while some copy and check."""


class RankWriter:
    """Writes files below a draft, a few at once."""

    def __init__(self, files: Files, draft: Path, rank: int) -> None:
        self._files = files
        self._draft = draft
        self._rank = rank
        self._records: list[_Written] = []
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="shardledger-write")

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
            records = [
                FileRecord(name=item.name, bytes=item.bytes, crc32=item.written.result(), entries=item.entries)
                for item in self._records
            ]
            # Only now: the first fsync brings the file system's notes on all of these files to the disk at once, and no
            # write had to wait for that.
            settled = [self._writers.submit(self._files.settle, self._draft / record.name) for record in records]
            for future in settled:
                future.result()
            self._files.sync_folder(self._folder)
        finally:
            self.cancel()
        return records

    def cancel(self) -> None:
        """End the threads; after an error, what they have not begun is dropped."""
        self._writers.shutdown(cancel_futures=True)

    @property
    def _folder(self) -> Path:
        return (self._draft / tensor_file_name(self._rank, 0)).parent

    def _tensors(self, name: str, items: list[tuple[Portion, torch.Tensor]], *, entries: bool = True) -> None:
        records = [_entry(portion, tensor) for portion, tensor in items]
        tensors = {record.key: tensor for record, (_, tensor) in zip(records, items, strict=True)}
        self._write(name, tuple(records) if entries else (), parts_of(tensors))

    def _write(self, name: str, entries: tuple[Entry, ...], parts: list[memoryview]) -> None:
        """Begin to write a file, as soon as not too many are under way."""
        if len(self._records) >= _WRITERS:
            # Tensors that came from a device are freed when they are written, and an error ends the save now.
            self._records[-_WRITERS].written.result()
        written = self._writers.submit(self._files.write_parts, self._draft / name, parts)
        self._records.append(_Written(name, entries, sum(map(len, parts)), written))


@dataclass(frozen=True)
class _Written:
    """A file on its way."""

    name: str
    entries: tuple[Entry, ...]
    bytes: int
    written: Future[str]


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
