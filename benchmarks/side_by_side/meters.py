"""What the operating system and PyTorch's allocators say about one process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class HostMeter:
    """Of a rank on the CPU. The base line is the resident set when the meter is made."""

    device = "cpu"

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # returns what imports have freed
        self._base = _status("VmRSS:")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew

    def finish(self) -> None:
        """Nothing runs behind Python's back."""

    def peak_bytes(self) -> int:
        """Largest resident set above the base line."""
        return _status("VmHWM:") - self._base

    def most_allocated(self, action: Callable[[], object]) -> int:
        """Most bytes that PyTorch's allocator had handed out at once during ``action``, a training step, above its states.

        States are what is alive when the optimizer is called: an engine may let go of gradients after a step.
        """
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            action()
        now = highest = states = 0
        stepped = False
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                now += event.nbytes()
                highest = max(highest, now)
            elif event.name().startswith("Optimizer.step") and not stepped:
                states, stepped = now, True
        return highest - max(0, states)


class DeviceMeter:
    """Of a rank on a GPU: PyTorch's allocator, in bytes of tensors."""

    device = "cuda"

    def finish(self) -> None:
        """Wait until the device has done what was asked."""
        torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        """Most bytes allocated since the process started, or since ``most_allocated``."""
        return torch.cuda.max_memory_allocated()

    def most_allocated(self, action: Callable[[], object]) -> int:
        """As ``HostMeter.most_allocated``."""
        self.finish()
        states = [torch.cuda.memory_allocated()]
        handle = register_optimizer_step_pre_hook(lambda *_: states.append(torch.cuda.memory_allocated()))
        torch.cuda.reset_peak_memory_stats()
        action()
        self.finish()
        handle.remove()
        return torch.cuda.max_memory_allocated() - max(states[:2])


def meter_for(device: str) -> HostMeter | DeviceMeter:
    """The meter of ``"cpu"`` or ``"cuda"``."""
    return DeviceMeter() if device == "cuda" else HostMeter()


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since the machine started, by every process."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise RuntimeError("/proc/net/dev has no loopback interface")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
