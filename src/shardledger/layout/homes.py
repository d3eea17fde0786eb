"""On which tier each tensor of a flat rests."""

from __future__ import annotations

from dataclasses import dataclass

from shardledger.layout.build import Layout
from shardledger.layout.flat import FlatLayout
from shardledger.plan.plan import Offload
from shardledger.plan.roles import Home

_HALF = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True)
class FlatHomes:
    """Homes of one flat's tensors. Full parameters are always on the device."""

    shard: Home = Home.DEVICE
    """Of what a rank keeps of sharded parameters."""
    master: Home | None = None
    """Of the values that the optimizer updates; None: they are the weights themselves, or the flat is frozen, or they
    are the shard as it is without offload."""
    states: Home = Home.DEVICE
    """Of the optimizer's moments."""
    moved: bool = False
    """Whether the optimizer step of this flat is the offload's."""

    @property
    def leaves_device(self) -> bool:
        """Whether anything of the flat rests elsewhere."""
        return self.moved or self.shard is not Home.DEVICE

    @property
    def shard_is_master(self) -> bool:
        """Whether sharded trainable parameters are kept once, as the masters."""
        return self.master is None


def flat_homes(layout: Layout, offload: Offload, *, one_memory: bool) -> tuple[FlatHomes, ...]:
    """Homes of each flat of ``layout``, in its order.

    Args:
        one_memory: whether the device computes in host memory (a CPU). fp32 weights are then stepped where they are;
            elsewhere the optimizer's home gets a copy of its own.
    """
    wanted = offload.ratio * sum(flat.padded_numel for flat in layout.flats if flat.trainable)
    taken = 0
    homes = []
    for flat in layout.flats:
        moves = flat.trainable and offload.optimizer is not Home.DEVICE and taken < wanted
        taken += flat.padded_numel if moves else 0
        homes.append(_homes(flat, offload, moves=moves, one_memory=one_memory))
    return tuple(homes)


def _homes(flat: FlatLayout, offload: Offload, *, moves: bool, one_memory: bool) -> FlatHomes:
    if not flat.trainable:
        return FlatHomes(shard=offload.params if flat.param_sharded else Home.DEVICE)
    if not moves:
        return FlatHomes()
    home = offload.optimizer
    narrow = flat.dtype in _HALF
    if not flat.param_sharded:
        return FlatHomes(master=home if narrow or not one_memory else None, states=home, moved=True)
    rests = offload.params
    if narrow:
        # In host memory the masters are cast while they are gathered. On disk a narrow copy is read in half the time.
        together = rests is Home.HOST and home is Home.HOST
    else:
        together = (
            rests is home or (rests is Home.HOST and home is Home.DISK) or (one_memory and rests is not Home.DISK)
        )
    return FlatHomes(shard=rests, master=None if together else home, states=home, moved=True)
