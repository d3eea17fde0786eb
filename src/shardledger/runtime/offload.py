"""Optimizer states that rest in host memory or on disk: the step, tile by tile, and access to them outside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardledger.layout.build import Layout
from shardledger.layout.flat import FlatLayout
from shardledger.layout.homes import flat_homes
from shardledger.layout.tiles import LINK_BUFFERS, MASTER, SHARD, FlatSizes, Whereabouts, plan_tiles
from shardledger.plan.plan import Plan
from shardledger.plan.roles import Home
from shardledger.runtime.describe import dtype_of
from shardledger.runtime.optimizer import Piece
from shardledger.runtime.parameters import FlatParameters, master_dtype
from shardledger.runtime.tile import LiveTile, TileFiles, state_dtype
from shardledger.transport import Transport
from shardledger.transport.disk import AlignedBuffer, DiskFile, TierTraffic
from shardledger.transport.disk_folder import claim_folder, remove_folder, remove_with
from shardledger.transport.heap import return_freed_memory
from shardledger.transport.link import HostLink


@dataclass(frozen=True)
class Tiers:
    """What went over each link."""

    host: TierTraffic = field(default_factory=TierTraffic)
    disk: TierTraffic = field(default_factory=TierTraffic)


class Offload:
    """The tiles of one engine on one rank. What it needs is reserved when it is made; collective."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        dtypes: Mapping[str, torch.dtype],
        transport: Transport,
        device: torch.device,
        *,
        one_memory: bool,
    ) -> None:
        """``dtypes``: of each state of the optimizer that has a value for every element.

        Raises:
            ConfigError: a folder that cannot be written to.
            DoesNotFitError: the disk is too small.
            RanksDisagreeError: another rank failed so.
        """
        self.plan = plan.offload
        self.homes = flat_homes(layout, plan.offload, one_memory=one_memory)
        self.tiers = Tiers()
        self.tiles: dict[int, list[LiveTile]] = {}
        """Tiles of each flat that has some, by the flat's ``id``."""
        self._dtypes = dtypes
        sizes = [flat_sizes(flat, dtypes) for flat in layout.flats]
        self.tile_plan = plan_tiles(layout, self.homes, sizes, transport.rank, Whereabouts(plan.offload, one_memory))
        self._folders: list[Path] = []
        self.files = self._claim(transport)
        self.link: HostLink | None = None
        """The way between device and host memory; None where those are one."""
        if one_memory and Home.DISK in (self.plan.optimizer, self.plan.params):
            return_freed_memory()
        if not one_memory:
            self.link = HostLink(
                device,
                pinned=self.plan.pinned,
                traffic=self.tiers.host,
                chunk_bytes=self.tile_plan.link_buffer_bytes,
                buffers=LINK_BUFFERS,
            )
        self._free = [AlignedBuffer(self.tile_plan.tile_buffer_bytes) for _ in range(self.tile_plan.tile_buffers)]
        self._writing: deque[LiveTile] = deque()
        self._open: dict[int, int] = {}
        """How often each flat has been opened, by ``id``."""

    # --- birth and end -------------------------------------------------------------------------------------------

    def settle_in(self, index: int, flat: FlatParameters) -> None:
        """Bring the initial values of flat number ``index`` to their homes."""
        tiles = [LiveTile(flat, tile, place, self._dtypes, self.files) for tile, place in self.tile_plan.tiles[index]]
        if not flat.homes.leaves_device:
            return
        self.tiles[id(flat)] = tiles
        self._put_away(flat, None, keep=True)

    def take_over(self, pieces: Iterable[Piece], optimizer: torch.optim.Optimizer) -> None:
        """Give each tile the pieces that the optimizer holds of it, and bring states that it has already to their home."""
        by_place = {(id(piece.flat), piece.start): piece for piece in pieces}
        for tiles in self.tiles.values():
            for tile in tiles:
                tile.pieces = [by_place[id(tile.flat), p.start] for p in tile.tile.pieces]
            if any(piece.values in optimizer.state for tile in tiles for piece in tile.pieces):
                with self.opened([tiles[0].flat], optimizer, write=True):
                    continue

    def _claim(self, transport: Transport) -> TileFiles:
        """Reserve the files; collective."""
        made: list[DiskFile | None] = []
        try:
            for role, path, nbytes in (
                ("optimizer", self.plan.optimizer_path, self.tile_plan.optimizer_file_bytes),
                ("param", self.plan.params_path, self.tile_plan.params_file_bytes),
            ):
                if path is None:
                    made.append(None)
                    continue
                folder = claim_folder(path, nbytes, transport, f"zero_optimization.offload_{role}.nvme_path")
                self._folders.append(folder)
                remove_with(self, folder)  # also when the program ends without destroy
                made.append(DiskFile(folder / f"{role}.bin", nbytes, self.tiers.disk))
        except BaseException:
            for file in made:
                if file is not None:
                    file.close()
            for folder in self._folders:
                remove_folder(folder)
            raise
        return TileFiles(*made)

    def close(self) -> None:
        """Wait for what is under way, and remove the files."""
        if self.link is not None:
            self.link.close()
        self.files.close()
        for folder in self._folders:
            remove_folder(folder)
        self.tiles.clear()
        self._free.clear()

    def check(self) -> None:
        """Raise ``EngineStateError`` if a disk has failed: what rests there is lost, and must not be used or saved."""
        for file in (self.files.optimizer, self.files.params):
            if file is not None:
                file.check()

    # --- the step ------------------------------------------------------------------------------------------------

    def in_turn(self, tiles: Sequence[LiveTile], optimizer: torch.optim.Optimizer) -> Iterator[LiveTile]:
        """Yield each tile while its states are at hand; the next is read, and the last written, meanwhile."""
        try:
            for number, tile in enumerate(tiles):
                if tile.disk is not None:
                    if tile in self._writing:
                        self._collect(until=tile)
                    if tile.buffer is None:
                        tile.start_read(self._buffer())
                    self._look_ahead(tiles[number + 1 : number + 2])
                tile.attach(optimizer)
                try:
                    yield tile
                finally:
                    tile.detach(optimizer)
                    if tile.disk is not None:
                        tile.start_write()
                        self._writing.append(tile)
                        if not self.plan.write_behind:
                            self._collect()
        finally:
            self._forget_read_ahead(tiles)

    def _forget_read_ahead(self, tiles: Sequence[LiveTile]) -> None:
        """A step that was interrupted may have read a tile that nobody stepped."""
        for tile in tiles:
            if tile.buffer is not None and tile not in self._writing:
                buffer = tile.leave()
                assert buffer is not None
                self._free.append(buffer)

    def publish(self, tile: LiveTile) -> None:
        """Bring a tile's new masters to the weights that are made from them, where those are on the device or host."""
        flat, interval = tile.flat, tile.tile.interval
        if flat.layout.param_sharded:
            target = flat.shard if flat.shard_follows else None
        elif flat.master_is_weights:
            target = None
        else:
            target = flat.interval_of(flat.full) if flat.layout.optim_sharded else flat.full
        if target is None:
            return
        part = target[interval.start : interval.stop]
        if self.link is None or flat.homes.shard is Home.HOST:
            part.copy_(tile.masters())
        else:
            self.link.to_device(tile.masters(), part).wait()

    def on_host(self, gradient: torch.Tensor) -> torch.Tensor:
        """A reduced gradient of the device where the optimizer steps: as it is, or a copy in host memory."""
        if self.link is None:
            return gradient
        copy = torch.empty_like(gradient, device="cpu")
        self.link.to_host(gradient, copy, add=False).wait()
        return copy

    def buffers(self) -> list[torch.Tensor]:
        """Host memory that tiles pass through; between steps."""
        self._collect()
        return [buffer.tensor for buffer in self._free]

    def _buffer(self) -> AlignedBuffer:
        if not self._free:
            self._collect(until=self._writing[0])
        return self._free.pop()

    def _look_ahead(self, tiles: Sequence[LiveTile]) -> None:
        while self._writing and self._writing[0].settled:
            self._collect(until=self._writing[0])
        for tile in tiles if self.plan.read_ahead else ():
            if tile.disk is not None and tile.buffer is None and self._free:
                tile.start_read(self._free.pop())

    def _collect(self, until: LiveTile | None = None) -> None:
        """Wait for writes, the oldest first, and take their buffers back."""
        while self._writing:
            tile = self._writing.popleft()
            buffer = tile.leave()
            assert buffer is not None
            self._free.append(buffer)
            if tile is until:
                return

    # --- outside the step ----------------------------------------------------------------------------------------

    @contextmanager
    def opened(
        self, flats: Sequence[FlatParameters], optimizer: torch.optim.Optimizer | None, *, write: bool
    ) -> Iterator[None]:
        """Masters, shards and states of ``flats`` are at hand inside; ``write``: changes are kept."""
        for flat in flats:
            count, dirty = self._open.get(id(flat), (0, False))
            if not count:
                self._fetch(flat, optimizer)
            self._open[id(flat)] = (count + 1, dirty or write)
        try:
            yield
        finally:
            for flat in flats:
                count, dirty = self._open.pop(id(flat))
                if count > 1:
                    self._open[id(flat)] = (count - 1, dirty)
                else:
                    self._put_away(flat, optimizer, keep=dirty)

    def _fetch(self, flat: FlatParameters, optimizer: torch.optim.Optimizer | None) -> None:
        tiles = [tile for tile in self.tiles.get(id(flat), ()) if tile.disk is not None]
        self._collect()
        for tile in tiles:
            assert tile.disk is not None
            tile.start_read(AlignedBuffer(tile.disk.nbytes), shard=True)
        for tile in tiles:
            tile.settle()
        for name in (MASTER, SHARD):
            if any(tile.has(name) for tile in tiles):
                whole = torch.cat([tile.component(name) for tile in tiles])
                if name == MASTER:
                    flat.master = whole
                if name == SHARD or flat.homes.shard is Home.DISK and flat.homes.shard_is_master:
                    flat.shard = whole
        if optimizer is not None:
            for tile in tiles:
                tile.attach(optimizer)
                for piece in tile.pieces if tile.has(MASTER) else ():
                    assert flat.master is not None
                    start = piece.start
                    piece.values.data = flat.master[start : start + piece.values.numel()].view(piece.values.shape)

    def _put_away(
        self,
        flat: FlatParameters,
        optimizer: torch.optim.Optimizer | None,
        *,
        keep: bool,
    ) -> None:
        tiles = [tile for tile in self.tiles.get(id(flat), ()) if tile.disk is not None]
        for tile in tiles:
            assert tile.disk is not None
            if tile.buffer is None:
                tile.buffer = AlignedBuffer(tile.disk.nbytes)
            changed = False
            for name, source in ((SHARD, flat.shard), (MASTER, flat.master)):
                if keep and tile.has(name) and source is not None:
                    changed = True
                    tile.component(name).copy_(source[tile.tile.interval.start : tile.tile.interval.stop])
            if optimizer is not None:
                tile.detach(optimizer, keep=keep)
            if keep and (changed or tile.written):
                tile.start_write()
            tile.leave()
        if any(tile.has(MASTER) for tile in tiles):
            flat.master = None
        if flat.homes.shard is Home.DISK and tiles:
            flat.shard = None


def flat_sizes(flat: FlatLayout, dtypes: Mapping[str, torch.dtype]) -> FlatSizes:
    """Bytes per element of everything a flat has."""
    weight = dtype_of(flat.dtype)
    master = master_dtype(weight)
    return FlatSizes(
        weight.itemsize, master.itemsize, {name: state_dtype(d, master).itemsize for name, d in dtypes.items()}
    )
