"""Tensors on disk: one preallocated file, read and written by a few threads past the page cache.

Python's ``preadv`` and ``pwritev`` release the interpreter's lock, so a thread's reads overlap with computing. Direct I/O
needs sectors: offsets, sizes and addresses are multiples of ``SECTOR``, which ``AlignedBuffer`` provides.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardledger.errors import DoesNotFitError, EngineStateError

SECTOR = 4096
"""Bytes."""

_CHUNK = 4 << 20
"""Bytes of one read or write: large enough for the disk's full speed, small enough to occupy all threads."""

_THREADS = 4


@dataclass
class TierTraffic:
    """What went between host memory and another tier: bytes, and seconds in which training waited for it."""

    read_bytes: int = 0
    written_bytes: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    """Seconds of all threads together in reads and writes."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def to_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return {
            "read_bytes": float(self.read_bytes),
            "written_bytes": float(self.written_bytes),
            "wait_s": self.wait_s,
            "busy_s": self.busy_s,
        }


class AlignedBuffer:
    """Page-aligned host memory: ``tensor`` is 1-D uint8 over it."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(SECTOR, -(-nbytes // SECTOR) * SECTOR))
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)


class Transfer:
    """Reads or writes under way. ``wait`` finishes them; their buffer belongs to them until then."""

    def __init__(self, futures: list[Future[None]], traffic: TierTraffic, what: str) -> None:
        self._futures = futures
        self._traffic = traffic
        self._what = what

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Block until all bytes have moved.

        Raises:
            EngineStateError: the disk failed; says which file and place.
        """
        begin = time.perf_counter()
        futures, self._futures = self._futures, []
        try:
            for future in futures:
                future.result()
        except OSError as error:
            raise EngineStateError(
                f"{self._what}: {error.strerror or error}. The offloaded state is lost; resume from the last checkpoint "
                f"on a disk that works."
            ) from error
        finally:
            self._traffic.wait_s += time.perf_counter() - begin


class DiskFile:
    """One file of fixed size. The folder must exist; the file is made, with all its bytes reserved."""

    def __init__(self, path: Path, nbytes: int, traffic: TierTraffic) -> None:
        self.path = path
        self.nbytes = -(-nbytes // SECTOR) * SECTOR
        self.direct = True
        """Whether the file system takes direct I/O; elsewhere bytes pass through its cache."""
        self._traffic = traffic
        self._file = self._open()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardledger-disk")
        self._end = weakref.finalize(self, _shut, self._file, path, self._pool)  # also without close

    def read(self, offset: int, buffer: AlignedBuffer, start: int, nbytes: int) -> Transfer:
        """Start reading ``nbytes`` at ``offset`` to ``buffer[start:]``."""
        self._traffic.read_bytes += nbytes
        return self._start(os.preadv, "read", offset, buffer.view[start : start + nbytes])

    def write(self, offset: int, buffer: AlignedBuffer, start: int, nbytes: int) -> Transfer:
        """Start writing ``buffer[start : start + nbytes]`` at ``offset``."""
        self._traffic.written_bytes += nbytes
        return self._start(os.pwritev, "write", offset, buffer.view[start : start + nbytes])

    def close(self) -> None:
        """Wait for what is under way, close and remove the file."""
        self._end()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            file = os.open(self.path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.path.unlink(missing_ok=True)  # made before its flag was refused
            file = os.open(self.path, flags, 0o600)
            self.direct = False
        try:
            if self.nbytes:
                os.posix_fallocate(file, 0, self.nbytes)
        except OSError as error:
            os.close(file)
            self.path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise full(self.path.parent, self.nbytes, free_bytes(self.path.parent)) from error
        return file

    def _start(self, call: Callable[..., int], verb: str, offset: int, view: memoryview) -> Transfer:
        futures = [
            self._pool.submit(self._move, call, offset + first, view[first : first + _CHUNK])
            for first in range(0, len(view), _CHUNK)
        ]
        return Transfer(futures, self._traffic, f"cannot {verb} {self.path} at byte {offset}")

    def _move(self, call: Callable[..., int], offset: int, view: memoryview) -> None:
        begin = time.perf_counter()
        done = 0
        while done < len(view):
            moved = call(self._file, [view[done:]], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, f"the file ended at byte {offset + done}; was it cut short from outside?")
            done += moved
        with self._traffic.lock:
            self._traffic.busy_s += time.perf_counter() - begin


def _shut(file: int, path: Path, pool: ThreadPoolExecutor) -> None:
    pool.shutdown(wait=True)
    os.close(file)
    path.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write below ``folder``."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def full(folder: Path, wanted: int, free: int) -> DoesNotFitError:
    """The error for a disk that is too small."""
    left = sorted(str(entry.name) for entry in folder.parent.glob("shardledger-*") if entry != folder)
    hint = f" Folders of other runs lie there, maybe of runs that were killed: {', '.join(left[:4])}." if left else ""
    return DoesNotFitError(
        f"offload to {folder.parent}: {wanted:,} bytes are wanted there and {free:,} are free.{hint} Free some, or name "
        f"another folder in nvme_path."
    )
