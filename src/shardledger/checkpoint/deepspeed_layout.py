"""Where DeepSpeed puts each element of a parameter: integers only.

Stages 1 and 2 lay a param group end to end and cut the whole into one interval per rank. Stage 3 cuts every parameter on its
own and lays each rank's parts end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class RankPiece:
    """A run of elements of one parameter in the flat tensor of one rank."""

    rank: int
    in_flat: int
    """Index of its first element in the rank's flat tensor."""
    in_parameter: int
    """Index of its first element in the flattened parameter."""
    numel: int


@dataclass(frozen=True)
class GroupLayout:
    """One flat tensor per rank, holding parts of these parameters."""

    world: int
    per_parameter: bool
    """Whether each parameter is cut on its own (stage 3), rather than the whole group."""
    partition_numel: int
    """Elements of one rank's flat tensor, padding included."""
    slots: Mapping[str, tuple[int, int]]
    """Name to (offset, elements); the offset counts in the whole group, or in a rank's flat tensor for stage 3."""

    def pieces(self, name: str) -> Iterator[RankPiece]:
        """The parts of a parameter, in the order of its elements; together they are all of it."""
        offset, numel = self.slots[name]
        if self.per_parameter:
            part = -(-numel // self.world)
            for rank in range(self.world):
                length = min(part, numel - rank * part)
                if length > 0:
                    yield RankPiece(rank, offset, rank * part, length)
            return
        at = offset
        while at < offset + numel:
            rank, inside = divmod(at, self.partition_numel)
            length = min(self.partition_numel - inside, offset + numel - at)
            yield RankPiece(rank, inside, at - offset, length)
            at += length


def whole_group(
    shapes: Mapping[str, Sequence[int]], paddings: Sequence[int] | None, partition_numel: int, world: int
) -> GroupLayout:
    """Stages 1 and 2. ``paddings`` are the elements left free behind each parameter (``param_alignment_paddings``)."""
    slots, offset = {}, 0
    for index, (name, shape) in enumerate(shapes.items()):
        slots[name] = (offset, prod(shape))
        offset += prod(shape) + (paddings[index] if paddings else 0)
    return GroupLayout(world, False, partition_numel, slots)


def parameter_by_parameter(shapes: Mapping[str, Sequence[int]], world: int) -> GroupLayout:
    """Stage 3: ``shapes`` are the parameters of one sub-group."""
    slots, offset = {}, 0
    for name, shape in shapes.items():
        slots[name] = (offset, prod(shape))
        offset += -(-prod(shape) // world)
    return GroupLayout(world, True, offset, slots)
