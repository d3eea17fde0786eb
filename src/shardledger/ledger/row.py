"""One line of a plan: the bytes of one rank under one choice of stage, offload and checkpointing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes of one rank at the moment of a step when its device holds the most."""

    stage: int
    """0, 1, 2 or 3."""
    offload: str
    """``"none"``, ``"optimizer:cpu"``, ``"optimizer:nvme"``, ``"optimizer:cpu+param:cpu"`` or
    ``"optimizer:nvme+param:nvme"``."""
    checkpointing: bool
    """Whether activations are recomputed in the backward pass."""
    micro_batch: int
    """Samples of one rank and micro-batch."""
    params: int
    """Bytes on the device at the peak; so are all categories down to ``framework``."""
    grads: int
    master: int
    optimizer: int
    activations: int
    communication: int
    temporary: int
    framework: int
    total: int
    """Peak bytes of one rank on the device."""
    host_bytes: int
    """Bytes of one rank in host memory."""
    disk_bytes: int
    """Bytes of one rank on disk."""
    peak_phase: str
    """``"init"``, ``"forward"``, ``"backward"``, ``"step"`` or ``"checkpoint"``: where the peak is."""
    peak_unit: str
    """The unit that was at work then; empty where there is none."""
    sent_bytes_per_step: int
    """Bytes that one rank sends in one optimizer step."""
    link_bytes_per_step: int = 0
    """Bytes between one rank's device and host memory in one step, both ways."""
    disk_bytes_per_step: int = 0
    """Bytes that one rank reads from and writes to disk in one step."""
    disk_bytes_in_step: int = 0
    """The part of them that is moved while the optimizer steps, when nothing else is computed."""
    unit_stages: tuple[tuple[str, int], ...] = ()
    """Units that shard less than ``stage`` says, by label, and their stage; empty: all alike."""
    recomputed_units: tuple[str, ...] = ()
    """Where only some units are recomputed: their labels."""
