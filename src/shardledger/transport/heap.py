"""What the C library does with memory that tensors on a CPU have freed."""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""glibc's ``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD``."""
_BYTES = 1 << 20
_LARGEST_IN_HEAP = 32 << 20
"""What glibc's own adjustment stops at; it takes no more."""
_KEPT = 256 << 20
_MOST_KEPT = 1 << 30
_UNITS_KEPT = 16


def return_freed_memory() -> bool:
    """Let freed tensors of 1 MiB and more go back to the system at once; False where the C library is not glibc.

    glibc raises that limit to 32 MiB as blocks are freed, and keeps smaller ones in its heap: several hundred MiB of a run
    whose states were put on disk to save memory. It holds for the whole process, and costs a page fault for each page that
    is allocated anew.
    """
    return _set(_MMAP_THRESHOLD, _BYTES) and _set(_TRIM_THRESHOLD, _BYTES)


def keep_freed_memory(unit_bytes: int) -> bool:
    """Let freed tensors stay in the heap for the next one, as on a GPU; False where that is not to be decided here.

    glibc gives the end of its heap back as soon as 64 MiB or so of it are free, which is what a step frees. The next step
    then pays a page fault for every 4 KiB: with units of ``unit_bytes`` (gathered weights, gradients) some percent of its
    time. The peak is the same, for what is kept had been in use. It holds for the whole process. Who has told the C library
    something else by its environment variables is not overruled.
    """
    told = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if told:
        return False
    kept = min(max(_KEPT, _UNITS_KEPT * unit_bytes), _MOST_KEPT)
    return _set(_MMAP_THRESHOLD, _LARGEST_IN_HEAP) and _set(_TRIM_THRESHOLD, kept)


def _set(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL("libc.so.6").mallopt(parameter, value))
    except (OSError, AttributeError):
        return False
