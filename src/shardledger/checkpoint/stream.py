"""Writing safetensors files: straight from the tensors' memory, or one tensor at a time as each is made.

``safetensors`` itself wants all tensors of a file in memory and copies them. The format is small enough to write in order:
eight bytes with the length of the header, the header as JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from shardledger.errors import CheckpointError

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""The format's names of dtypes."""

_CHUNK_BYTES = 1 << 20
"""Written by one call: what was just checked or copied is still in the processor's cache."""
_EARLY_BYTES = 1 << 23
"""After so many bytes the disk is told to begin."""


@dataclass(frozen=True)
class Promise:
    """A tensor that will be written: what the header says of it, and where it comes from."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]
    """Called once, when its turn comes."""

    @property
    def bytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, promises: Sequence[Promise], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write a file and bring it to the disk; returns its size in bytes and its CRC-32 (see ``crc32_of``).

    Memory: one tensor.

    Raises:
        CheckpointError: a tensor is not what was promised, or of a dtype that the format does not have.
    """
    header = _header([(promise.key, promise.shape, promise.dtype) for promise in promises], metadata)
    with (
        path.open("xb", buffering=0) as file,
        naming(path),
    ):  # never into a file that somebody, perhaps a promise, has mapped
        out = _Out(file)
        check = out.write(header, 0)
        for promise in promises:
            tensor = promise.make()
            if tensor.dtype != promise.dtype or tuple(tensor.shape) != promise.shape:
                raise CheckpointError(
                    f"{promise.key!r} should be {promise.dtype} {list(promise.shape)}, it is {tensor.dtype} "
                    f"{list(tensor.shape)}."
                )
            check = out.write(memory_of(tensor), check)
            del tensor
        os.fsync(file.fileno())
        return file.tell(), _text(check)


def parts_of(tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """The bytes of a safetensors file, without a copy of the tensors: they must not change until it is written.

    Raises:
        CheckpointError: a tensor is of a dtype that the format does not have.
    """
    header = _header([(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()])
    return [memoryview(header), *(memory_of(tensor) for tensor in tensors.values())]


def write_parts(path: Path, parts: Iterable[memoryview]) -> None:
    """Write a file; the disk has begun with all of it when this returns, and has not ended."""
    with path.open("wb", buffering=0) as file, naming(path):
        out = _Out(file)
        for part in parts:
            out.write(part)
        out.begin()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system say which file they are about; those of an open one do not by themselves."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def crc32_of(parts: Iterable[bytes | memoryview]) -> str:
    """CRC-32 of bytes, as eight hexadecimal digits: what ZIP files, PNG and Ethernet use."""
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    return _text(check)


def crc32_of_file(path: Path) -> tuple[int, str]:
    """Size in bytes and CRC-32 of a file, in one MiB of memory."""
    check, size = 0, 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            check = zlib.crc32(buffer[:count], check)
            size += count
    return size, _text(check)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's own memory as bytes; of a copy where it is not contiguous. NumPy is not needed."""
    flat = tensor.detach().contiguous()
    if not flat.numel():
        return memoryview(b"")
    block = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    block.owner = flat  # type: ignore[attr-defined]  # an address alone would not keep the memory
    return memoryview(block).cast("B")


def _header(
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], metadata: Mapping[str, str] | None = None
) -> bytes:
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian; this machine is not.")
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, shape, dtype in tensors:
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{key!r} has dtype {dtype}, which safetensors files do not have.")
        stop = offset + prod(shape) * dtype.itemsize
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers start at a multiple of eight
    return len(text).to_bytes(8, "little") + text


@dataclass
class _Out:
    """A file that reaches the disk while it is written: what waits for the end waits for the whole of it."""

    file: BinaryIO
    begun: int = field(default=0)
    at: int = field(default=0)

    def write(self, content: bytes | memoryview, check: int | None = None) -> int:
        """Write all of ``content``; goes on with the CRC-32 ``check`` where there is one, and returns it."""
        rest = memoryview(content)
        while rest:
            part = rest[:_CHUNK_BYTES]
            if check is not None:
                check = zlib.crc32(part, check)
            written = 0
            while written < len(part):  # a nearly full disk takes less than it is given
                written += self.file.write(part[written:])
            rest = rest[len(part) :]
            self.at += len(part)
            if self.at - self.begun >= _EARLY_BYTES:
                self.begin()
        return check or 0

    def begin(self) -> None:
        """Let the disk begin with what has been written since the last time."""
        # Advice that pages are not needed makes Linux write them out, at once and in the background.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), self.begun, self.at - self.begun, os.POSIX_FADV_DONTNEED)
        self.begun = self.at


def _text(check: int) -> str:
    return f"{check:08x}"
