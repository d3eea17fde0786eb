"""One tile of offloaded optimizer states: what the optimizer holds of it, at hand or away.

While a tile is away the optimizer's tensors are stand-ins: one NaN expanded to their shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardledger.layout.tiles import MASTER, SHARD, Component, DiskTile, Tile
from shardledger.runtime.optimizer import Piece
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.released import away, is_away
from shardledger.transport.disk import AlignedBuffer, DiskFile, Transfer


@dataclass(frozen=True)
class TileFiles:
    """The two files of a rank; None where nothing of that role rests on disk."""

    optimizer: DiskFile | None
    params: DiskFile | None

    def close(self) -> None:
        """Close and remove both."""
        for file in (self.optimizer, self.params):
            if file is not None:
                file.close()


@dataclass(eq=False)
class LiveTile:
    """Moves one tile between its places on disk and a buffer in host memory."""

    flat: FlatParameters
    tile: Tile
    disk: DiskTile | None
    """None: nothing of it rests on disk."""
    dtypes: Mapping[str, torch.dtype]
    """Of each state that has a value for every element, for fp32 masters."""
    files: TileFiles
    pieces: list[Piece] = field(default_factory=list)
    buffer: AlignedBuffer | None = None
    under_way: list[Transfer] = field(default_factory=list)
    """Reads into, or writes from, ``buffer``."""
    written: bool = False
    """Whether the disk has states of the optimizer."""

    # --- bytes ---------------------------------------------------------------------------------------------------

    def start_read(self, buffer: AlignedBuffer, *, shard: bool = False) -> None:
        """Start bringing what has been written to ``buffer``; the shard, which is made from the masters, if asked."""
        assert self.disk is not None
        self.buffer = buffer
        for params, file in ((False, self.files.optimizer), (True, self.files.params)):
            parts = [
                c
                for c in self.disk.of_file(params=params)
                if c.name == MASTER or (shard if c.name == SHARD else self.written)  # the first ones of the file
            ]
            if parts and file is not None:
                nbytes = sum(part.nbytes for part in parts)
                self.under_way.append(file.read(parts[0].offset, buffer, parts[0].start, nbytes))

    def start_write(self) -> None:
        """Start writing the buffer back."""
        assert self.disk is not None and self.buffer is not None
        for params, file in ((False, self.files.optimizer), (True, self.files.params)):
            parts = self.disk.of_file(params=params)
            if parts and file is not None:
                nbytes = sum(part.nbytes for part in parts)
                self.under_way.append(file.write(parts[0].offset, self.buffer, parts[0].start, nbytes))

    def settle(self) -> None:
        """Wait for what is under way."""
        transfers, self.under_way = self.under_way, []
        for transfer in transfers:
            transfer.wait()

    @property
    def settled(self) -> bool:
        """Whether nothing is under way."""
        return all(transfer.done for transfer in self.under_way)

    def leave(self) -> AlignedBuffer | None:
        """Give up the buffer, after a write has ended."""
        self.settle()
        buffer, self.buffer = self.buffer, None
        return buffer

    # --- what the optimizer sees ---------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Point the optimizer's tensors at the buffer, when the reads have ended."""
        self.settle()
        for component in self.disk.components if self.disk else ():
            if component.name == SHARD:
                continue
            values = self.values(component)
            for piece in self.pieces:
                part = self._part(piece, values)
                if component.name == MASTER:
                    piece.values.data = part
                    continue
                states = optimizer.state.get(piece.values, {})
                if is_away(states.get(component.name)):
                    states[component.name] = part

    def detach(self, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> None:
        """Take the optimizer's tensors away from the buffer; ``keep``: what it has made anew comes to the buffer."""
        for component in self.disk.components if self.disk else ():
            values = self.values(component)
            if component.name == SHARD:
                if keep and self.flat.shard_follows:
                    values.copy_(self.masters())
                continue
            for piece in self.pieces:
                part = self._part(piece, values)
                states = optimizer.state.get(piece.values, {})
                if component.name == MASTER:
                    if keep and piece.values.data_ptr() != part.data_ptr():
                        part.copy_(piece.values.detach())
                elif isinstance(state := states.get(component.name), torch.Tensor):
                    self.written = True
                    if keep and state.data_ptr() != part.data_ptr():
                        part.copy_(state)
                    states[component.name] = away(part)
        if self._component(MASTER) is not None:
            for piece in self.pieces:
                piece.values.data = away(piece.values)

    def masters(self) -> torch.Tensor:
        """The tile's masters, 1-D, wherever they are at hand."""
        component = self._component(MASTER)
        if component is not None and self.buffer is not None:
            return self.values(component)
        assert self.flat.master is not None
        return self.flat.master[self.tile.interval.start : self.tile.interval.stop]

    def values(self, component: Component) -> torch.Tensor:
        """The part of the buffer that holds a component, 1-D."""
        assert self.buffer is not None
        nbytes = self.tile.interval.numel * component.itemsize
        return self.buffer.tensor[component.start : component.start + nbytes].view(self._dtype(component.name))

    def place_of_shard(self) -> Component | None:
        """Where the disk has what is gathered of the tile; None where that rests elsewhere."""
        return next(iter(self.disk.of_file(params=True)), None) if self.disk else None

    def has(self, name: str) -> bool:
        """Whether the disk has a component of that name."""
        return self._component(name) is not None

    def component(self, name: str) -> torch.Tensor:
        """The values of a component that the disk has, 1-D."""
        found = self._component(name)
        assert found is not None
        return self.values(found)

    def _component(self, name: str) -> Component | None:
        return next((c for c in self.disk.components if c.name == name), None) if self.disk else None

    def _dtype(self, name: str) -> torch.dtype:
        if name == SHARD:
            return self.flat.dtype
        return self.flat.master_dtype if name == MASTER else state_dtype(self.dtypes[name], self.flat.master_dtype)

    def _part(self, piece: Piece, values: torch.Tensor) -> torch.Tensor:
        start = piece.start - self.tile.interval.start
        return values[start : start + piece.values.numel()].view(piece.values.shape)


def state_dtype(kept: torch.dtype, master: torch.dtype) -> torch.dtype:
    """Dtype of a state for masters of another dtype than fp32, for which it is ``kept``: moments are as wide as they."""
    return master if kept == torch.float32 else kept
