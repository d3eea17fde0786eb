"""The port through which bytes move: what a mailbox must do, what a collective returns, and what is counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


class Pending(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it has arrived (receive) or its buffer may be reused (send).

        Raises:
            RuntimeError: the wire broke, or ``timeout_s`` seconds (None: the wire's own limit) went by.
        """


class Mailbox(Protocol):
    """Point-to-point messages between ranks: the one thing a wire must be able to do.

    Messages between two ranks with the same tag arrive in the order in which they were sent. ``tensor`` is contiguous
    and is neither copied nor resized; it must stay alive until ``wait`` returns.
    """

    wire: str
    """What moves the bytes, for people."""
    rank: int
    world: int

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending ``tensor`` to rank ``peer``."""

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving into ``tensor`` from rank ``peer``."""


class Peeked(Pending, Protocol):
    """A message that is read where its sender has it; ``wait`` returns when it has come."""

    done: bool
    """Whether it has come."""

    def read(self, tensor: torch.Tensor, at: int) -> None:
        """Copy what lies ``at`` bytes from its start into ``tensor`` (contiguous).

        Raises:
            RuntimeError: the sender has ended.
        """

    def release(self) -> None:
        """It has been read: its sender may use the buffer again.

        Raises:
            RuntimeError: it could not be had to the end, so what was read may be anything.
        """


@runtime_checkable
class PeekingMailbox(Mailbox, Protocol):
    """A mailbox whose messages need not be copied whole."""

    def peek(self, nbytes: int, peer: int, tag: int) -> Peeked:
        """Expect a message of ``nbytes`` bytes from rank ``peer``, instead of ``receive``."""


@dataclass
class Traffic:
    """What one kind of collective has sent from this rank."""

    elements: int = 0
    bytes: int = 0
    calls: int = 0

    def minus(self, earlier: Traffic) -> Traffic:
        """The difference to an earlier reading."""
        return Traffic(self.elements - earlier.elements, self.bytes - earlier.bytes, self.calls - earlier.calls)


@dataclass
class Counters:
    """Everything this rank has sent, by kind, and how long it waited, in seconds."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    wait_s: float = 0.0

    def add(self, kind: str, elements: int, item_bytes: int) -> None:
        """Count one collective that sends ``elements`` of ``item_bytes`` each from this rank."""
        entry = self.traffic.setdefault(kind, Traffic())
        entry.elements += elements
        entry.bytes += elements * item_bytes
        entry.calls += 1

    def snapshot(self) -> dict[str, Traffic]:
        """A copy of the counts."""
        return {kind: Traffic(t.elements, t.bytes, t.calls) for kind, t in self.traffic.items()}


class Work:
    """A collective under way. ``wait`` finishes it; its buffers belong to it until then."""

    def __init__(self, counters: Counters, finish: Callable[[], None] | None) -> None:
        self._counters = counters
        self._finish = finish

    @property
    def done(self) -> bool:
        """Whether ``wait`` has been called."""
        return self._finish is None

    def wait(self) -> None:
        """Block until the result is in place; a second call does nothing."""
        if self._finish is None:
            return
        start = time.perf_counter()
        try:
            self.settle()
        finally:
            self._counters.wait_s += time.perf_counter() - start

    def settle(self) -> None:
        """``wait`` inside another collective's, which counts the seconds."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Transport(Protocol):
    """Collectives over the shard group. Every rank issues the same ones in the same order."""

    wire: str
    """What moves the bytes: ``"shared_memory"``, ``"gloo"``, ``"nccl"``; ``"none"`` with one rank."""
    rank: int
    world: int
    counters: Counters
    where: str
    """Step and phase, set by the engine, for messages."""

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, how: ReduceHow) -> Work:
        """Sum ``full`` (1-D, world * shard elements) over ranks in tree order into ``out`` (this rank's shard).

        ``out`` may be this rank's interval of ``full``. That interval is scratch; the rest of ``full`` is only read.
        """

    def all_gather(self, full: torch.Tensor, label: str) -> Work:
        """Fill ``full`` (1-D, world * shard elements) with every rank's interval; this rank's is already there."""

    def gather_to(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """Collect all shards in ``full`` on rank ``root`` (``full`` is None elsewhere). Blocks."""

    def scatter_from(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """Hand each rank its interval of ``full``, which only rank ``root`` has. Blocks."""

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> None:
        """Copy ``tensor`` (contiguous) from rank ``root`` to all. Blocks."""

    def exchange(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """All ranks' copies of a small 1-D CPU tensor, as [world, n]. Blocks; also serves as a barrier."""

    def close(self) -> None:
        """This rank's engine ends: wait until the others' do too.

        Raises:
            RanksDisagreeError: another rank runs a collective instead.
        """

    def give_up(self, reason: str) -> None:
        """This rank cannot go on: let the others know why, as far as they listen within a few seconds."""


@dataclass(frozen=True, kw_only=True)
class ReduceHow:
    """How one reduction is done."""

    wire: torch.dtype
    """Dtype on the wire; sums are taken in ``out``'s dtype."""
    accumulate: bool
    """Add to ``out`` instead of replacing it."""
    bucket_numel: int
    """Most elements of ``full`` in flight at once."""
    label: str
    """Unit, for messages."""
