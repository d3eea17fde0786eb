"""Random number generators of one rank: Python's, NumPy's where it is in use, torch's on CPU and device."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def capture(device: torch.device) -> dict[str, Any]:
    """The states, as values that ``torch.load(weights_only=True)`` reads."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [str(name), [int(key) for key in keys], *(_plain(value) for value in rest)]
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing where ``capture`` was taken."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"], device)


def fork(states: Mapping[str, Any], rank: int, device: torch.device) -> None:
    """For a rank that the saved run did not have: generators of its own, the same at every resume from these states."""
    digest = hashlib.sha256(states["torch"].numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float) else int(value)
