"""Reading another process's memory with one copy and no shared segment: Linux's process_vm_readv.

Both processes must belong to one user on one machine. Where the kernel restricts tracing (Yama's ptrace_scope 1), a
process must have called ``let_others_read`` first; scopes 2 and 3, some container profiles and other systems refuse.

Only on x86-64, where another process sees stores in the order in which they were made.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence

_LARGEST_CALL = 1 << 30
"""The kernel moves at most 2 GiB - 4 KiB a call."""
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Interval(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


try:
    _libc = ctypes.CDLL(None, use_errno=True)
    _readv = _libc.process_vm_readv
    _readv.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong
    )  # fmt: skip
    _readv.restype = ctypes.c_ssize_t
    if platform.machine() != "x86_64":
        _readv = None
except (AttributeError, OSError, TypeError):
    _readv = None


class Reading:
    """One prepared read of intervals (address, bytes) of process ``pid`` into as many bytes of this one."""

    def __init__(self, pid: int, source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]]) -> None:
        self._pid = pid
        self._source = (_Interval * len(source))(*source)
        self._target = (_Interval * len(target))(*target)
        self._nbytes = sum(nbytes for _, nbytes in source)

    def run(self) -> None:
        """Copy; other threads run meanwhile.

        Raises:
            ProcessMemoryError: the process has ended, or does not let this one read.
        """
        if _readv is None:
            raise ProcessMemoryError(errno.ENOSYS)
        got = _readv(self._pid, self._target, len(self._target), self._source, len(self._source), 0)
        if got != self._nbytes:
            raise ProcessMemoryError(ctypes.get_errno() if got < 0 else errno.EFAULT)


class ProcessMemoryError(RuntimeError):
    """A read that failed; ``code`` is its errno."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__("it has ended" if code == errno.ESRCH else os.strerror(code))


def pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    """``nbytes`` bytes from ``address`` on, cut into what one call may move."""
    return [(address + a, min(_LARGEST_CALL, nbytes - a)) for a in range(0, nbytes, _LARGEST_CALL)]


def let_others_read() -> None:
    """Allow every process of this user to read this one's memory, where the kernel asks for permission."""
    if _readv is not None:
        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
