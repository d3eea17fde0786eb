"""Transports of any world size that move nothing: for dry runs, whose tensors hold no values.

They run the code of the real transports, so that what those allocate and count is allocated and counted here.
"""

from __future__ import annotations

import torch

from shardledger.transport.guard import Guard, Notice
from shardledger.transport.native import NativeTransport
from shardledger.transport.peers import PeerTransport
from shardledger.transport.port import Counters, Peeked, Pending, Transport


class DryMailbox:
    """The mailbox of rank ``rank`` of ``world``: every message has arrived."""

    wire = "gloo"

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.send``."""
        return _Arrived(tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.receive``. ``tensor`` keeps what it holds."""
        return _Arrived(tensor)


class DryPeekingMailbox(DryMailbox):
    """The same where messages are read in pieces."""

    wire = "shared_memory"

    def peek(self, nbytes: int, peer: int, tag: int) -> Peeked:
        """See ``PeekingMailbox.peek``."""
        return _Arrived(None)


class DryGuard(Guard):
    """Sends and expects headers, and takes them for the right ones: there are no values to compare."""

    def check(self, notice: Notice) -> None:
        """See ``Guard.check``."""
        while notice in self._under_way:
            self._under_way.popleft()


class DryPeers(PeerTransport):
    """What runs on CPUs use, without the wire."""

    def __init__(self, rank: int, world: int, wire: str = "gloo") -> None:
        mailbox = DryMailbox(rank, world) if wire == "gloo" else DryPeekingMailbox(rank, world)
        super().__init__(mailbox)
        self._guard = DryGuard(mailbox, 0)


class DryNative(NativeTransport):
    """What NCCL runs use, without the backend. Buffers that a backend allocates for itself are not seen."""

    def __init__(self, rank: int, world: int) -> None:  # no group to ask: the parent's constructor is not for us
        self.rank = rank
        self.world = world
        self.counters = Counters()
        self.where, self.wire = "initialize", "nccl"
        self._group = None
        self._device = torch.device("cpu")

    def _now(self, what: str, call, *args) -> None:  # type: ignore[no-untyped-def]
        return None

    def _start(self, what: str, call, *args):  # type: ignore[no-untyped-def]
        return None

    def _settle(self, what: str, work, *buffers: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
        return None


def dry_transport(rank: int, world: int, device: str, wire: str) -> Transport:
    """The transport that a run on ``device`` would use; for ``wire`` see ``join``: ``"auto"`` is taken for shared memory."""
    if device == "cpu" or world == 1:
        return DryPeers(rank, world, wire)
    return DryNative(rank, world)


class _Arrived:
    """A message that keeps its tensor alive, as gloo's do, for as long as it is asked after."""

    done = True

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._tensor = tensor

    def wait(self, timeout_s: float | None = None) -> None:
        """Nothing to wait for."""

    def read(self, tensor: torch.Tensor, at: int) -> None:
        """See ``Peeked.read``. ``tensor`` keeps what it holds."""

    def release(self) -> None:
        """See ``Peeked.release``."""
