"""What the offload of a plan takes out of the memory that ranks compute in, by the account of the engine itself."""

from __future__ import annotations

from dataclasses import replace

from shardledger.layout.build import Layout
from shardledger.ledger.offload import Offloaded
from shardledger.ledger.predict import OptimizerBytes, tiers
from shardledger.plan.offload import TILE_NUMEL
from shardledger.plan.plan import Offload, Plan
from shardledger.plan.roles import Home

OFFLOADS = ("none", "optimizer:nvme")
"""Choices at every stage where ranks compute in host memory: only a disk takes bytes away."""
OFFLOADS_OF_SHARDED_PARAMS = (*OFFLOADS, "optimizer:nvme+param:nvme")
"""Choices there where parameters are sharded."""


def moved_away(plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, *, one_memory: bool) -> Offloaded:
    """What ``plan.offload`` moves, in bytes of ``rank``.

    ``one_memory``: ranks compute in host memory. What rests on the host then has gone nowhere, and what waits there for the
    disk counts as temporaries that come to it.
    """
    kept = tiers(replace(plan, offload=Offload()), layout, optimizer, rank, one_memory=one_memory)
    found = tiers(plan, layout, optimizer, rank, one_memory=one_memory)
    staging, host = found.tiles.staging_bytes, sum(found.host.values())
    device = {name: kept.device[name] - found.device[name] for name in kept.device}
    if one_memory:
        device = {name: device[name] + kept.host[name] - found.host[name] for name in device}
        return Offloaded({**device, "temporary": -staging}, 0, found.disk_file_bytes)
    return Offloaded(device, host + staging, found.disk_file_bytes)


def offloaded_to_disk(plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, choice: str) -> Offloaded:
    """``moved_away`` for a choice in the words of a row, with the defaults of the offload's keys, on CPU ranks."""
    params = Home.DISK if "param:" in choice else Home.DEVICE
    home = Home.DEVICE if choice == "none" else Home.DISK
    wanted = Offload(optimizer=home, params=params, tile_numel=TILE_NUMEL, buffers=4, param_buffers=5)
    return moved_away(replace(plan, offload=wanted), layout, optimizer, rank, one_memory=True)


def offload_of(plan: Plan) -> str:
    """The choice that a plan makes, in the words of a row."""
    names = {Home.HOST: "cpu", Home.DISK: "nvme"}
    parts = (("optimizer", plan.offload.optimizer), ("param", plan.offload.params))
    return "+".join(f"{part}:{names[home]}" for part, home in parts if home in names) or "none"
