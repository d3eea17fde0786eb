"""Writing a safetensors file one tensor at a time.

``safetensors`` itself wants all tensors of a file in memory. The format is small enough to write in order: eight bytes with
the length of the header, the header as JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

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
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The format's names of dtypes."""


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
    path: Path, promises: Sequence[Promise], metadata: Mapping[str, str] | None = None, *, hashed: bool = False
) -> tuple[int, str]:
    """Write a file and bring it to the disk; returns its size in bytes and its sha256 ("" unless ``hashed``).

    Memory: one tensor.

    Raises:
        CheckpointError: a tensor is not what was promised, or of a dtype that the format does not have.
    """
    if sys.byteorder != "little":
        raise CheckpointError("safetensors files are little-endian; this machine is not.")
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for promise in promises:
        if promise.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{promise.key!r} has dtype {promise.dtype}, which safetensors files do not have.")
        header[promise.key] = {
            "dtype": DTYPE_NAMES[promise.dtype],
            "shape": list(promise.shape),
            "data_offsets": [offset, offset + promise.bytes],
        }
        offset += promise.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers start at a multiple of eight
    with path.open("xb") as file:  # never into a file that somebody, perhaps a promise, has mapped
        out = _Out(file, hashlib.sha256() if hashed else None)
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for promise in promises:
            tensor = promise.make()
            if tensor.dtype != promise.dtype or tuple(tensor.shape) != promise.shape:
                raise CheckpointError(
                    f"{promise.key!r} should be {promise.dtype} {list(promise.shape)}, it is {tensor.dtype} "
                    f"{list(tensor.shape)}."
                )
            out.write_tensor(tensor)
            del tensor
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), out.digest.hexdigest() if out.digest is not None else ""


@dataclass(frozen=True)
class _Out:
    """A file, and the checksum of what went into it."""

    file: BinaryIO
    digest: Any

    def write(self, content: bytes | memoryview) -> None:
        self.file.write(content)
        if self.digest is not None:
            self.digest.update(content)

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """Write the tensor's own memory, so that nothing is copied and NumPy is not needed."""
        flat = tensor.detach().contiguous()
        if flat.numel():
            self.write(memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B"))
