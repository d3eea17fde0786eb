"""Transports of any world size that move nothing: for dry runs, whose tensors hold no values.

They run the code of the real transports, so that what those allocate and count is allocated and counted here.
"""

from __future__ import annotations

import torch

from shardledger.transport.guard import Guard, Notice
from shardledger.transport.native import NativeTransport
from shardledger.transport.peers import PeerTransport
from shardledger.transport.port import Counters, Pending, Transport


class DryMailbox:
    """The mailbox of rank ``rank`` of ``world``: every message has arrived."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.send``."""
        return _Arrived(tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.receive``. ``tensor`` keeps what it holds."""
        return _Arrived(tensor)


class DryGuard(Guard):
    """Sends and expects headers, and takes them for the right ones: there are no values to compare."""

    def check(self, notice: Notice) -> None:
        """See ``Guard.check``."""
        while notice in self._under_way:
            self._under_way.popleft()


class DryPeers(PeerTransport):
    """What gloo runs use, without the wire."""

    def __init__(self, rank: int, world: int) -> None:
        mailbox = DryMailbox(rank, world)
        super().__init__(mailbox)
        self._guard = DryGuard(mailbox, 0)


class DryNative(NativeTransport):
    """What NCCL runs use, without the backend. Buffers that a backend allocates for itself are not seen."""

    def __init__(self, rank: int, world: int) -> None:  # no group to ask: the parent's constructor is not for us
        self.rank = rank
        self.world = world
        self.counters = Counters()
        self.where = "initialize"
        self._group = None
        self._device = torch.device("cpu")

    def _now(self, what: str, call, *args) -> None:  # type: ignore[no-untyped-def]
        return None

    def _start(self, what: str, call, *args):  # type: ignore[no-untyped-def]
        return None

    def _settle(self, what: str, work, *buffers: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
        return None


def dry_transport(rank: int, world: int, device: str) -> Transport:
    """The transport that a run on ``device`` would use."""
    if device == "cpu" or world == 1:
        return DryPeers(rank, world)
    return DryNative(rank, world)


class _Arrived:
    """A message that keeps its tensor alive, as gloo's do, for as long as it is asked after."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self, timeout_s: float | None = None) -> None:
        """Nothing to wait for."""
