"""Messages over a gloo process group."""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch
import torch.distributed as dist

_under_way: dict[int, _Message] = {}
"""Messages that nobody has waited for to the end, kept alive with their memory.

Gloo stops reading from a peer for good when data arrive for a receive whose buffer was dropped, so a message that is
given up (an engine destroyed in the middle of a step, an exception) outlives whoever started it.
"""
_numbers = itertools.count()


class GlooMailbox:
    """The ``Mailbox`` over torch.distributed's send and receive. Gloo's own thread moves the bytes meanwhile."""

    wire = "gloo"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._group = group
        self._global = [dist.get_global_rank(group, r) if group else r for r in range(self.world)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        """See ``Mailbox.send``."""
        return _Message(dist.isend(tensor, self._global[peer], self._group, tag), tensor)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        """See ``Mailbox.receive``."""
        return _Message(dist.irecv(tensor, self._global[peer], self._group, tag), tensor)


def forget_messages() -> None:
    """The process group has ended: nothing is under way any more."""
    _under_way.clear()


class _Message:
    """One message, registered until it has been waited for."""

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        if work is None:
            raise RuntimeError("this rank is not a member of the process group")
        self._work = work
        self._tensor = tensor
        self._number = next(_numbers)
        _under_way[self._number] = self

    def wait(self, timeout_s: float | None = None) -> None:
        """See ``Pending.wait``."""
        if timeout_s is None:
            self._work.wait()
        else:
            self._work.wait(timedelta(seconds=timeout_s))
        _under_way.pop(self._number, None)
