"""Collectives made of point-to-point messages, each rank to each other rank directly.

Chosen for gloo, where it sends the minimum ((N-1)/N of the payload per phase), needs no copies, and lets the sum be
taken in fp32 in a fixed order whatever the wire dtype. Gloo's own reduce-scatter sends twice as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardledger.transport.guard import Guard, Notice
from shardledger.transport.port import Counters, Mailbox, Pending, ReduceHow, Work
from shardledger.transport.tree import tree_sum


class PeerTransport:
    """The ``Transport`` over a ``Mailbox``. With one rank there are no messages and the same code runs.

    ``engine`` tells apart the engines on one process group, alike on all ranks.
    """

    def __init__(self, mailbox: Mailbox, engine: int = 0) -> None:
        self.rank = mailbox.rank
        self.world = mailbox.world
        self.counters = Counters()
        self._mailbox = mailbox
        self._guard = Guard(mailbox, engine)
        self._rounds: deque[tuple[Notice, Work]] = deque()
        """Reductions of several buckets, as announced: the others get the next bucket when this rank finishes them."""

    @property
    def where(self) -> str:
        """See ``Transport.where``."""
        return self._guard.where

    @where.setter
    def where(self, where: str) -> None:
        self._guard.where = where

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, how: ReduceHow) -> Work:
        """See ``Transport.reduce_scatter``. Staging: (world - 1) / world * bucket elements in the wire dtype, twice
        that when ``full`` has another dtype."""
        ticket = self._announce(f"reduction of unit {how.label}", full.numel(), how.wire)
        self.counters.add("reduce_scatter", full.numel() - out.numel(), how.wire.itemsize)
        step = max(1, how.bucket_numel // self.world)
        starts = list(range(0, out.numel(), step))
        columns = [slice(a, min(a + step, out.numel())) for a in starts]
        first = self._launch_bucket(full, columns[0], how, ticket) if columns else None

        def finish() -> None:
            bucket = first
            for here, column in enumerate(columns):
                assert bucket is not None
                self._sum_bucket(bucket, full, out, column, how)
                bucket = self._launch_bucket(full, columns[here + 1], how, ticket) if here + 1 < len(columns) else None

        work = Work(self.counters, finish)
        if len(columns) > 1:
            self._rounds.append((ticket.notice, work))
        return work

    def all_gather(self, full: torch.Tensor, label: str) -> Work:
        """See ``Transport.all_gather``. No staging: shards arrive in place."""
        ticket = self._announce(f"all-gather of unit {label}", full.numel(), full.dtype)
        shards = full.view(self.world, -1)
        self.counters.add("all_gather", full.numel() - shards[0].numel(), full.element_size())
        messages = self._swap(
            [(peer, shards[self.rank]) for peer in self._peers()],
            [(peer, shards[peer]) for peer in self._sources()],
            ticket,
        )
        return Work(self.counters, lambda: self._settle(messages, ticket))

    def gather_to(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.gather_to``."""
        ticket = self._announce(f"gather of {label} to rank {root}", shard.numel(), shard.dtype)
        if self.rank != root:
            self.counters.add("gather", shard.numel(), shard.element_size())
            messages = self._swap([(root, shard)], [], ticket)
        else:
            assert full is not None
            rows = full.view(self.world, -1)
            rows[root].copy_(shard)
            messages = self._swap([], [(peer, rows[peer]) for peer in self._sources()], ticket)
        Work(self.counters, lambda: self._settle(messages, ticket)).wait()

    def scatter_from(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.scatter_from``."""
        ticket = self._announce(f"scatter of {label} from rank {root}", shard.numel(), shard.dtype)
        if self.rank != root:
            messages = self._swap([], [(root, shard)], ticket)
        else:
            assert full is not None
            rows = full.view(self.world, -1)
            shard.copy_(rows[root])
            self.counters.add("scatter", full.numel() - shard.numel(), shard.element_size())
            messages = self._swap([(peer, rows[peer]) for peer in self._peers()], [], ticket)
        Work(self.counters, lambda: self._settle(messages, ticket)).wait()

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> None:
        """See ``Transport.broadcast``."""
        ticket = self._announce(f"broadcast of {label} from rank {root}", tensor.numel(), tensor.dtype)
        if self.rank == root:
            self.counters.add("broadcast", tensor.numel() * (self.world - 1), tensor.element_size())
            messages = self._swap([(peer, tensor) for peer in self._peers()], [], ticket)
        else:
            messages = self._swap([], [(root, tensor)], ticket)
        Work(self.counters, lambda: self._settle(messages, ticket)).wait()

    def exchange(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``Transport.exchange``."""
        ticket = self._announce(label, values.numel(), values.dtype)
        rows = values.new_empty(self.world, values.numel())
        rows[self.rank].copy_(values)
        self.counters.add("control", values.numel() * (self.world - 1), values.element_size())
        messages = self._swap(
            [(peer, rows[self.rank]) for peer in self._peers()],
            [(peer, rows[peer]) for peer in self._sources()],
            ticket,
        )
        Work(self.counters, lambda: self._settle(messages, ticket)).wait()
        return rows

    def _launch_bucket(self, full: torch.Tensor, column: slice, how: ReduceHow, ticket: _Ticket) -> _Bucket:
        """Start exchanging one column of every rank's interval."""
        rows = full.view(self.world, -1)[:, column]
        outgoing = {peer: rows[peer].to(how.wire) for peer in self._peers()}
        width = column.stop - column.start
        incoming = {peer: torch.empty(width, dtype=how.wire, device=full.device) for peer in self._sources()}
        messages = self._swap(list(outgoing.items()), list(incoming.items()), ticket)
        return _Bucket(messages, incoming, ticket)

    def _sum_bucket(
        self, bucket: _Bucket, full: torch.Tensor, out: torch.Tensor, column: slice, how: ReduceHow
    ) -> None:
        self._settle(bucket.messages, bucket.ticket)
        target = out[column]
        mine = full.view(self.world, -1)[self.rank, column]
        if how.wire != full.dtype and self.world > 1:
            mine = mine.to(how.wire)  # rounded like the contributions that travelled, whichever rank sums
        parts = [mine if peer == self.rank else bucket.incoming[peer] for peer in range(self.world)]
        if not how.accumulate:
            tree_sum(parts, target)
        elif len(parts) == 1:
            target.add_(parts[0])
        else:
            total = torch.empty_like(target)
            tree_sum(parts, total)
            target.add_(total)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._finish_before(None)
        self._guard.farewell()

    def give_up(self, reason: str) -> None:
        """See ``Transport.give_up``."""
        self._guard.give_up(reason)
        self._rounds.clear()

    def _announce(self, what: str, numel: int, dtype: torch.dtype) -> _Ticket:
        notice, tag = self._guard.announce(what, f"{numel} elements of {str(dtype).removeprefix('torch.')}")
        return _Ticket(notice, tag, what)

    def _swap(
        self,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, torch.Tensor]],
        ticket: _Ticket,
    ) -> list[_Message]:
        receive, send = self._mailbox.receive, self._mailbox.send
        messages = [_Message(peer, self._try(ticket, peer, receive, tensor, peer)) for peer, tensor in incoming]
        messages += [_Message(peer, self._try(ticket, peer, send, tensor, peer)) for peer, tensor in outgoing]
        return messages

    def _finish_before(self, notice: Notice | None) -> None:
        """Finish the reductions announced before ``notice``.

        A rank that blocks in one collective has so done its part in all before it. Otherwise one could wait for the next
        bucket of a reduction while another waits for what the first runs after it, and neither would learn that they part.
        """
        while self._rounds and (notice is None or self._rounds[0][0].number < notice.number):
            self._rounds.popleft()[1].settle()

    def _settle(self, messages: list[_Message], ticket: _Ticket) -> None:
        self._finish_before(ticket.notice)
        self._guard.check(ticket.notice)
        for message in messages:
            try:
                message.pending.wait()
            except RuntimeError as error:
                raise self._guard.lose(message.peer, ticket.what, error) from error
        messages.clear()

    def _try(self, ticket: _Ticket, peer: int, call, *args) -> Pending:  # type: ignore[no-untyped-def]
        try:
            return call(*args, ticket.tag)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise self._guard.lose(peer, ticket.what, error) from error

    def _peers(self) -> list[int]:
        """The other ranks, nearest above first, so that no two ranks send to the same one at once."""
        return [(self.rank + k) % self.world for k in range(1, self.world)]

    def _sources(self) -> list[int]:
        return [(self.rank - k) % self.world for k in range(1, self.world)]


@dataclass(frozen=True)
class _Ticket:
    """One announced collective and the tag of its messages."""

    notice: Notice
    tag: int
    what: str


@dataclass(frozen=True)
class _Message:
    """A message under way."""

    peer: int
    pending: Pending


@dataclass(frozen=True)
class _Bucket:
    """One column of a reduction under way: ``incoming[peer]`` is that rank's contribution."""

    messages: list[_Message]
    incoming: dict[int, torch.Tensor]
    ticket: _Ticket
