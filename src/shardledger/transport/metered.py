"""A transport whose buffers are attributed to communication by a counter of live bytes."""

from __future__ import annotations

import torch

from shardledger.telemetry.live import PHASES, LiveBytes
from shardledger.transport.port import ReduceHow, Transport, Work
from shardledger.transport.wrapped import WrappedTransport


class MeteredTransport(WrappedTransport):
    """Passes everything to ``inner`` and tells ``meter`` while ``inner`` is at work."""

    def __init__(self, inner: Transport, meter: LiveBytes) -> None:
        super().__init__(inner)
        self._meter = meter

    def _entered(self, where: str) -> None:
        phase = where.rpartition(", ")[2]
        if phase in PHASES and phase != self._meter.scope.phase:
            self._meter.enter(phase)

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, how: ReduceHow) -> Work:
        """See ``Transport.reduce_scatter``."""
        with self._meter.communicating():
            return _MeteredWork(self._inner.reduce_scatter(full, out, how), self._meter)

    def all_gather(self, full: torch.Tensor, label: str) -> Work:
        """See ``Transport.all_gather``."""
        with self._meter.communicating():
            return _MeteredWork(self._inner.all_gather(full, label), self._meter)

    def gather_to(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.gather_to``."""
        with self._meter.communicating():
            self._inner.gather_to(root, full, shard, label)

    def scatter_from(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.scatter_from``."""
        with self._meter.communicating():
            self._inner.scatter_from(root, full, shard, label)

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> None:
        """See ``Transport.broadcast``."""
        with self._meter.communicating():
            self._inner.broadcast(tensor, root, label)

    def exchange(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``Transport.exchange``."""
        with self._meter.communicating():
            return self._inner.exchange(values, label)


class _MeteredWork(Work):
    """Work that finishes under the counter's eyes."""

    def __init__(self, inner: Work, meter: LiveBytes) -> None:
        super().__init__(inner._counters, None)
        self._work = inner
        self._meter = meter

    @property
    def done(self) -> bool:
        """See ``Work.done``."""
        return self._work.done

    def wait(self) -> None:
        """See ``Work.wait``."""
        with self._meter.communicating():
            self._work.wait()
