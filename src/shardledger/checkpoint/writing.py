"""One rank's files of a checkpoint: tensors unit by unit, so that never more than one unit is held twice."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from shardledger.checkpoint.files import Files
from shardledger.checkpoint.manifest import BUFFER, Entry, FileRecord, entry_key, tensor_file_name
from shardledger.checkpoint.port import Held
from shardledger.layout.flat import Interval
from shardledger.layout.portion import Portion


class RankWriter:
    """Writes files below a draft. While one is written, the one before is hashed and brought to the disk."""

    def __init__(self, files: Files, draft: Path, rank: int) -> None:
        self._files = files
        self._draft = draft
        self._rank = rank
        self._records: list[tuple[str, tuple[Entry, ...], Future[tuple[int, str]]]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardledger-checkpoint")

    def open(self) -> None:
        """Make this rank's folder."""
        self._files.make_folder(self._folder)

    def unit(self, index: int, held: Iterable[Held]) -> None:
        """Write one unit; nothing when this rank holds none of it."""
        items = [(portion, on_disk(tensor, portion.scalar)) for portion, tensor in held]
        if items:
            self._tensors(tensor_file_name(self._rank, index), items)

    def buffers(self, buffers: Mapping[str, torch.Tensor], *, shared: bool) -> None:
        """Write buffers: those of all ranks (``shared``), or what this rank's alone are."""
        items = [
            (Portion(name, BUFFER, Interval(0, tensor.numel())), on_disk(tensor.reshape(-1), False))
            for name, tensor in buffers.items()
        ]
        if items:
            self._tensors(buffer_file_name(self._rank), items, entries=shared)

    def content(self, name: str, content: bytes) -> None:
        """Write a file as it is."""
        self._files.write(self._draft / name, content)
        self._settle(name, ())

    def close(self) -> list[FileRecord]:
        """Wait until everything is on the disk; returns what was written."""
        try:
            records = []
            for name, entries, future in self._records:
                size, digest = future.result()
                records.append(FileRecord(name=name, bytes=size, sha256=digest, entries=entries))
            self._files.sync_folder(self._folder)
        finally:
            self._pool.shutdown(cancel_futures=True)
        return records

    def cancel(self) -> None:
        """Stop after an error."""
        self._pool.shutdown(cancel_futures=True)

    @property
    def _folder(self) -> Path:
        return (self._draft / tensor_file_name(self._rank, 0)).parent

    def _tensors(self, name: str, items: list[tuple[Portion, torch.Tensor]], *, entries: bool = True) -> None:
        records = [_entry(portion, tensor) for portion, tensor in items]
        tensors = {record.key: tensor for record, (_, tensor) in zip(records, items, strict=True)}
        self._files.write_tensors(self._draft / name, tensors)
        self._settle(name, tuple(records) if entries else ())

    def _settle(self, name: str, entries: tuple[Entry, ...]) -> None:
        for _, _, future in self._records:
            if future.done():
                future.result()  # an error of the disk ends the save now, not after gigabytes more
        self._records.append((name, entries, self._pool.submit(self._files.settle, self._draft / name)))


def on_disk(tensor: torch.Tensor, scalar: bool) -> torch.Tensor:
    """A tensor as it is stored: on the CPU, complex numbers as pairs. Memory is shared where it can be."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.to("cpu").contiguous()
    # Optimizers may keep one step count for all parameters; safetensors refuses tensors that share memory.
    return tensor.clone() if scalar else tensor


def buffer_file_name(rank: int) -> str:
    """Name of the file with a rank's buffers."""
    return f"rank-{rank:05d}/buffers.safetensors"


def checksum(tensor: torch.Tensor) -> int:
    """A number that tells whether two ranks have the same buffer."""
    stored = on_disk(tensor.reshape(-1), False).reshape(-1)
    return zlib.crc32(stored.view(torch.uint8).numpy().tobytes()) if stored.numel() else 0


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
