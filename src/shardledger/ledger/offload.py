"""What a choice of offload takes off the device, from plan and layout alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardledger.layout.build import Layout
from shardledger.ledger.predict import OptimizerBytes, tiers
from shardledger.plan.offload import TILE_NUMEL
from shardledger.plan.plan import Offload, Plan
from shardledger.plan.roles import Home

OFFLOADS = ("none", "optimizer:cpu", "optimizer:nvme")
"""Choices at every stage."""
OFFLOADS_OF_SHARDED_PARAMS = (*OFFLOADS, "optimizer:cpu+param:cpu", "optimizer:nvme+param:nvme")
"""Choices where parameters are sharded and can sleep elsewhere too."""

_HOMES = {"cpu": Home.HOST, "nvme": Home.DISK}


@dataclass(frozen=True)
class Offloaded:
    """What a choice of offload moves, in bytes of one rank."""

    device: dict[str, int]
    """Bytes by category that leave the memory the rank computes in; negative where some come to it instead."""
    host: int
    """Bytes in host memory, buffers included; 0 where the ranks compute in it."""
    disk: int
    """Bytes of files."""


def choices(*, sharded: bool, one_memory: bool) -> tuple[str, ...]:
    """What there is to choose: of parameters only where they are sharded, of host memory only where it is another."""
    found = OFFLOADS_OF_SHARDED_PARAMS if sharded else OFFLOADS
    return tuple(choice for choice in found if not (one_memory and ":cpu" in choice))


def choice_of(plan: Plan) -> str:
    """The choice that ``plan`` makes."""
    names = {home: name for name, home in _HOMES.items()}
    parts = (("optimizer", plan.offload.optimizer), ("param", plan.offload.params))
    return "+".join(f"{part}:{names[home]}" for part, home in parts if home in names) or "none"


def with_offload(plan: Plan, choice: str) -> Plan:
    """``plan`` under one of ``OFFLOADS_OF_SHARDED_PARAMS``, with what the configuration's defaults are."""
    homes = dict(part.split(":") for part in choice.split("+")) if choice != "none" else {}
    optimizer, params = (_HOMES[homes[role]] if role in homes else Home.DEVICE for role in ("optimizer", "param"))
    offload = Offload(optimizer=optimizer, params=params, tile_numel=TILE_NUMEL, buffers=4, param_buffers=5)
    return replace(plan, offload=offload)


def offloaded(
    plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, *, one_memory: bool = False
) -> Offloaded:
    """What ``plan``'s offload moves, compared with the same plan without.

    Masters, moments and the sharded sums of gradients they are stepped with leave the device (arXiv 2101.06840); gradients
    that a rank keeps unreduced, or whole, stay. Where the masters were the only weights kept (stage 3), shards in the
    dtype of computation rest on the device in their place; offload of parameters takes those, too.

    ``one_memory``: the ranks compute in host memory, as CPUs do: what goes there stays where it was.
    """
    before = tiers(replace(plan, offload=Offload()), layout, optimizer, rank, one_memory=one_memory)
    after = tiers(plan, layout, optimizer, rank, one_memory=one_memory)
    staging = after.tiles.staging_bytes
    device = {
        category: before.device[category] - after.device[category] - (after.host[category] if one_memory else 0)
        for category in before.device
    }
    device["communication"] = -staging if one_memory else 0
    host = 0 if one_memory else sum(after.host.values()) + staging
    return Offloaded(device, host, after.disk_file_bytes)
