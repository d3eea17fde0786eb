"""Which element of which parameter lives on which rank: integers only.

Words: a *flat* is a 1-D buffer of parameters laid end to end, padded so that it cuts into equal intervals; a *slot* is a
parameter's interval in its flat; a *shard* is one rank's interval of a flat; a *piece* is the part of a slot on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from shardledger.errors import LayoutError


@dataclass(frozen=True)
class Interval:
    """Elements ``start`` (included) to ``stop`` (excluded)."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in it."""
        return self.stop - self.start

    def overlap(self, other: Interval) -> Interval | None:
        """The common part, or None when there is none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else None


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its flat."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @property
    def interval(self) -> Interval:
        """Its elements in the flat."""
        return Interval(self.start, self.start + self.numel)


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that one rank holds."""

    name: str
    in_shard: Interval
    """Where it lies in the rank's shard."""
    in_parameter: Interval
    """Which elements of the flattened parameter it is."""


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """One flat buffer of a unit.

    Slots follow each other without gaps (unless they are aligned); only the end is padded, by fewer than
    ``world * alignment`` elements.
    """

    unit: int
    dtype: str
    trainable: bool
    param_sharded: bool
    grad_sharded: bool
    optim_sharded: bool
    world: int
    slots: tuple[Slot, ...]
    padded_numel: int
    slot_alignment: int = 1
    """Slots start at multiples of this; what lies between two slots is padding."""

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            if slot.start != _align(end, self.slot_alignment):
                raise LayoutError(f"slot {slot.name!r} starts at {slot.start}, its predecessor ends at {end}")
            end = slot.interval.stop
        if self.padded_numel < end or self.padded_numel % self.world:
            raise LayoutError(f"{self.padded_numel} elements cannot hold {end} in {self.world} equal intervals")

    @property
    def numel(self) -> int:
        """Elements up to the end of the last parameter."""
        return self.slots[-1].interval.stop if self.slots else 0

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return self.padded_numel // self.world

    def shard(self, rank: int) -> Interval:
        """The interval of ``rank``.

        Raises:
            LayoutError: no such rank.
        """
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is not one of {self.world} ranks")
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Non-empty parts of parameters in the shard of ``rank``, in order."""
        yield from self.pieces_in(self.shard(rank))

    def pieces_in(self, interval: Interval) -> Iterator[Piece]:
        """Non-empty parts of parameters in any interval of the flat, in order."""
        for slot in self.slots:
            common = slot.interval.overlap(interval)
            if common is not None:
                yield Piece(
                    slot.name,
                    Interval(common.start - interval.start, common.stop - interval.start),
                    Interval(common.start - slot.start, common.stop - slot.start),
                )


def make_flat(
    parameters: list[tuple[str, tuple[int, ...]]],
    *,
    unit: int,
    dtype: str,
    trainable: bool,
    sharded: tuple[bool, bool, bool],
    world: int,
    alignment: int,
) -> FlatLayout:
    """Lay parameters ``(name, shape)`` end to end. ``sharded`` is (PARAM, GRAD, OPTIM)."""
    if world < 1 or alignment < 1:
        raise LayoutError(f"cannot cut a flat for {world} ranks at an alignment of {alignment} elements")
    slots = []
    start = 0
    for name, shape in parameters:
        slots.append(Slot(name, shape, start))
        start += prod(shape)
    quantum = world * alignment
    return FlatLayout(
        unit=unit,
        dtype=dtype,
        trainable=trainable,
        param_sharded=sharded[0],
        grad_sharded=sharded[1],
        optim_sharded=sharded[2],
        world=world,
        slots=tuple(slots),
        padded_numel=_align(start, quantum),
    )


def with_aligned_slots(flat: FlatLayout, alignment: int) -> FlatLayout:
    """The same flat with every slot, and every shard, starting at a multiple of ``alignment`` elements.

    Kernels round differently at the tail of a vector; on such a flat no tail depends on where a shard ends.
    """
    slots, end = [], 0
    for slot in flat.slots:
        start = _align(end, alignment)
        slots.append(replace(slot, start=start))
        end = start + slot.numel
    return replace(flat, slots=tuple(slots), slot_alignment=alignment, padded_numel=_align(end, flat.world * alignment))


def _align(value: int, quantum: int) -> int:
    return -(-value // quantum) * quantum
