"""What a choice of offload takes off the device, from plan and layout alone."""

from __future__ import annotations

from dataclasses import dataclass

from shardledger.layout.build import Layout
from shardledger.ledger.predict import OptimizerBytes, gradient_bytes, master_bytes, state_bytes
from shardledger.plan.plan import Plan
from shardledger.plan.spec import DTYPE_BYTES

OFFLOADS = ("none", "optimizer:cpu", "optimizer:nvme")
"""Choices at every stage."""
OFFLOADS_OF_SHARDED_PARAMS = (*OFFLOADS, "optimizer:cpu+param:cpu", "optimizer:nvme+param:nvme")
"""Choices where parameters are sharded and can sleep elsewhere too."""

_STAGED_FLATS = 2
"""Flats whose states are in host memory at once on their way from and to disk: one is stepped while one moves."""


@dataclass(frozen=True)
class Offloaded:
    """What a choice of offload moves, in bytes of one rank."""

    device: dict[str, int]
    """Bytes by state category that leave the device; negative where some come to it instead."""
    host: int
    disk: int


def offloaded(plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, choice: str) -> Offloaded:
    """Where states sleep under ``choice``, one of ``OFFLOADS_OF_SHARDED_PARAMS``.

    Offload of the optimizer takes masters, moments and the summed gradients they are stepped with off the device
    (arXiv 2101.06840); gradients that a rank keeps unreduced stay. Where the masters are the only weights kept (stage 3),
    shards in the dtype of computation rest on the device in their place; offload of parameters takes those, too.
    """
    device = {"params": 0, "grads": 0, "master": 0, "optimizer": 0}
    if choice == "none":
        return Offloaded(device, 0, 0)
    moved = largest = 0
    for flat in layout.flats:
        alone = state_bytes(plan, Layout(layout.world, (flat,)), optimizer, rank)
        gone = 0
        if flat.param_sharded:
            rests = 0 if "param:" in choice else flat.shard_numel * DTYPE_BYTES[flat.dtype]
            device["params"] += alone["params"] - rests
            gone = 0 if flat.trainable else alone["params"] - rests
        if flat.trainable:
            sums = gradient_bytes(plan, flat)
            device["master"] += alone["master"]
            device["optimizer"] += alone["optimizer"]
            device["grads"] += 0 if sums.shared else sums.reduced
            gone = master_bytes(flat) + alone["optimizer"] + sums.reduced
        moved += gone
        largest = max(largest, gone)
    if ":nvme" not in choice:
        return Offloaded(device, moved, 0)
    return Offloaded(device, min(moved, _STAGED_FLATS * largest), moved)
