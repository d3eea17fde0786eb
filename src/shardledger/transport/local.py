"""Mailboxes that stay in this process: for a single rank, and for ranks that are threads of one test."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict

import torch

from shardledger.transport.port import Pending

_TURNS = 20
"""Parts of a time-out, between which the other threads run."""


class SoloMailbox:
    """The mailbox of the only rank: it has nobody to write to."""

    wire = "none"
    rank = 0
    world = 1

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Never called by a correct transport."""
        raise RuntimeError(f"the only rank was asked to send to rank {peer}")

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Never called by a correct transport."""
        raise RuntimeError(f"the only rank was asked to receive from rank {peer}")


class ThreadOffice:
    """A fake wire: ``mailbox(rank)`` gives each thread its mailbox. Messages are copied when sent."""

    def __init__(self, world: int, timeout_s: float = 10.0) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self._queues: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()

    def mailbox(self, rank: int) -> ThreadMailbox:
        """The mailbox of ``rank``."""
        return ThreadMailbox(self, rank)

    def queue_of(self, source: int, target: int, tag: int) -> queue.Queue[torch.Tensor]:
        """The queue of messages from ``source`` to ``target`` with ``tag``."""
        with self._lock:
            return self._queues[source, target, tag]


class ThreadMailbox:
    """The ``Mailbox`` of one thread of a ``ThreadOffice``."""

    wire = "threads"

    def __init__(self, office: ThreadOffice, rank: int) -> None:
        self.rank = rank
        self.world = office.world
        self._office = office

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.send``."""
        self._office.queue_of(self.rank, peer, tag).put(tensor.clone())
        return _Sent()

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.receive``."""
        return _Expected(tensor, self._office.queue_of(peer, self.rank, tag), self._office.timeout_s)


class FaultyMailbox:
    """A mailbox that stops working after some messages: the fault-injection fake."""

    wire = "faulty"

    def __init__(self, inner: ThreadMailbox, messages_before_failure: int) -> None:
        self.rank = inner.rank
        self.world = inner.world
        self._inner = inner
        self._left = messages_before_failure

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Send, or raise as a broken wire does."""
        if self._left <= 0:
            raise RuntimeError("Connection closed by peer (injected)")
        self._left -= 1
        return self._inner.send(tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.receive``."""
        return self._inner.receive(tensor, peer, tag)


class _Sent:
    def wait(self, timeout_s: float | None = None) -> None:
        """Sent messages were copied: nothing to wait for."""


class _Expected:
    def __init__(self, tensor: torch.Tensor, source: queue.Queue[torch.Tensor], timeout_s: float) -> None:
        self._tensor = tensor
        self._source = source
        self._timeout_s = timeout_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Copy the next message in, or fail as a timed-out receive does."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        message = None
        for _ in range(_TURNS):  # a process that gets no processor for a while has no silent ranks
            with contextlib.suppress(queue.Empty):
                message = self._source.get(timeout=limit_s / _TURNS)
                break
        if message is None:
            raise RuntimeError(f"Timed out waiting {limit_s:g} s for a message")
        if message.shape != self._tensor.shape or message.dtype != self._tensor.dtype:
            raise RuntimeError(
                f"expected {tuple(self._tensor.shape)} {self._tensor.dtype}, got {tuple(message.shape)} {message.dtype}"
            )
        self._tensor.copy_(message)
