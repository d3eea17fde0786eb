"""Tensors on disk: one preallocated file, read and written by a few threads past the page cache.

A file loses its name as soon as it is open: the system frees it with the process, however that ends.

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

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""How a file system says that it has no direct I/O."""


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

    def __init__(self, futures: list[Future[None]], file: DiskFile, what: str) -> None:
        self._futures = futures
        self._file = file
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
            raise self._file.fail(f"{self._what}: {error.strerror or error}") from error
        finally:
            self._file.traffic.wait_s += time.perf_counter() - begin


class DiskFile:
    """One file of fixed size without a name. The folder must exist; the file is made, with all its bytes reserved."""

    def __init__(self, path: Path, nbytes: int, traffic: TierTraffic) -> None:
        self.path = path
        self.nbytes = -(-nbytes // SECTOR) * SECTOR
        self.direct = True
        """Whether the file system takes direct I/O; elsewhere bytes pass through its cache."""
        self.failure: str | None = None
        """The first read or write that failed. What rests in the file can no longer be trusted: nothing is read after it."""
        self.traffic = traffic
        self._file = self._open()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardledger-disk")
        self._end = weakref.finalize(self, _shut, self._file, self._pool, os.getpid())  # also without close

    def read(self, offset: int, buffer: AlignedBuffer, start: int, nbytes: int) -> Transfer:
        """Start reading ``nbytes`` at ``offset`` to ``buffer[start:]``."""
        self.traffic.read_bytes += nbytes
        return self._start(os.preadv, "read", offset, buffer.view[start : start + nbytes])

    def write(self, offset: int, buffer: AlignedBuffer, start: int, nbytes: int) -> Transfer:
        """Start writing ``buffer[start : start + nbytes]`` at ``offset``."""
        self.traffic.written_bytes += nbytes
        return self._start(os.pwritev, "write", offset, buffer.view[start : start + nbytes])

    def close(self) -> None:
        """Wait for what is under way, and give the bytes back to the disk."""
        self._end()

    def check(self) -> None:
        """Raise ``EngineStateError`` if a read or write has failed before."""
        if self.failure is not None:
            raise EngineStateError(self.failure)

    def fail(self, what: str) -> EngineStateError:
        """Note that a read or write has failed; the error to raise."""
        lost = f"{what}. The offloaded state is lost; resume from the last checkpoint on a disk that works."
        self.failure = self.failure or lost
        return EngineStateError(lost)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        file = os.open(self.path, flags, 0o600)
        try:
            if self.nbytes:
                _reserve(file, self.nbytes)
            direct = self._past_the_cache(file)
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise full(self.path.parent, self.nbytes, free_bytes(self.path.parent)) from error
        finally:
            self.path.unlink(missing_ok=True)
        if direct is None:
            self.direct = False
            return file
        os.close(file)
        return direct

    def _past_the_cache(self, file: int) -> int | None:
        """The same file opened for direct I/O; None where the file system refuses to open or to write so."""
        try:
            direct = os.open(self.path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return None
        try:
            os.fsync(file)  # what the reservation left in the cache must not come over what is written past it
            if self.nbytes:
                os.pwritev(direct, [AlignedBuffer(SECTOR).view], 0)
        except OSError as error:
            os.close(direct)
            if error.errno not in _REFUSALS:
                raise
            return None
        return direct

    def _start(self, call: Callable[..., int], verb: str, offset: int, view: memoryview) -> Transfer:
        self.check()
        futures = [
            self._pool.submit(self._move, call, offset + first, view[first : first + _CHUNK])
            for first in range(0, len(view), _CHUNK)
        ]
        return Transfer(futures, self, f"cannot {verb} {self.path} at byte {offset}")

    def _move(self, call: Callable[..., int], offset: int, view: memoryview) -> None:
        begin = time.perf_counter()
        done = 0
        while done < len(view):
            moved = call(self._file, [view[done:]], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, f"the file ended at byte {offset + done}; was it cut short from outside?")
            done += moved
        with self.traffic.lock:
            self.traffic.busy_s += time.perf_counter() - begin


def _reserve(file: int, nbytes: int) -> None:
    """Take the bytes from the disk now. ``file`` is not open for direct I/O: the C library may write single bytes."""
    try:
        os.posix_fallocate(file, 0, nbytes)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _REFUSALS:
            raise
        zeros = bytes(_CHUNK)
        done = 0
        while done < nbytes:
            done += os.pwrite(file, zeros[: nbytes - done], done)


def _shut(file: int, pool: ThreadPoolExecutor, owner: int) -> None:
    pool.shutdown(wait=os.getpid() == owner)  # a forked child has none of the threads
    os.close(file)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write below ``folder``."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def full(folder: Path, wanted: int, free: int) -> DoesNotFitError:
    """The error for a disk that is too small."""
    left = sorted(str(entry.name) for entry in folder.parent.glob("shardledger-*") if entry != folder)
    hint = f" Engines and ranks that keep files there (lsof +L1 shows them): {', '.join(left[:4])}." if left else ""
    return DoesNotFitError(
        f"offload to {folder.parent}: {wanted:,} bytes are wanted there and {free:,} are free.{hint} Free some, or name "
        f"another folder in nvme_path."
    )
