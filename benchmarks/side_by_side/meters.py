"""What the operating system and PyTorch's allocator say about one process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


def resident_bytes() -> int:
    """Resident set of this process now."""
    return _status("VmRSS:")


def peak_resident_bytes() -> int:
    """Largest resident set since ``forget_peak``."""
    return _status("VmHWM:")


def forget_peak() -> None:
    """Let ``peak_resident_bytes`` start anew from the present resident set."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def settle() -> None:
    """Return freed memory to the system, so that a base line holds what is alive and no more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since the machine started, by every process."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise RuntimeError("/proc/net/dev has no loopback interface")


def most_allocated(action: Callable[[], object]) -> int:
    """Most bytes that PyTorch's CPU allocator had handed out at once during ``action``, above those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        action()
    now = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    return highest


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
