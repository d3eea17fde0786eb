"""Offload where ranks compute in host memory: only a disk takes bytes away, and its buffers are in the same memory."""

from __future__ import annotations

from dataclasses import replace

from shardledger.layout.build import Layout
from shardledger.ledger.offload import Offloaded
from shardledger.ledger.predict import OptimizerBytes, tiers
from shardledger.plan.offload import TILE_NUMEL
from shardledger.plan.plan import Offload, Plan
from shardledger.plan.roles import Home

OFFLOADS = ("none", "optimizer:nvme")
"""Choices at every stage."""
OFFLOADS_OF_SHARDED_PARAMS = (*OFFLOADS, "optimizer:nvme+param:nvme")
"""Choices where parameters are sharded."""


def offloaded_to_disk(plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, choice: str) -> Offloaded:
    """Where states sleep under ``choice``, with the defaults of the offload's keys; bytes of ``rank``.

    ``host`` is 0: what waits in host memory for the disk counts as params that come to it.
    """
    before = tiers(plan, layout, optimizer, rank, one_memory=True)
    if choice == "none":
        return Offloaded(dict.fromkeys(before.device, 0), 0, 0)
    params = Home.DISK if "param:" in choice else Home.DEVICE
    moved = Offload(optimizer=Home.DISK, params=params, tile_numel=TILE_NUMEL, buffers=4, param_buffers=5)
    after = tiers(replace(plan, offload=moved), layout, optimizer, rank, one_memory=True)
    device = {c: before.device[c] + before.host[c] - after.device[c] - after.host[c] for c in before.device}
    device["params"] -= after.tiles.staging_bytes
    return Offloaded(device, 0, after.disk_file_bytes)
