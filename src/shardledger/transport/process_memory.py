"""Reading another process's memory with one copy and no shared segment: Linux's process_vm_readv.

Both processes must belong to one user on one machine. Where the kernel restricts tracing (Yama's ptrace_scope 1), a
process must have let the other one read first; scopes 2 and 3, some container profiles and other systems refuse.
"""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import c_int, c_ulong, c_void_p

_LARGEST_CALL = 1 << 30
"""The kernel moves at most 2 GiB - 4 KiB a call."""
_PR_SET_PTRACER = 0x59616D61


class _Interval(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", c_void_p), ("nbytes", ctypes.c_size_t))


try:
    _libc = ctypes.CDLL(None, use_errno=True)
    _readv = _libc.process_vm_readv
    _readv.argtypes = (c_int, c_void_p, c_ulong, c_void_p, c_ulong, c_ulong)
    _readv.restype = ctypes.c_ssize_t
except (AttributeError, OSError, TypeError):
    _readv = None


def read_memory(pid: int, source: int, target: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes from address ``source`` of process ``pid`` to ``target`` of this one; other threads run meanwhile.

    Raises:
        OSError: the process has ended, or does not let this one read.
    """
    if _readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    for at in range(0, nbytes, _LARGEST_CALL):
        size = min(_LARGEST_CALL, nbytes - at)
        here, there = _Interval(target + at, size), _Interval(source + at, size)
        got = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got != size:
            code = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(code, "it has ended" if code == errno.ESRCH else os.strerror(code))


def let_read(pid: int) -> None:
    """Where the kernel asks for permission: let process ``pid`` and its descendants read this one; 0: nobody, -1: everybody."""
    if _readv is not None:
        _libc.prctl(_PR_SET_PTRACER, c_ulong(pid), 0, 0, 0)
