"""Collectives that the backend provides: NCCL on GPUs, and the fake group of a dry run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardledger.errors import PeerLostError
from shardledger.transport.port import Counters, ReduceHow, Work

# torch 2.13 renamed both and warns at the old names, which are all that earlier versions have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NativeTransport:
    """The ``Transport`` over native collectives. The backend fixes the order of sums and takes them in the wire dtype."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.wire = "nccl"
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.counters = Counters()
        self.where = "initialize"
        self._group = group
        self._device = device

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, how: ReduceHow) -> Work:
        """See ``Transport.reduce_scatter``. The whole of ``full`` is one bucket."""
        self.counters.add("reduce_scatter", full.numel() - out.numel(), how.wire.itemsize)
        source = full.to(how.wire)
        direct = not how.accumulate and out.dtype == how.wire
        target = out if direct else torch.empty(out.numel(), dtype=how.wire, device=full.device)
        work = self._start(f"reduction of unit {how.label}", _reduce_scatter, target, source)

        def finish() -> None:
            self._settle(f"reduction of unit {how.label}", work, source)
            if how.accumulate:
                out.add_(target)
            elif not direct:
                out.copy_(target)

        return Work(self.counters, finish)

    def all_gather(self, full: torch.Tensor, label: str) -> Work:
        """See ``Transport.all_gather``."""
        shard = full.view(self.world, -1)[self.rank]
        self.counters.add("all_gather", full.numel() - shard.numel(), full.element_size())
        work = self._start(f"all-gather of unit {label}", _all_gather, full, shard)
        return Work(self.counters, lambda: self._settle(f"all-gather of unit {label}", work, shard))

    def gather_to(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.gather_to``."""
        rows = list(full.view(self.world, -1).unbind(0)) if full is not None else None
        if self.rank != root:
            self.counters.add("gather", shard.numel(), shard.element_size())
        self._now(f"gather of {label}", dist.gather, shard, rows, root)

    def scatter_from(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.scatter_from``."""
        rows = list(full.view(self.world, -1).unbind(0)) if full is not None else None
        if self.rank == root:
            self.counters.add("scatter", shard.numel() * (self.world - 1), shard.element_size())
        self._now(f"scatter of {label}", dist.scatter, shard, rows, root)

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> None:
        """See ``Transport.broadcast``."""
        if self.rank == root:
            self.counters.add("broadcast", tensor.numel() * (self.world - 1), tensor.element_size())
        self._now(f"broadcast of {label}", dist.broadcast, tensor, root)

    def exchange(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``Transport.exchange``."""
        self.counters.add("control", values.numel() * (self.world - 1), values.element_size())
        rows = torch.empty(self.world * values.numel(), dtype=values.dtype, device=self._device)
        self._now(label, _all_gather, rows, values.to(self._device))
        return rows.view(self.world, -1).to(values.device)

    def close(self) -> None:
        """See ``Transport.close``. The backend's own watchdog is what ends ranks that disagree."""

    def give_up(self, reason: str) -> None:
        """See ``Transport.give_up``: the backend has no way to say so."""

    def _now(self, what: str, call, *args) -> None:  # type: ignore[no-untyped-def]
        def run() -> None:
            try:
                call(*args, group=self._group)
            except RuntimeError as error:
                raise PeerLostError(f"rank {self.rank}: the {what} failed: {error}") from error

        Work(self.counters, run).wait()

    def _start(self, what: str, call, *args):  # type: ignore[no-untyped-def]
        try:
            return call(*args, group=self._group, async_op=True)
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank}: the {what} could not start: {error}") from error

    def _settle(self, what: str, work, *keep_alive: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.rank}: the {what} failed: {error}") from error
