"""The few things a checkpoint does with a file system. A test replaces them by ones that fail.

Every method that writes returns when the bytes are on the disk, not only in the system's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

_CHUNK_BYTES = 1 << 20


class Files:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents; it may exist."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        """Write a whole file and bring it to the disk."""
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a safetensors file; it reaches the disk with ``settle``."""
        save_file(dict(tensors), path)

    def settle(self, path: Path) -> tuple[int, str]:
        """Bring a file to the disk; returns its size in bytes and its sha256."""
        size, digest = self.digest(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return size, digest

    def digest(self, path: Path) -> tuple[int, str]:
        """Size in bytes and sha256 of a file, in O(1) memory."""
        digest, size = hashlib.sha256(), 0
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
        return size, digest.hexdigest()

    def sync_folder(self, path: Path) -> None:
        """Bring a folder's list of names to the disk."""
        if os.name == "nt":  # folders cannot be opened there
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name in one step, replacing a file of that name."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove a folder and everything in it."""
        shutil.rmtree(path)
