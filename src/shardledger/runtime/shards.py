"""Shards of parameters that rest in host memory or on disk: brought to the full flat when its unit is gathered."""

from __future__ import annotations

import torch

from shardledger.plan.roles import Home
from shardledger.runtime.offload import Offload
from shardledger.runtime.parameters import FlatParameters
from shardledger.transport.disk import AlignedBuffer, Transfer


class Shards:
    """Fills gathered flats, and reads ahead in the order in which units were gathered last time."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._of = {
            key: [(tile, place) for tile in tiles if (place := tile.place_of_shard()) is not None]
            for key, tiles in offload.tiles.items()
        }
        plan = offload.tile_plan
        self._free = [AlignedBuffer(plan.shard_buffer_bytes) for _ in range(plan.shard_buffers)]
        self._reading: dict[int, tuple[AlignedBuffer, list[Transfer]]] = {}
        """Flats being read, by ``id``."""
        self._followers: dict[tuple[int, int], int] = {}
        """Which flat was filled after two others, by ``id``."""
        self._last = (0, 0)
        self._first = 0
        """The flat that a step begins with: read ahead at the end of the step before, it would be void."""

    def fill(self, flat: FlatParameters) -> None:
        """Copy this rank's shard into the full flat, which has its memory."""
        target = flat.interval_of(flat.full)
        if flat.shard is not None:
            if self._offload.link is not None and flat.homes.shard is Home.HOST:
                self._offload.link.to_device(flat.shard, target).wait()
            else:
                target.copy_(flat.shard)
            return
        key = id(flat)
        buffer, transfers = self._reading.pop(key) if key in self._reading else self._start(key)
        for transfer in transfers:
            transfer.wait()
        start = 0
        for tile, place in self._of[id(flat)]:
            interval = tile.tile.interval
            values = buffer.tensor[start : start + interval.numel * place.itemsize].view(flat.dtype)
            self._copy(values, target[interval.start : interval.stop])
            start += place.nbytes
        self._free.append(buffer)
        self._read_ahead(id(flat))

    def forget(self) -> None:
        """The shards on disk are about to change: what was read of them ahead is void."""
        for buffer, transfers in self._reading.values():
            for transfer in transfers:
                transfer.wait()
            self._free.append(buffer)
        self._reading.clear()

    def buffers(self) -> list[torch.Tensor]:
        """Host memory that shards pass through; between steps."""
        self.forget()
        return [buffer.tensor for buffer in self._free]

    def _copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        if self._offload.link is None:
            target.copy_(values)
        else:
            self._offload.link.to_device(values, target).wait()

    def _start(self, key: int) -> tuple[AlignedBuffer, list[Transfer]]:
        if not self._free:
            self.forget()
        buffer = self._free.pop()
        transfers = []
        start = 0
        for tile, place in self._of[key]:
            if tile.buffer is not None:
                tile.settle()  # it may still be on its way to the disk
            file = tile.files.params
            assert file is not None
            transfers.append(file.read(place.offset, buffer, start, place.nbytes))
            start += place.nbytes
        return buffer, transfers

    def _read_ahead(self, key: int) -> None:
        before = self._last
        self._last = (before[1], key)
        self._followers[before] = key
        follower = self._followers.get(self._last)
        self._first = self._first or key
        wanted = follower is not None and follower != self._first and follower not in self._reading
        if wanted and follower is not None and self._free:
            self._reading[follower] = self._start(follower)
