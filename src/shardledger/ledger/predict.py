"""Bytes of training state on one rank, from plan and layout alone.

The article's account for Adam in mixed precision (arXiv 1910.02054, section 3.1): 2 bytes of weights, 2 of gradients and
12 of fp32 masters and moments per parameter. What this engine keeps differs where it needs less, or where exact sums cost
an fp32 gradient; see ``state_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardledger.layout.build import Layout
from shardledger.layout.flat import FlatLayout
from shardledger.layout.homes import flat_homes
from shardledger.layout.tiles import FlatSizes, TilePlan, Whereabouts, plan_tiles, tiles_of
from shardledger.plan.plan import Plan
from shardledger.plan.roles import Home
from shardledger.plan.spec import DTYPE_BYTES

_HALF = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True)
class OptimizerBytes:
    """What a torch.optim optimizer keeps."""

    per_element: int
    """Bytes per element of the masters (AdamW: two fp32 moments, 8)."""
    per_piece: int
    """Bytes per parameter piece (AdamW: a step counter, 4)."""
    whole: bool = False
    """Whether it works on whole parameters rather than on pieces cut where shards end."""
    states: tuple[int, ...] = ()
    """Bytes per element of each state that has a value for every element; their sum is ``per_element``."""


def state_bytes(
    plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, *, one_memory: bool = True
) -> dict[str, int]:
    """Bytes of params, grads, master and optimizer in the memory that ``rank`` computes in, padding included.

    * params: full flats in the compute dtype; a shard where PARAM is sharded. fp32 masters of a sharded trainable flat
      are its only copy and count as params when the weights are fp32 themselves, else as master.
    * grads: the reduced sum in the accumulation dtype (a shard when OPTIM is sharded), plus the local gradient where
      GRAD is not sharded and they cannot share memory. See ``drops_sum`` for when sums are not there.
    * master: fp32 masters, where the weights have another dtype, or are kept apart from them.
    * optimizer: every parameter piece that has had a gradient.

    ``one_memory``: the ranks compute in host memory (CPUs), so what rests there counts. See ``tiers`` for the others.
    """
    found = tiers(plan, layout, optimizer, rank, one_memory=one_memory)
    return {key: found.device[key] + (found.host[key] if one_memory else 0) for key in found.device}


@dataclass(frozen=True)
class Tiers:
    """Bytes of one rank's states at rest, on each tier, by category."""

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    """Bytes of values; the files are rounded up to sectors."""
    tiles: TilePlan

    @property
    def disk_file_bytes(self) -> int:
        """What is reserved on disk."""
        return self.tiles.optimizer_file_bytes + self.tiles.params_file_bytes


def tiers(plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int, *, one_memory: bool) -> Tiers:
    """Where everything rests between uses, as the plan's offload says."""
    homes = flat_homes(layout, plan.offload, one_memory=one_memory)
    by_home = {home: {"params": 0, "grads": 0, "master": 0, "optimizer": 0} for home in Home}
    for flat, home in zip(layout.flats, homes, strict=True):
        weight = DTYPE_BYTES[flat.dtype]
        kept = flat.shard_numel if flat.param_sharded else flat.padded_numel
        master = 4 if flat.dtype in _HALF else weight
        masters = flat.shard_numel if flat.optim_sharded else flat.padded_numel
        rests = home.shard if flat.param_sharded else Home.DEVICE
        apart = home.master or (rests if flat.trainable and master != weight else None)
        if not (flat.trainable and flat.param_sharded and apart is not None and home.master is None):
            by_home[rests]["params"] += kept * weight
        if not flat.trainable:
            continue
        if apart is not None:
            by_home[apart]["master"] += masters * master
        sums = gradient_bytes(plan, flat)
        by_home[Home.DEVICE]["grads"] += sums.local
        away = home.moved and not one_memory and flat.optim_sharded and not sums.shared and not plan.reproducible
        by_home[Home.HOST if away else Home.DEVICE]["grads"] += 0 if sums.shared else sums.reduced
        pieces = [
            p for tile in tiles_of(flat, rank, plan.offload.tile_numel if home.moved else None) for p in tile.pieces
        ]
        count = sum(slot.numel > 0 for slot in flat.slots) if optimizer.whole else len(pieces)
        by_home[home.states]["optimizer"] += sum(piece.numel for piece in pieces) * optimizer.per_element
        by_home[Home.HOST if home.moved else Home.DEVICE]["optimizer"] += count * optimizer.per_piece
    names = {f"state {i}": itemsize for i, itemsize in enumerate(optimizer.states)}
    sizes = [
        FlatSizes(DTYPE_BYTES[f.dtype], 4 if f.dtype in _HALF else DTYPE_BYTES[f.dtype], names) for f in layout.flats
    ]
    return Tiers(
        by_home[Home.DEVICE],
        by_home[Home.HOST],
        by_home[Home.DISK],
        plan_tiles(layout, homes, sizes, rank, Whereabouts(plan.offload, one_memory)),
    )


@dataclass(frozen=True)
class GradientBytes:
    """Bytes of one flat's gradients on one rank."""

    local: int
    """What stays in place over micro-batches and steps; 0 where gradients are reduced as they come."""
    reduced: int
    """The sum over ranks."""
    shared: bool
    """Whether the sum lies in the memory of the local gradients."""


def gradient_bytes(plan: Plan, flat: FlatLayout) -> GradientBytes:
    """Bytes of the gradients of a trainable flat; see docs/decisions/0004."""
    weight = DTYPE_BYTES[flat.dtype]
    wide = flat.dtype not in _HALF and flat.dtype != "float32"
    accumulate = weight if wide else DTYPE_BYTES[plan.precision.accumulate]
    local = weight if wide else DTYPE_BYTES[plan.precision.local_accumulate]
    reduced = (flat.shard_numel if flat.optim_sharded else flat.padded_numel) * accumulate
    if flat.grad_sharded or plan.reproducible:
        return GradientBytes(0, reduced, shared=False)
    same = wide or plan.precision.accumulate == plan.precision.local_accumulate
    return GradientBytes(flat.padded_numel * local, reduced, shared=same)


def drops_sum(plan: Plan, flat: FlatLayout, *, one_memory: bool) -> bool:
    """Whether a flat's sum is in memory only from the first reduction of a window to the step."""
    return not one_memory and flat.trainable and flat.grad_sharded and plan.offload.optimizer is Home.DEVICE


def master_bytes(flat: FlatLayout) -> int:
    """Bytes of the values that the optimizer updates on one rank, whether or not they are the weights themselves."""
    width = 4 if flat.dtype in _HALF else DTYPE_BYTES[flat.dtype]
    return (flat.shard_numel if flat.optim_sharded else flat.padded_numel) * width
