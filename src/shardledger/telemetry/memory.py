"""Memory of this process, or of its CUDA device, as the system counts it.

On CUDA the figures are PyTorch's allocator's. On CPU they are the resident set of the process, which includes Python,
PyTorch and the corpus: ``baseline_bytes`` is what was there when the meter was made.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import torch

CUDA_BYTES = 768 * 2**20
"""What a process has on a GPU before its model, in round numbers and in no allocator's count: the context with PyTorch's
kernels (400 to 600 MiB) and NCCL's buffers (200 MiB and more, by channels and peers). A judgement, not a measurement."""


def before_the_model(device: str) -> tuple[int, str]:
    """Bytes of a rank's process on its device before the model, and how they are known."""
    if device == "cpu":
        return psutil.Process().memory_info().rss, "measured in this process: Python and PyTorch"
    return CUDA_BYTES, "assumed for CUDA's context and NCCL"


class MemoryMeter:
    """Reads peak and current bytes of this rank; the baseline is taken when the meter is made.

    ``model_bytes`` are those of a model that is on the device already, and are no part of the baseline.
    """

    def __init__(self, device: torch.device | str = "cpu", *, model_bytes: int = 0) -> None:
        self.device = torch.device(device)
        self.baseline_bytes = max(0, self.current_bytes() - model_bytes)
        self._highest_bytes = self.baseline_bytes

    def current_bytes(self) -> int:
        """Bytes in use now: resident set on CPU, allocated tensors on CUDA."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return psutil.Process().memory_info().rss

    def peak_bytes(self) -> int:
        """The most bytes ever in use: since the process started on CPU, since the last reset on CUDA."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        # The kernel keeps its count in pieces per core, so its peak can come out some pages lower than it was.
        self._highest_bytes = max(self._highest_bytes, peak_resident_bytes())
        return self._highest_bytes


def peak_resident_bytes() -> int:
    """The largest resident set this process ever had.

    Linux says so exactly in /proc (VmHWM, in KiB). Elsewhere getrusage tells it, in bytes on macOS and in KiB on the
    other systems. getrusage is not used on Linux because a new process starts there with the peak of the one it was
    forked from.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows has no such module; psutil knows its peak
        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
