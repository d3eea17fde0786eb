"""Messages over a gloo process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardledger.transport.port import Pending


class GlooMailbox:
    """The ``Mailbox`` over torch.distributed's send and receive. Gloo's own thread moves the bytes meanwhile."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._group = group
        self._global = [dist.get_global_rank(group, r) if group else r for r in range(self.world)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.send``."""
        return _pending(dist.isend(tensor, self._global[peer], self._group, tag))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """See ``Mailbox.receive``."""
        return _pending(dist.irecv(tensor, self._global[peer], self._group, tag))


def _pending(work: dist.Work | None) -> Pending:
    if work is None:
        raise RuntimeError("this rank is not a member of the process group")
    return work  # type: ignore[return-value]  # Work.wait returns a bool that nobody needs
