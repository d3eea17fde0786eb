"""Bytes that one rank moves between tiers in one optimizer step, from plan and layout alone."""

from __future__ import annotations

from dataclasses import dataclass

from shardledger.layout.build import Layout
from shardledger.layout.homes import flat_homes
from shardledger.ledger.predict import OptimizerBytes, gradient_bytes, tiers
from shardledger.plan.plan import Plan
from shardledger.plan.roles import Home
from shardledger.plan.spec import DTYPE_BYTES

GATHERS = 2
"""Of each sharded unit in one micro-batch: forward and backward."""


@dataclass(frozen=True)
class TierBytes:
    """What crosses each link in one step."""

    to_device: int
    """From host memory to the device."""
    to_host: int
    """From the device to host memory."""
    disk_read: int
    """In the step and in gathers."""
    disk_written: int
    disk_gathered: int
    """The part of ``disk_read`` that gathers ask for: it overlaps with computing, the rest comes after it."""

    @property
    def link(self) -> int:
        """Both ways between host and device."""
        return self.to_device + self.to_host

    @property
    def disk_in_step(self) -> int:
        """What is read and written while the optimizer steps."""
        return self.disk_read + self.disk_written - self.disk_gathered


def tier_bytes(plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, *, one_memory: bool) -> TierBytes:
    """Bytes of a step in the steady state: the optimizer has its states, and every parameter has a gradient."""
    homes = flat_homes(layout, plan.offload, one_memory=one_memory)
    found = tiers(plan, layout, optimizer, rank, one_memory=one_memory)
    micro_batches = plan.step.accumulation
    to_device = to_host = read = written = gathered = 0
    for flat, home, tiles in zip(layout.flats, homes, found.tiles.tiles, strict=True):
        weight = DTYPE_BYTES[flat.dtype]
        shard = flat.shard_numel * weight
        if flat.param_sharded and home.shard is not Home.DEVICE and not one_memory:
            to_device += GATHERS * micro_batches * shard
        for tile, place in tiles:
            for component in place.components if place else ():
                if component.in_params:
                    gathered += GATHERS * micro_batches * component.nbytes
                if home.moved and tile.pieces:
                    written += component.nbytes
                    read += component.nbytes if component.name != "shard" else 0
        if not home.moved or one_memory:
            continue
        sums = gradient_bytes(plan, flat)
        away = flat.optim_sharded and not sums.shared and not plan.reproducible
        to_host += sums.reduced * (micro_batches if away and flat.grad_sharded else 1)
        masters = flat.shard_numel if flat.optim_sharded else flat.padded_numel
        follows = not flat.param_sharded or (home.master is not None and home.shard is Home.DEVICE)
        to_device += masters * weight if follows else 0
    return TierBytes(to_device, to_host, read + gathered, written, gathered)
