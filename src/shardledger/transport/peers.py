"""Collectives made of point-to-point messages, each rank to each other rank directly.

Chosen for gloo, where it sends the minimum ((N-1)/N of the payload per phase), needs no copies, and lets the sum be
taken in fp32 in a fixed order whatever the wire dtype. Gloo's own reduce-scatter sends twice as much.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from shardledger.errors import PeerLostError
from shardledger.transport.port import Counters, Mailbox, Pending, ReduceHow, Work
from shardledger.transport.tree import tree_sum

_TAGS = 0x7FFFFFFF
"""Largest tag that the wire takes."""


class PeerTransport:
    """The ``Transport`` over a ``Mailbox``. With one rank there are no messages and the same code runs."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.rank = mailbox.rank
        self.world = mailbox.world
        self.counters = Counters()
        self._mailbox = mailbox
        self._sequence = 0

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, how: ReduceHow) -> Work:
        """See ``Transport.reduce_scatter``. Staging: (world - 1) / world * bucket elements in the wire dtype, twice
        that when ``full`` has another dtype."""
        tag = self._next_tag(f"reduce {how.label}", full.numel(), how.wire)
        self.counters.add("reduce_scatter", full.numel() - out.numel(), how.wire.itemsize)
        step = max(1, how.bucket_numel // self.world)
        starts = list(range(0, out.numel(), step))
        columns = [slice(a, min(a + step, out.numel())) for a in starts]
        first = self._launch_bucket(full, columns[0], how, tag) if columns else None

        def finish() -> None:
            bucket = first
            for here, column in enumerate(columns):
                assert bucket is not None
                self._sum_bucket(bucket, full, out, column, how)
                bucket = self._launch_bucket(full, columns[here + 1], how, tag) if here + 1 < len(columns) else None

        return Work(self.counters, finish)

    def all_gather(self, full: torch.Tensor, label: str) -> Work:
        """See ``Transport.all_gather``. No staging: shards arrive in place."""
        tag = self._next_tag(f"gather {label}", full.numel(), full.dtype)
        shards = full.view(self.world, -1)
        self.counters.add("all_gather", full.numel() - shards[0].numel(), full.element_size())
        messages = self._swap(
            [(peer, shards[self.rank]) for peer in self._peers()],
            [(peer, shards[peer]) for peer in self._sources()],
            tag,
            f"all-gather of unit {label}",
        )
        return Work(self.counters, lambda: self._settle(messages, f"all-gather of unit {label}"))

    def gather_to(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.gather_to``."""
        tag = self._next_tag(f"collect {label}", shard.numel(), shard.dtype)
        what = f"gather of {label} to rank {root}"
        if self.rank != root:
            self.counters.add("gather", shard.numel(), shard.element_size())
            messages = self._swap([(root, shard)], [], tag, what)
        else:
            assert full is not None
            rows = full.view(self.world, -1)
            rows[root].copy_(shard)
            messages = self._swap([], [(peer, rows[peer]) for peer in self._sources()], tag, what)
        Work(self.counters, lambda: self._settle(messages, what)).wait()

    def scatter_from(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.scatter_from``."""
        tag = self._next_tag(f"scatter {label}", shard.numel(), shard.dtype)
        what = f"scatter of {label} from rank {root}"
        if self.rank != root:
            messages = self._swap([], [(root, shard)], tag, what)
        else:
            assert full is not None
            rows = full.view(self.world, -1)
            shard.copy_(rows[root])
            self.counters.add("scatter", full.numel() - shard.numel(), shard.element_size())
            messages = self._swap([(peer, rows[peer]) for peer in self._peers()], [], tag, what)
        Work(self.counters, lambda: self._settle(messages, what)).wait()

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> None:
        """See ``Transport.broadcast``."""
        tag = self._next_tag(f"broadcast {label}", tensor.numel(), tensor.dtype)
        what = f"broadcast of {label} from rank {root}"
        if self.rank == root:
            self.counters.add("broadcast", tensor.numel() * (self.world - 1), tensor.element_size())
            messages = self._swap([(peer, tensor) for peer in self._peers()], [], tag, what)
        else:
            messages = self._swap([], [(root, tensor)], tag, what)
        Work(self.counters, lambda: self._settle(messages, what)).wait()

    def exchange(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``Transport.exchange``."""
        tag = self._next_tag(label, values.numel(), values.dtype)
        rows = values.new_empty(self.world, values.numel())
        rows[self.rank].copy_(values)
        self.counters.add("control", values.numel() * (self.world - 1), values.element_size())
        messages = self._swap(
            [(peer, rows[self.rank]) for peer in self._peers()],
            [(peer, rows[peer]) for peer in self._sources()],
            tag,
            label,
        )
        Work(self.counters, lambda: self._settle(messages, label)).wait()
        return rows

    def _launch_bucket(self, full: torch.Tensor, column: slice, how: ReduceHow, tag: int) -> _Bucket:
        """Start exchanging one column of every rank's interval."""
        rows = full.view(self.world, -1)[:, column]
        outgoing = {peer: rows[peer].to(how.wire) for peer in self._peers()}
        width = column.stop - column.start
        incoming = {peer: torch.empty(width, dtype=how.wire, device=full.device) for peer in self._sources()}
        messages = self._swap(list(outgoing.items()), list(incoming.items()), tag, f"reduction of unit {how.label}")
        return _Bucket(messages, incoming)

    def _sum_bucket(
        self, bucket: _Bucket, full: torch.Tensor, out: torch.Tensor, column: slice, how: ReduceHow
    ) -> None:
        self._settle(bucket.messages, f"reduction of unit {how.label}")
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

    def _swap(
        self,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, torch.Tensor]],
        tag: int,
        what: str,
    ) -> list[_Message]:
        messages = []
        for peer, tensor in incoming:
            messages.append(_Message(self._try(what, peer, self._mailbox.receive, tensor, peer, tag), peer, tensor))
        for peer, tensor in outgoing:
            messages.append(_Message(self._try(what, peer, self._mailbox.send, tensor, peer, tag), peer, tensor))
        return messages

    def _settle(self, messages: list[_Message], what: str) -> None:
        for message in messages:
            self._try(what, message.peer, message.pending.wait)
        messages.clear()

    def _try(self, what: str, peer: int, call, *args):  # type: ignore[no-untyped-def]
        try:
            return call(*args)
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank}: the {what} failed at rank {peer}. Rank {peer} died, raised, is stuck, or runs "
                f"another collective: look at its output. (The wire says: {_first_line(error)})",
                peer,
            ) from error

    def _peers(self) -> list[int]:
        """The other ranks, nearest above first, so that no two ranks send to the same one at once."""
        return [(self.rank + k) % self.world for k in range(1, self.world)]

    def _sources(self) -> list[int]:
        return [(self.rank - k) % self.world for k in range(1, self.world)]

    def _next_tag(self, what: str, tensor_numel: int, dtype: torch.dtype) -> int:
        """A tag that only the same collective on another rank has: messages of different ones never meet.

        Where ranks run different collectives they wait and fail at the timeout, instead of taking each other's bytes,
        or, when the sizes differ, being ended by gloo.
        """
        self._sequence += 1
        return zlib.crc32(f"{self._sequence}|{what}|{tensor_numel}|{dtype}".encode()) & _TAGS


class _Message:
    """A message under way and the buffer that it needs alive."""

    def __init__(self, pending: Pending, peer: int, tensor: torch.Tensor) -> None:
        self.pending = pending
        self.peer = peer
        self.tensor = tensor


class _Bucket:
    """One column of a reduction under way: ``incoming[peer]`` is that rank's contribution."""

    def __init__(self, messages: list[_Message], incoming: dict[int, torch.Tensor]) -> None:
        self.messages = messages
        self.incoming = incoming


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
