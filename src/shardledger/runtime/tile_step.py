"""The optimizer step where states rest away from the device: tile after tile, each published when its flat is done.

``torch.optim`` knows nothing of tiles: it is given the tensors of one tile at a time (``narrowed``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch

from shardledger.runtime.executor import Executor
from shardledger.runtime.narrowed import Narrowing
from shardledger.runtime.offload import Offload
from shardledger.runtime.optimizer import Piece, point
from shardledger.runtime.parameters import FlatParameters
from shardledger.transport import Work

SumOf = Callable[[FlatParameters], "torch.Tensor | None"]
"""Gives the scaled gradient of a flat."""


class TileStep:
    """One optimizer step."""

    def __init__(self, offload: Offload, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        self._offload = offload
        self._optimizer = optimizer
        self._step = step
        self._narrowing = Narrowing(optimizer)

    def run(self, executor: Executor, pieces: Sequence[Piece], present: Mapping[str, bool], sum_of: SumOf) -> None:
        """Update everything that has a gradient on any rank, and bring the new weights to all ranks.

        Flats are replicated in the order of units, whatever this rank holds of them: all ranks do the same.
        """
        if executor.shards is not None:
            executor.shards.forget()
        resident = [piece for piece in pieces if not piece.flat.homes.moved]
        sums = {id(flat): sum_of(flat) for flat in {id(piece.flat): piece.flat for piece in resident}.values()}
        for piece in resident:
            point(piece, sums[id(piece.flat)], present)
        if resident:
            with self._narrowing.to(self._narrowing.held(resident)):
                self._step()
        tiles = [
            tile
            for held in self._offload.tiles.values()
            for tile in held
            if any(present[piece.name] for piece in tile.pieces)
        ]
        left = Counter(id(tile.flat) for tile in tiles)
        order = iter([(flat, unit.label) for unit in executor.units for flat in unit.flats if flat.layout.trainable])
        waiting = next(order, None)
        works: list[Work] = []

        def replicate_done() -> None:
            nonlocal waiting
            while waiting is not None and not left[id(waiting[0])]:
                if not waiting[0].homes.moved:
                    waiting[0].publish()
                works.extend(executor.replicate(*waiting))
                waiting = next(order, None)

        replicate_done()
        gradient: torch.Tensor | None = None
        of: FlatParameters | None = None
        with closing(self._offload.in_turn(tiles, self._optimizer)) as in_turn:
            for tile in in_turn:
                if tile.flat is not of:
                    of, gradient = tile.flat, sum_of(tile.flat)
                for piece in tile.pieces:
                    point(piece, gradient, present)
                with self._narrowing.to(self._narrowing.held(tile.pieces)):
                    self._step()
                self._offload.publish(tile)
                left[id(tile.flat)] -= 1
                replicate_done()
        for work in works:
            work.wait()
