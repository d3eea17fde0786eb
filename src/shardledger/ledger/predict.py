"""Bytes of training state on one rank, from plan and layout alone.

The article's account for Adam in mixed precision (arXiv 1910.02054, section 3.1): 2 bytes of weights, 2 of gradients and
12 of fp32 masters and moments per parameter. What this engine keeps differs where it needs less, or where exact sums cost
an fp32 gradient; see ``state_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardledger.layout.build import Layout
from shardledger.layout.flat import FlatLayout
from shardledger.plan.plan import Plan
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


def state_bytes(plan: Plan, layout: Layout, optimizer: OptimizerBytes, rank: int) -> dict[str, int]:
    """Bytes of params, grads, master and optimizer on ``rank``, padding included.

    * params: full flats in the compute dtype; a shard where PARAM is sharded. fp32 masters of a sharded trainable flat
      are its only copy and count as params when the weights are fp32 themselves, else as master.
    * grads: the reduced sum in the accumulation dtype (a shard when OPTIM is sharded), plus the local gradient where
      GRAD is not sharded and they cannot share memory.
    * master: fp32 masters, where the weights have another dtype.
    * optimizer: every parameter piece that has had a gradient.
    """
    total = {"params": 0, "grads": 0, "master": 0, "optimizer": 0}
    for flat in layout.flats:
        weight = DTYPE_BYTES[flat.dtype]
        kept = flat.shard_numel if flat.param_sharded else flat.padded_numel
        if not flat.trainable:
            total["params"] += kept * weight
            continue
        master = 4 if flat.dtype in _HALF else weight
        masters = flat.shard_numel if flat.optim_sharded else flat.padded_numel
        separate = master != weight
        total["params"] += 0 if separate and flat.param_sharded else kept * weight
        total["master"] += masters * master if separate else 0
        total["grads"] += _gradient_bytes(plan, flat)
        ranks = [rank] if flat.optim_sharded else range(flat.world)
        pieces = [piece for r in ranks for piece in flat.pieces(r)]
        count = sum(slot.numel > 0 for slot in flat.slots) if optimizer.whole else len(pieces)
        elements = sum(piece.in_shard.numel for piece in pieces)
        total["optimizer"] += elements * optimizer.per_element + count * optimizer.per_piece
    return total


def _gradient_bytes(plan: Plan, flat: FlatLayout) -> int:
    gradients = gradient_bytes(plan, flat)
    return gradients.local + (0 if gradients.shared else gradients.reduced)


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


def master_bytes(flat: FlatLayout) -> int:
    """Bytes of the values that the optimizer updates on one rank, whether or not they are the weights themselves."""
    width = 4 if flat.dtype in _HALF else DTYPE_BYTES[flat.dtype]
    return (flat.shard_numel if flat.optim_sharded else flat.padded_numel) * width
