"""What the C library does with memory that tensors on a CPU have freed."""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3
"""glibc's ``M_MMAP_THRESHOLD``."""
_BYTES = 1 << 20


def return_freed_memory() -> bool:
    """Let freed tensors of 1 MiB and more go back to the system at once; False where the C library is not glibc.

    glibc raises that limit to 32 MiB as blocks are freed, and keeps smaller ones in its heap: several hundred MiB of a run
    whose states were put on disk to save memory. It holds for the whole process, and costs a page fault for each page that
    is allocated anew.
    """
    try:
        return bool(ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, _BYTES))
    except (OSError, AttributeError):
        return False
