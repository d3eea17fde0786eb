"""Copies between a device and host memory, chunk by chunk through a few page-locked buffers of fixed size.

Page-locked memory is scarce, and torch rounds each block of it up to a power of two; so states rest in ordinary memory and
only what is under way is page-locked. On a CPU the same code copies without staging.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch

from shardledger.transport.disk import TierTraffic


class Copy:
    """A copy under way. ``wait`` finishes it; source and target belong to it until then."""

    def __init__(self, future: Future[None] | None, traffic: TierTraffic) -> None:
        self._future = future
        self._traffic = traffic

    def wait(self) -> None:
        """Block until the bytes have arrived."""
        future, self._future = self._future, None
        if future is None:
            return
        begin = time.perf_counter()
        try:
            future.result()
        finally:
            self._traffic.wait_s += time.perf_counter() - begin


class HostLink:
    """The way between one device and host memory. All methods are for one thread."""

    def __init__(
        self, device: torch.device, *, pinned: bool, traffic: TierTraffic, chunk_bytes: int, buffers: int
    ) -> None:
        """``chunk_bytes``: of one of ``buffers``; a power of two, so that nothing is lost to rounding."""
        self.traffic = traffic
        self.staging_bytes = buffers * chunk_bytes
        """Host memory of the buffers that bytes pass through."""
        self._chunk_bytes = chunk_bytes
        self._buffers = buffers
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardledger-link")
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=pinned and self._cuda))

    def to_host(self, source: torch.Tensor, target: torch.Tensor, *, add: bool) -> Copy:
        """Start copying a 1-D device tensor to, or adding it to, a host tensor of the same size."""
        self.traffic.read_bytes += source.numel() * source.element_size()
        ready = torch.cuda.current_stream().record_event() if self._cuda else None
        return Copy(self._pool.submit(self._fetch, source, target, add, ready), self.traffic)

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        """Start copying a 1-D host tensor to a device tensor of the same size, cast to its dtype on the way."""
        self.traffic.written_bytes += target.numel() * target.element_size()
        ready = torch.cuda.current_stream().record_event() if self._cuda else None
        return Copy(self._pool.submit(self._send, source, target, ready), self.traffic)

    def close(self) -> None:
        """Wait for what is under way and give the buffers back."""
        self._pool.shutdown(wait=True)
        while not self._free.empty():
            self._free.get()

    def _fetch(self, source: torch.Tensor, target: torch.Tensor, add: bool, ready: Any) -> None:
        begin = time.perf_counter()
        with torch.no_grad(), self._on_stream(ready):
            for part in self._chunks(source):
                staging, whole = self._staged(source[part])
                staging.copy_(source[part], non_blocking=True)
                if self._stream is not None:
                    self._stream.synchronize()
                (target[part].add_ if add else target[part].copy_)(staging)
                self._free.put(whole)
        self._count(begin)

    def _send(self, source: torch.Tensor, target: torch.Tensor, ready: Any) -> None:
        begin = time.perf_counter()
        with torch.no_grad(), self._on_stream(ready):
            under_way: list[tuple[Any, torch.Tensor]] = []
            for part in self._chunks(target):
                if len(under_way) == self._buffers - 1:
                    self._land(*under_way.pop(0))
                staging, whole = self._staged(target[part])
                staging.copy_(source[part])
                target[part].copy_(staging, non_blocking=True)
                under_way.append((self._stream.record_event() if self._stream is not None else None, whole))
            for sent in under_way:
                self._land(*sent)
        self._count(begin)

    def _land(self, event: Any, whole: torch.Tensor) -> None:
        if event is not None:
            event.synchronize()
        self._free.put(whole)

    def _staged(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = self._free.get()
        return whole[: like.numel() * like.element_size()].view(like.dtype), whole

    def _on_stream(self, ready: Any) -> Any:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)

    def _count(self, begin: float) -> None:
        with self.traffic.lock:
            self.traffic.busy_s += time.perf_counter() - begin

    def _chunks(self, tensor: torch.Tensor) -> Iterator[slice]:
        step = self._chunk_bytes // tensor.element_size()
        for first in range(0, tensor.numel(), step):
            yield slice(first, min(first + step, tensor.numel()))
