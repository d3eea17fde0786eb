"""What the C library does with memory that tensors on a CPU have freed."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD = -1
"""glibc's ``M_TRIM_THRESHOLD``: free bytes at the end of its heap that it keeps."""
_MMAP_THRESHOLD = -3
"""glibc's ``M_MMAP_THRESHOLD``: blocks from this size on come from the system, and go back to it, one by one."""
_BYTES = 1 << 20
_KEPT_BLOCK = 1 << 30
_OLD_KEPT_BLOCK = 32 << 20
"""The most that glibc before 2.35 takes."""
_KEPT = (1 << 31) - 1


def return_freed_memory() -> bool:
    """Let freed tensors of 1 MiB and more go back to the system at once; False where the C library is not glibc.

    glibc raises that limit to 32 MiB as blocks are freed, and keeps smaller ones in its heap: several hundred MiB of a run
    whose states were put on disk to save memory. It holds for the whole process, and costs a page fault for each page that
    is allocated anew.
    """
    return _set(_MMAP_THRESHOLD, _BYTES) and _set(_TRIM_THRESHOLD, _BYTES)


def keep_freed_memory() -> bool:
    """Let freed tensors of less than 1 GiB stay with the process; False where the C library is not glibc.

    Gathered units, gradients and activations come and go in every step. Without this each is mapped anew, and the system
    fills it with zeros page by page: more than a copy of the same bytes costs. It holds for the whole process; the peak is
    as high as before. Who has told the C library something else by its environment variables is not overruled.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    large = _set(_MMAP_THRESHOLD, _KEPT_BLOCK) or _set(_MMAP_THRESHOLD, _OLD_KEPT_BLOCK)
    return large and _set(_TRIM_THRESHOLD, _KEPT)


def give_memory_back() -> None:
    """Return what has been kept so far."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def _set(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL("libc.so.6").mallopt(option, value))
    except (OSError, AttributeError):
        return False
