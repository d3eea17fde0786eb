"""Messages between ranks of one machine without sockets: payloads are copied once, out of the sender's memory.

The ranks share a *board*: memory without a name that all of them have mapped. For each sender and receiver it holds a ring
of slots, written by the sender (number, tag, address, bytes), and the numbers that the receiver has *taken*, written by the
receiver. A small message lies in its slot, so that it arrives though its sender ends, as with a socket. A large one is read
from the sender's memory, where it lies until it is taken.

Of its own memory every rank publishes a random number, its *seat*. It is read along with every payload, so that neither a
process that has ended nor another one that got its number is ever taken for the neighbour.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardledger.transport.process_memory import ProcessMemoryError, Reading, pieces

_WORD = 8
_SLOTS = 16
"""Messages from one rank to another that are on the board at once; the others queue."""
_HEAD = 4
_INLINE_BYTES = 1024
"""Messages up to this size (headers, last words) lie on the board."""
_SLOT = _HEAD + _INLINE_BYTES // _WORD
_RING = _SLOTS * (1 + _SLOT)
"""Words from one rank to another: numbers taken, then slots; 17 KiB."""
_LOOKS_AT_ONE, _LOOKS_BEFORE_SLEEP, _LOOKS_PER_PROBE = 4, 20, 16
"""Of a waiting rank: looks at the one it waits for, for one at all; looks before pauses; looks for a sign of life."""
_LONGEST_PAUSE_S = 0.0005


@dataclass(frozen=True)
class Place:
    """Where a rank's seat lies."""

    pid: int
    address: int
    nonce: int

    def check(self) -> None:
        """Whether the rank is there.

        Raises:
            ProcessMemoryError: it is not, or may not be read.
        """
        seen = ctypes.c_int64()
        Reading(self.pid, [(self.address, _WORD)], [(ctypes.addressof(seen), _WORD)]).run()
        if seen.value != self.nonce:
            raise ProcessMemoryError(errno.ESRCH)


class Seat:
    """This rank's sign of life; it ends with the object."""

    def __init__(self) -> None:
        self._word = ctypes.c_int64(int.from_bytes(os.urandom(_WORD), "little") >> 2 | 1)
        self.place = Place(os.getpid(), ctypes.addressof(self._word), self._word.value)

    def __del__(self) -> None:
        self._word.value = 0


class Board:
    """The memory that ``world`` ranks share. One makes it, the others map it through the maker's open file."""

    def __init__(self, world: int, maker: tuple[int, int] | None = None) -> None:
        """``maker``: process and file number of who made it.

        Raises:
            OSError: it cannot be made, or is not there.
        """
        nbytes = world * world * _RING * _WORD
        if maker is None:
            self.file = os.memfd_create("shardledger", os.MFD_CLOEXEC)
            os.ftruncate(self.file, nbytes)
        else:
            self.file = os.open(f"/proc/{maker[0]}/fd/{maker[1]}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.words = (ctypes.c_int64 * (nbytes // _WORD)).from_buffer(mmap.mmap(self.file, nbytes))
        except ValueError as error:  # another file, of another machine's process
            raise OSError(errno.ESRCH, str(error)) from error
        finally:
            if maker is not None:
                os.close(self.file)
        self.world = world


class NeighboursMailbox:
    """The ``Mailbox`` of rank ``rank``: ``places[rank]`` is ``seat``.

    Payloads move when the receiver is in a call of its mailbox.
    """

    def __init__(self, rank: int, board: Board, seat: Seat, places: Sequence[Place], timeout_s: float) -> None:
        self.rank = rank
        self.world = len(places)
        self._seat = seat
        self._timeout_s = timeout_s
        self._neighbours = {p: _Neighbour(board, rank, p, place) for p, place in enumerate(places) if p != rank}

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Offer:
        """See ``Mailbox.send``."""
        offer = _Offer(self, self._neighbours[peer], tensor, tag)
        offer.neighbour.offer(offer)
        return offer

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        """See ``Mailbox.receive``."""
        request = _Message(self, self._neighbours[peer], tensor)
        request.neighbour.request(request, tag)
        return request

    def wait(self, message: _Message, timeout_s: float | None) -> None:
        """Look at the board until ``message`` is done.

        Raises:
            RuntimeError: its neighbour has ended, sent something else, or ``timeout_s`` seconds went by.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        looks = 0
        while True:
            message.neighbour.look()
            if message.done:
                return
            if message.neighbour.lost:
                raise RuntimeError(message.neighbour.lost)
            if time.monotonic() > deadline:
                message.withdraw()
                raise RuntimeError(f"Timed out waiting {limit_s:g} s for rank {message.neighbour.rank}")
            looks += 1
            if looks % _LOOKS_AT_ONE == 0:
                for neighbour in self._neighbours.values():  # they may wait for what this rank has yet to take
                    neighbour.look()
            if looks % _LOOKS_PER_PROBE == 0:
                message.neighbour.probe()
            if looks < _LOOKS_BEFORE_SLEEP:
                os.sched_yield()  # the other rank may need this core
            else:
                time.sleep(min(looks * 1e-6, _LONGEST_PAUSE_S))


class _Message:
    """A message under way; as it is, one that this rank expects."""

    def __init__(self, mailbox: NeighboursMailbox, neighbour: _Neighbour, tensor: torch.Tensor) -> None:
        self.mailbox = mailbox
        self.neighbour = neighbour
        self.tensor: torch.Tensor | None = tensor  # keeps the memory at ``address``
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel() * tensor.element_size()
        self.done = False

    def wait(self, timeout_s: float | None = None) -> None:
        """See ``Pending.wait``."""
        if not self.done:
            self.mailbox.wait(self, timeout_s)

    def finish(self) -> None:
        """Its buffer belongs to whoever gave it again."""
        self.done = True
        self.tensor = None

    def withdraw(self) -> None:
        """It is given up: its buffer is no longer what was meant."""


class _Offer(_Message):
    """A message that this rank sends; a small one is copied at once."""

    def __init__(self, mailbox: NeighboursMailbox, neighbour: _Neighbour, tensor: torch.Tensor, tag: int) -> None:
        super().__init__(mailbox, neighbour, tensor)
        self.tag = tag
        self.number = 0
        self.content = b""
        if self.nbytes <= _INLINE_BYTES:
            self.content = ctypes.string_at(self.address, self.nbytes)
            self.finish()

    def withdraw(self) -> None:
        """See ``_Message.withdraw``. Who has seen the offer finds it gone when the payload is copied."""
        self.neighbour.withdraw(self)


class _Neighbour:
    """What this rank and one other say to each other."""

    def __init__(self, board: Board, rank: int, peer: int, place: Place) -> None:
        self.rank = peer
        self.lost = ""
        """Why the rank is gone; empty while it is not."""
        self._words = board.words
        self._base = ctypes.addressof(board.words)
        self._out = (rank * board.world + peer) * _RING
        self._in = (peer * board.world + rank) * _RING
        self._place = place
        self._offered = 0
        self._queue: deque[_Offer] = deque()
        self._offers: deque[_Offer] = deque()
        self._next = 1
        """Number of the next message from the other rank."""
        self._arrived: dict[int, deque[tuple[int, int, int, bytes]]] = defaultdict(deque)
        """By tag: number, address, bytes and content of messages that nobody has asked for."""
        self._requests: dict[int, deque[_Message]] = {}

    def __del__(self) -> None:
        for offer in self._offers:
            self.withdraw(offer)

    def offer(self, offer: _Offer) -> None:
        """Queue a message; it goes on the board when its slot is free."""
        self._offered += 1
        offer.number = self._offered
        self._queue.append(offer)
        self.look()
        if self.lost:
            offer.finish()

    def withdraw(self, offer: _Offer) -> None:
        """Take a payload from the board."""
        if not offer.done and offer in self._offers:
            self._words[_slot(self._out, offer.number)] = 0

    def request(self, request: _Message, tag: int) -> None:
        """Expect a message; of those with the same tag the first asked for gets the first that comes."""
        self._requests.setdefault(tag, deque()).append(request)
        self.look()

    def look(self) -> None:
        """See what the other rank has taken and what it sends; take what is expected."""
        self._see_taken()
        self._publish()
        self._see_offers()
        try:
            for tag in [tag for tag in self._requests if tag in self._arrived]:
                self._take(tag)
        except RuntimeError as error:
            self._lose(error)

    def probe(self) -> None:
        """Find out whether the other rank is still there. What it sent before it went counts."""
        try:
            self._place.check()
        except RuntimeError as error:
            self.look()
            self._lose(error)

    def _lose(self, error: RuntimeError) -> None:
        self.lost = self.lost or f"Connection closed by rank {self.rank}: {error}"
        for offer in (*self._offers, *self._queue):  # nobody reads them; that the rank is lost, a receive will tell
            offer.finish()

    def _see_taken(self) -> None:
        taken = self._words[self._out : self._out + _SLOTS] if self._offers else ()
        for offer in self._offers:
            if taken[offer.number % _SLOTS] == offer.number:
                offer.finish()
        while self._offers and taken[self._offers[0].number % _SLOTS] == self._offers[0].number:
            self._offers.popleft()

    def _publish(self) -> None:
        words = self._words
        while self._queue and (not self._offers or self._queue[0].number - self._offers[0].number < _SLOTS):
            offer = self._queue.popleft()
            at = _slot(self._out, offer.number)
            words[at + 1 : at + _HEAD] = (offer.tag, offer.address, offer.nbytes)
            ctypes.memmove(self._base + (at + _HEAD) * _WORD, offer.content, len(offer.content))
            words[at] = offer.number  # last: this is what the other rank looks for
            self._offers.append(offer)

    def _see_offers(self) -> None:
        while self._words[at := _slot(self._in, self._next)] == self._next:
            tag, address, nbytes = self._words[at + 1 : at + _HEAD]
            content = b""
            if nbytes <= _INLINE_BYTES:
                content = ctypes.string_at(self._base + (at + _HEAD) * _WORD, nbytes)
                self._words[self._in + self._next % _SLOTS] = self._next
            self._arrived[tag].append((self._next, address, nbytes, content))
            self._next += 1

    def _take(self, tag: int) -> None:
        arrived, requests = self._arrived[tag], self._requests[tag]
        while arrived and requests:
            (number, address, nbytes, content), request = arrived.popleft(), requests.popleft()
            if nbytes != request.nbytes:
                raise RuntimeError(f"it sends {nbytes} bytes where {request.nbytes} are expected")
            if nbytes <= _INLINE_BYTES:
                ctypes.memmove(request.address, content, nbytes)
            else:
                self._copy(number, address, request)
                self._words[self._in + number % _SLOTS] = number
            request.finish()
        for waiting in (self._arrived, self._requests):
            if not waiting[tag]:
                del waiting[tag]

    def _copy(self, number: int, address: int, request: _Message) -> None:
        """Read a payload; afterwards its rank must be there and the payload still on offer."""
        sources, targets = pieces(address, request.nbytes), pieces(request.address, request.nbytes)
        for source, target in zip(sources, targets, strict=True):
            Reading(self._place.pid, (source,), (target,)).run()
        self._place.check()
        if self._words[_slot(self._in, number)] != number:
            raise RuntimeError("it has given up what it was sending")


def _slot(ring: int, number: int) -> int:
    """Where on the board message ``number`` stands."""
    return ring + _SLOTS + number % _SLOTS * _SLOT
