"""What one pastes into a bug report: versions, hardware, and the variables that change how a run behaves."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator

PACKAGES = ("shardledger", "torch", "safetensors", "pydantic", "typer", "rich", "psutil", "numpy", "nvidia-ml-py")
PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "SLURM_", "OMPI_", "SHARDLEDGER_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


def environment_report() -> str:
    """Plain text, one ``name: value`` a line."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    lines = [f"python: {platform.python_version()} ({platform.python_implementation()}, {sys.executable})"]
    lines += [f"{package}: {_version(package)}" for package in PACKAGES]
    lines += [
        f"platform: {platform.platform()}",
        f"processor: {platform.processor() or platform.machine()}",
        f"cores: {os.cpu_count()} ({_usable_cores()} usable by this process)",
        f"torch threads: {torch.get_num_threads()}",
        f"memory: {memory.total / 2**30:.1f} GiB ({memory.available / 2**30:.1f} GiB free)",
    ]
    lines += _device_lines()
    lines += ["environment:"]
    lines += [f"  {line}" for line in _variables()] or ["  (nothing that matters is set)"]
    return "\n".join(lines)


def _device_lines() -> list[str]:
    import torch

    lines = [f"cuda: {torch.version.cuda or 'not in this build of torch'}"]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lines += [f"cuda devices: {count}"]
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        lines += [f"  {index}: {facts.name}, {facts.total_memory / 2**30:.1f} GiB, compute {facts.major}.{facts.minor}"]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count and _is_built_with("NCCL") else None
    gloo = _is_built_with("GLOO")
    return [*lines, f"nccl: {nccl or 'not available'}", f"gloo: {'available' if gloo else 'not available'}"]


def _is_built_with(backend: str) -> bool:
    """From torch's build settings: asking torch.distributed itself is left to the room that speaks with it."""
    import torch

    return re.search(rf"\bUSE_{backend}=(1|ON)\b", torch.__config__.show()) is not None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _variables() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name in NAMES or name.startswith(PREFIXES):
            yield f"{name}={'(hidden)' if any(word in name for word in SECRET_WORDS) else value}"
