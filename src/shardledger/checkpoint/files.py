"""The few things a checkpoint does with a file system. A test replaces them by ones that fail.

Every method that writes, but ``write_parts``, returns when the bytes are on the disk, not only in the system's cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardledger.checkpoint.stream import crc32_of_file, naming, write_parts

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LOCKS: set[int] = set()


def _leave_locks() -> None:
    # A loader's worker may outlive a killed rank for seconds, and would hold the lock for as long.
    while _LOCKS:
        os.close(_LOCKS.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


class Files:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents; it may exist."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        """Write a whole file and bring it to the disk."""
        with path.open("wb") as file, naming(path):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def write_parts(self, path: Path, parts: Sequence[memoryview]) -> None:
        """Write a file from the parts it is made of; it reaches the disk with ``settle``."""
        write_parts(path, parts)

    def settle(self, path: Path) -> None:
        """Bring a file to the disk."""
        with path.open("rb") as file, naming(path):
            os.fsync(file.fileno())

    def check(self, path: Path) -> tuple[int, str]:
        """Size in bytes and CRC-32 of a file."""
        return crc32_of_file(path)

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
        with contextlib.suppress(FileNotFoundError):  # another engine that saves here has removed it too
            shutil.rmtree(path)

    def lock(self, path: Path) -> int:
        """Mark a folder as in use, until ``unlock`` or the end of this process; a number for ``unlock``.

        Raises:
            BlockingIOError: it is in use.
        """
        if fcntl is None:
            return -1
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:  # some network file systems cannot: then nothing tells two runs apart
            os.close(handle)
            return -1
        _LOCKS.add(handle)
        return handle

    def unlock(self, handle: int) -> None:
        """End what ``lock`` began."""
        if handle >= 0 and fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)
            _LOCKS.discard(handle)
            os.close(handle)

    def in_use(self, path: Path) -> bool:
        """Whether somebody holds a folder's ``lock``."""
        try:
            self.unlock(self.lock(path))
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False
