"""Tiles: the parts of a flat whose optimizer states are stepped, and moved from and to their home, at once.

Parameters are cut only where they are larger than a tile, at multiples of ``CUT`` elements from their start: torch's fused
kernels round differently at the tail of a tensor, and a cut must not change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardledger.layout.build import Layout
from shardledger.layout.flat import FlatLayout, Interval
from shardledger.layout.homes import FlatHomes
from shardledger.plan.plan import Offload
from shardledger.plan.roles import Home

CUT = 1024
"""Elements: many vectors of any instruction set, and whole cache lines."""

SECTOR = 4096
"""Bytes: what direct reads and writes must be multiples of, in memory and in the file."""

MASTER, SHARD = "master", "shard"

TILES_AT_ONCE = 3
"""Tiles in host memory at once: one is stepped, one is read ahead, one is written behind. More would gain nothing."""

LINK_BUFFERS = 4
_LARGEST_CHUNK = 16 << 20
"""Bytes: enough for the full speed of any link."""

SHARDS_AT_ONCE = 2
"""Flats whose shards are in host memory at once: one is copied to the device, the next is read."""


@dataclass(frozen=True)
class TilePiece:
    """A part of one parameter that the optimizer holds as one tensor."""

    name: str
    start: int
    """First element in the masters."""
    numel: int


@dataclass(frozen=True)
class Tile:
    """Consecutive elements of a flat's masters on one rank."""

    interval: Interval
    pieces: tuple[TilePiece, ...]


@dataclass(frozen=True)
class Component:
    """One kind of value of a tile on disk."""

    name: str
    """``"master"``, ``"shard"``, or a state of the optimizer."""
    itemsize: int
    nbytes: int
    """Bytes taken, a multiple of ``SECTOR``."""
    in_params: bool
    """Whether it lies in the file of parameters rather than in the optimizer's."""
    start: int
    """First byte in a buffer that holds the whole tile."""
    offset: int
    """First byte in its file."""


@dataclass(frozen=True)
class DiskTile:
    """What a tile has on disk. Components of one file follow each other, those of the optimizer's file first."""

    components: tuple[Component, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer that holds all of it."""
        return sum(c.nbytes for c in self.components)

    def of_file(self, *, params: bool) -> tuple[Component, ...]:
        """Components in one file."""
        return tuple(c for c in self.components if c.in_params is params)


def tiles_of(flat: FlatLayout, rank: int, limit: int | None) -> tuple[Tile, ...]:
    """Cut what ``rank`` updates of a flat into tiles of at most about ``limit`` elements; None makes one tile.

    Frozen flats have no pieces; their shard is cut alike. Together the tiles cover the masters, padding included.
    """
    whole = Interval(0, flat.shard_numel if flat.optim_sharded or flat.param_sharded else flat.padded_numel)
    limit = whole.numel if limit is None else max(CUT, limit // CUT * CUT)
    groups: list[list[TilePiece]] = [[]]
    held = 0
    for piece in _pieces(flat, rank, limit):
        if groups[-1] and held + piece.numel > limit:
            groups.append([])
            held = 0
        groups[-1].append(piece)
        held += piece.numel
    starts = [0, *(group[0].start for group in groups[1:]), whole.stop]
    trainable = flat.trainable
    return tuple(
        Tile(Interval(start, stop), tuple(group) if trainable else ())
        for group, start, stop in zip(groups, starts, starts[1:], strict=False)
    )


def _pieces(flat: FlatLayout, rank: int, limit: int) -> Iterator[TilePiece]:
    alone = flat.optim_sharded or flat.param_sharded
    for other in [rank] if alone else range(flat.world):
        offset = 0 if alone else flat.shard(other).start
        for piece in flat.pieces(other):
            start, stop = offset + piece.in_shard.start, offset + piece.in_shard.stop
            for first in range(start, stop, limit):
                yield TilePiece(piece.name, first, min(limit, stop - first))


@dataclass(frozen=True)
class FlatSizes:
    """Bytes per element of what a flat has."""

    weight: int
    master: int
    states: Mapping[str, int]
    """Of each state that has a value for every element."""


@dataclass(frozen=True)
class Whereabouts:
    """What was asked of the tiers, and what they are."""

    offload: Offload
    one_memory: bool
    """Whether the device computes in host memory."""


@dataclass(frozen=True)
class TilePlan:
    """All tiles of one rank, with their places in its two files."""

    tiles: tuple[tuple[tuple[Tile, DiskTile | None], ...], ...]
    """Of each flat of the layout, in its order; none where nothing leaves the device."""
    optimizer_file_bytes: int
    params_file_bytes: int
    tile_buffers: int
    """Buffers for tiles in host memory."""
    tile_buffer_bytes: int
    """Bytes of one of them: the largest tile."""
    shard_buffers: int
    """Buffers for shards of parameters on their way from the disk."""
    shard_buffer_bytes: int
    link_buffers: int
    """Buffers between the device and host memory; none where those are one."""
    link_buffer_bytes: int

    @property
    def staging_bytes(self) -> int:
        """Host memory of all buffers."""
        return (
            self.tile_buffers * self.tile_buffer_bytes
            + self.shard_buffers * self.shard_buffer_bytes
            + self.link_buffers * self.link_buffer_bytes
        )


def plan_tiles(
    layout: Layout, homes: Sequence[FlatHomes], sizes: Sequence[FlatSizes], rank: int, where: Whereabouts
) -> TilePlan:
    """Cut everything that leaves the device, and give what rests on disk its place. ``homes``, ``sizes``: of each flat."""
    offload = where.offload
    beyond = sum(
        tile.interval.numel * (size.master + sum(size.states.values()))
        for flat, home, size in zip(layout.flats, homes, sizes, strict=True)
        for tile in (tiles_of(flat, rank, None) if home.leaves_device else ())
    )
    ends = {True: 0, False: 0}
    found = []
    for flat, home, size in zip(layout.flats, homes, sizes, strict=True):
        tiles = []
        for tile in tiles_of(flat, rank, offload.tile_numel) if home.leaves_device else ():
            components = []
            start = 0
            for name, itemsize, in_params in _on_disk(home, size):
                nbytes = -(-tile.interval.numel * itemsize // SECTOR) * SECTOR
                components.append(Component(name, itemsize, nbytes, in_params, start, ends[in_params]))
                start += nbytes
                ends[in_params] += nbytes
            tiles.append((tile, DiskTile(tuple(components)) if components else None))
        found.append(tuple(tiles))
    stepped = [place.nbytes for tiles in found for tile, place in tiles if place is not None and tile.pieces]
    shards = [
        total
        for tiles in found
        if (total := sum(c.nbytes for _, place in tiles if place is not None for c in place.of_file(params=True)))
    ]
    return TilePlan(
        tiles=tuple(found),
        optimizer_file_bytes=ends[False],
        params_file_bytes=ends[True],
        tile_buffers=min(len(stepped), offload.buffers, TILES_AT_ONCE),
        tile_buffer_bytes=max(stepped, default=0),
        shard_buffers=min(len(shards), offload.param_buffers, SHARDS_AT_ONCE),
        shard_buffer_bytes=max(shards, default=0),
        link_buffers=0 if where.one_memory or not beyond else LINK_BUFFERS,
        link_buffer_bytes=_chunk(beyond),
    )


def _chunk(beyond: int) -> int:
    """Bytes of a buffer of the link: all of them together take at most 1/32 of what rests ``beyond`` it."""
    chunk = SECTOR
    while chunk < _LARGEST_CHUNK and 2 * chunk * LINK_BUFFERS * 32 <= beyond:
        chunk *= 2
    return chunk


def _on_disk(homes: FlatHomes, sizes: FlatSizes) -> list[tuple[str, int, bool]]:
    """Name, bytes per element and file of each component that a flat's tiles have on disk."""
    wanted: list[tuple[str, int, bool]] = []
    if homes.master is Home.DISK:
        wanted.append((MASTER, sizes.master, False))
    if homes.moved and homes.states is Home.DISK:
        wanted += [(name, itemsize, False) for name, itemsize in sizes.states.items()]
    if homes.shard is Home.DISK:
        alone = homes.moved and homes.shard_is_master
        wanted.append((MASTER, sizes.master, True) if alone else (SHARD, sizes.weight, True))
    return wanted
