"""Files of any length, written past the system's cache: at the disk's speed, for the price of one copy in memory.

A write through the cache copies too, into pages that the system has to find first, and it is the disk's turn only later.
Here a piece is copied to an aligned buffer, its checksum is computed while the processor's cache still has it, and the
disk takes it from there. Calls that copy, check or write release the interpreter's lock: threads that write a file each keep
the disk busy. Where a file system refuses, the same bytes go through its cache.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardledger.transport.disk import SECTOR, AlignedBuffer

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

BUFFER_BYTES = 1 << 20
"""Written by one call."""
SMALL_BYTES = 1 << 20
"""Files up to this go through the cache: nothing is gained for them."""
_PIECE_BYTES = 1 << 18
"""Copied and checked at a time: fits the processor's cache."""
_EARLY_BYTES = 1 << 23
"""After so many bytes in the system's cache the disk is told to begin."""
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""How a file system says that it has no direct I/O, or not like this."""

_own = threading.local()


class DirectFile:
    """One new file, written from its start to its end. A context: it is closed at the end, whatever happens.

    ``nbytes`` is how much will be written.
    """

    def __init__(self, path: Path, nbytes: int, *, exclusive: bool = False) -> None:
        self.path = path
        self.check = 0
        """CRC-32 of what was given to ``write``."""
        self._direct = nbytes > SMALL_BYTES and fcntl is not None and hasattr(os, "O_DIRECT")
        self._handle = self._open(exclusive)
        self._buffer = _buffer()
        self._filled = 0
        self._at = 0
        self._begun = 0

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._handle)

    def write(self, part: memoryview) -> None:
        """Append bytes. ``part`` is not used after the call."""
        size, done = len(part), 0
        source = 0 if part.readonly or not size else ctypes.addressof(ctypes.c_char.from_buffer(part))
        view, target = self._buffer.view, self._buffer.tensor.data_ptr()
        while done < size:
            count = min(size - done, BUFFER_BYTES - self._filled, _PIECE_BYTES)
            if source:
                ctypes.memmove(target + self._filled, source + done, count)
            else:
                view[self._filled : self._filled + count] = part[done : done + count]
            self.check = zlib.crc32(view[self._filled : self._filled + count], self.check)
            self._filled += count
            done += count
            if self._filled == BUFFER_BYTES:
                self._flush(BUFFER_BYTES)

    def end(self, *, settle: bool = False) -> int:
        """Write what is left; ``settle`` brings the file to the disk. Returns its size in bytes."""
        sectors = self._filled // SECTOR * SECTOR
        if self._direct and sectors:
            self._flush(sectors)
        if self._filled:
            self._through_the_cache()  # direct I/O has whole sectors only
            self._flush(self._filled)
        if settle:
            with naming(self.path):
                os.fsync(self._handle)
        return self._at

    def _open(self, exclusive: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC) | getattr(os, "O_BINARY", 0)
        if self._direct:
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self._direct = False
                if exclusive:
                    self.path.unlink(missing_ok=True)  # some systems make the file before they refuse
        return os.open(self.path, flags, 0o666)

    def _through_the_cache(self) -> None:
        if self._direct:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False
            self._begun = self._at

    def _flush(self, count: int) -> None:
        """Write the first ``count`` bytes of the buffer and move the rest to its start."""
        view, written = self._buffer.view, 0
        while written < count:  # a nearly full disk takes less than it is given
            try:
                with naming(self.path):
                    written += os.write(self._handle, view[written:count])
            except OSError as error:
                if not self._direct or error.errno not in _REFUSALS:
                    raise
                self._through_the_cache()
        self._at += count
        rest = self._filled - count
        if rest:
            view[:rest] = bytes(view[count : self._filled])
        self._filled = rest
        if not self._direct and self._at - self._begun >= _EARLY_BYTES:
            # Advice that pages are not needed makes Linux write them out, at once and in the background.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._handle, self._begun, self._at - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._at


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system say which file they are about; those of an open one do not by themselves."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _buffer() -> AlignedBuffer:
    """This thread's, kept for its next file: fresh memory costs more than the copy into it."""
    buffer = getattr(_own, "buffer", None)
    if buffer is None:
        buffer = _own.buffer = AlignedBuffer(BUFFER_BYTES)
    return buffer
