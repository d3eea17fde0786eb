"""Collectives made of point-to-point messages, each rank to each other rank directly.

Chosen for gloo, where it sends the minimum ((N-1)/N of the payload per phase), needs no copies, and lets the sum be
taken in fp32 in a fixed order whatever the wire dtype. Gloo's own reduce-scatter sends twice as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardledger.transport.guard import Guard, Notice
from shardledger.transport.port import Counters, Mailbox, PeekingMailbox, Pending, ReduceHow, Work
from shardledger.transport.tree import tree_sum

_PEEKED_BYTES = 1 << 18
"""Of contributions that are read where they lie, how much is copied before it is summed: what stays in the cache."""


class PeerTransport:
    """The ``Transport`` over a ``Mailbox``. With one rank there are no messages and the same code runs.

    ``engine`` tells apart the engines on one process group, alike on all ranks.
    """

    def __init__(self, mailbox: Mailbox, engine: int = 0) -> None:
        self.rank = mailbox.rank
        self.world = mailbox.world
        self.wire = mailbox.wire
        self.counters = Counters()
        self._mailbox = mailbox
        self._peeking = mailbox if isinstance(mailbox, PeekingMailbox) and self.world > 1 else None
        self._guard = Guard(mailbox, engine)
        self._rounds: deque[tuple[Notice, Work]] = deque()
        """Reductions of several buckets, as announced: the others get the next bucket when this rank finishes them."""
        self._early: list[_Bucket] = []
        """Buckets that may be summed before anybody waits for them."""

    @property
    def where(self) -> str:
        """See ``Transport.where``."""
        return self._guard.where

    @where.setter
    def where(self, where: str) -> None:
        self._guard.where = where

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, how: ReduceHow) -> Work:
        """See ``Transport.reduce_scatter``. Staging in the wire dtype: (world - 1) / world * bucket elements, of a mailbox
        that peeks at most 256 KiB; and (world - 1) / world * bucket elements when ``full`` has another dtype."""
        ticket = self._announce(f"reduction of unit {how.label}", full.numel(), how.wire)
        self.counters.add("reduce_scatter", full.numel() - out.numel(), how.wire.itemsize)
        step = max(1, how.bucket_numel // self.world)
        starts = list(range(0, out.numel(), step))
        columns = [slice(a, min(a + step, out.numel())) for a in starts]
        job = _Reduction(full, out, how, ticket)
        first = self._launch_bucket(job, columns[0]) if columns else None

        def finish() -> None:
            bucket = first
            for following in (*columns[1:], None):
                if bucket is not None:
                    self._finish_bucket(bucket)
                bucket = self._launch_bucket(job, following) if following is not None else None

        work = Work(self.counters, finish)
        if len(columns) > 1 or self._peeking is not None:
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

    def _launch_bucket(self, job: _Reduction, column: slice) -> _Bucket:
        """Start exchanging one column of every rank's interval."""
        ticket, wire = job.ticket, job.how.wire
        rows = job.full.view(self.world, -1)[:, column]
        outgoing = [(peer, rows[peer].to(wire)) for peer in self._peers()]
        width = piece = column.stop - column.start
        if self._peeking is not None:
            piece = min(width, max(1, _PEEKED_BYTES // wire.itemsize // max(1, self.world - 1)))
        buffers = {peer: torch.empty(piece, dtype=wire, device=job.full.device) for peer in self._sources()}
        if self._peeking is None:
            expected = self._swap([], list(buffers.items()), ticket)
        else:
            peek, nbytes = self._peeking.peek, width * wire.itemsize
            expected = [_Message(peer, self._try(ticket, peer, peek, nbytes, peer, ticket.tag)) for peer in buffers]
        bucket = _Bucket(job, column, buffers, expected, self._swap(outgoing, [], ticket))
        if self._peeking is not None and not job.allocates:
            self._early.append(bucket)
        return bucket

    def _sum_early(self) -> None:
        """Sum what has come, so that its senders need not wait until this rank waits for it."""
        for bucket in list(self._early):
            if all(message.pending.done for message in bucket.expected):  # type: ignore[attr-defined]
                self._sum_bucket(bucket)

    def _finish_bucket(self, bucket: _Bucket) -> None:
        ticket = bucket.job.ticket
        if self._peeking is None:
            self._settle([*bucket.expected, *bucket.sent], ticket)
            bucket.expected.clear()
            bucket.sent.clear()
        else:
            self._settle(list(bucket.expected), ticket)
        if not bucket.summed:
            self._sum_bucket(bucket)
        self._settle(bucket.sent, ticket)

    def _sum_bucket(self, bucket: _Bucket) -> None:
        job, column = bucket.job, bucket.column
        bucket.summed = True
        if bucket in self._early:
            self._early.remove(bucket)
        step = max((len(buffer) for buffer in bucket.buffers.values()), default=column.stop - column.start)
        for start in range(column.start, column.stop, max(1, step)):
            piece = slice(start, min(start + step, column.stop))
            parts = {peer: buffer[: piece.stop - start] for peer, buffer in bucket.buffers.items()}
            if self._peeking is not None:
                at = (start - column.start) * job.how.wire.itemsize
                for peer, message in bucket.expected:
                    self._try(job.ticket, peer, message.read, parts[peer], at)
            self._sum(job, piece, parts)
        if self._peeking is not None:
            for peer, message in bucket.expected:
                self._try(job.ticket, peer, message.release)

    def _sum(self, job: _Reduction, piece: slice, parts: dict[int, torch.Tensor]) -> None:
        target = job.out[piece]
        mine = job.full.view(self.world, -1)[self.rank, piece]
        if self.world > 1:
            mine = mine.to(job.how.wire)  # rounded like the contributions that travelled, whichever rank sums
        in_order = [mine if peer == self.rank else parts[peer] for peer in range(self.world)]
        if not job.how.accumulate:
            tree_sum(in_order, target)
        elif len(parts) == 0:
            target.add_(mine)
        else:
            total = torch.empty_like(target)
            tree_sum(in_order, total)
            target.add_(total)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._finish_before(None)
        self._guard.farewell()

    def give_up(self, reason: str) -> None:
        """See ``Transport.give_up``."""
        self._guard.give_up(reason)
        self._rounds.clear()
        self._early.clear()

    def _announce(self, what: str, numel: int, dtype: torch.dtype) -> _Ticket:
        self._sum_early()
        notice, tag = self._guard.announce(what, f"{numel} elements of {str(dtype).removeprefix('torch.')}")
        return _Ticket(notice, tag, what)

    def _swap(
        self,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, torch.Tensor]],
        ticket: _Ticket,
    ) -> list[_Message]:
        receive, send = self._mailbox.receive, self._mailbox.send
        messages = [
            _Message(peer, self._try(ticket, peer, receive, tensor, peer, ticket.tag)) for peer, tensor in incoming
        ]
        messages += [
            _Message(peer, self._try(ticket, peer, send, tensor, peer, ticket.tag)) for peer, tensor in outgoing
        ]
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
            return call(*args)  # type: ignore[no-any-return]
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


class _Message(NamedTuple):
    """A message under way."""

    peer: int
    pending: Pending


@dataclass(frozen=True)
class _Reduction:
    """What ``reduce_scatter`` was asked for."""

    full: torch.Tensor
    out: torch.Tensor
    how: ReduceHow
    ticket: _Ticket

    @property
    def allocates(self) -> bool:
        """Whether sums take memory; then they are taken at a fixed point of the program, for an account that is exact."""
        return self.how.accumulate or not self.full.dtype == self.how.wire == self.out.dtype


@dataclass(eq=False)
class _Bucket:
    """One column of a reduction under way."""

    job: _Reduction
    column: slice
    buffers: dict[int, torch.Tensor]
    """By rank: where its contribution, or one piece after another of it, is received."""
    expected: list[_Message]
    sent: list[_Message]
    summed: bool = False
