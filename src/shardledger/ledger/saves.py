"""What saving a checkpoint takes on one rank, from plan and layout alone.

Over all ranks every element is written by one, the rank in whose shard it lies, at every stage. A save goes unit by unit;
an asynchronous one copies everything first, so that training can go on. See ``checkpoint.saving``.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardledger.layout.build import Layout
from shardledger.ledger.predict import OptimizerBytes
from shardledger.plan.spec import DTYPE_BYTES

_HALF = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, kw_only=True)
class SaveBytes:
    """Bytes of one rank."""

    written: int
    """Values that it writes: masters (or frozen weights), moments, step counters. File headers come on top."""
    copied: int
    """Host memory that holds copies meanwhile: the largest unit, or everything when the save is asynchronous."""


def save_bytes(layout: Layout, optimizer: OptimizerBytes, rank: int, *, asynchronous: bool) -> SaveBytes:
    """What a save of this layout writes and holds twice on ``rank``, once the optimizer has made its states."""
    units: dict[int, int] = {}
    for flat in layout.flats:
        weight = DTYPE_BYTES[flat.dtype]
        each = (4 if flat.dtype in _HALF else weight) + optimizer.per_element if flat.trainable else weight
        pieces = list(flat.pieces(rank))
        # Whatever is one number for a whole parameter is written by the rank that holds its first element.
        first = sum(piece.in_parameter.start == 0 for piece in pieces) if flat.trainable else 0
        nbytes = sum(piece.in_shard.numel for piece in pieces) * each + first * optimizer.per_piece
        units[flat.unit] = units.get(flat.unit, 0) + nbytes
    return SaveBytes(
        written=sum(units.values()), copied=sum(units.values()) if asynchronous else max(units.values(), default=0)
    )
