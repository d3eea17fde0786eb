"""Messages between ranks of one machine, read straight from the sender's memory: one copy, no segment, no socket.

Every rank keeps a *board* that only it writes and every neighbour reads. In it, for each neighbour, are a ring of *offers*
(messages to it: number, tag, address, bytes) and the numbers of that neighbour's offers which this rank has *taken*. A
receiver finds an offer, copies the payload from where it lies and notes it as taken; the sender reads that its buffer is
free. Boards and payloads are ordinary memory: whichever way a process ends, nothing stays behind.

A board starts with a random number. Every read takes it along, so that a process that ended, or another one that got its
number, is never taken for the neighbour.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardledger.transport.process_memory import ProcessMemoryError, Reading, pieces

_SLOTS = 64
"""Offers to one neighbour that are on the board at once; the others queue."""
_FIELDS = 5
_ROW = _SLOTS * (1 + _FIELDS)
"""Words of a board for one neighbour: numbers taken, then offers."""
_WORD = 8
_EAGER_BYTES = 1024
"""Messages up to this size are copied when sent, as a socket would: headers and texts do not wait for who reads them."""
_SPINS = 10
"""Looks before a waiting rank starts to sleep in between."""
_ROUND = 4
"""Looks at the neighbour that is waited for, for one at all."""
_LONGEST_PAUSE_S = 0.0005
_LINGER_S = 5.0
"""How long a process that ends waits for others to read what it said last."""

_talking: set[_Neighbour] = set()
"""Conversations in which something said was not yet heard: kept alive with their boards and payloads."""


@dataclass(frozen=True)
class Board:
    """Where a rank's board lies."""

    pid: int
    address: int
    nonce: int


class OwnBoard:
    """The board that this rank writes: the nonce, then one row for each rank of ``world``."""

    def __init__(self, world: int) -> None:
        self.words = (ctypes.c_int64 * (1 + world * _ROW))()
        self.words[0] = int.from_bytes(os.urandom(_WORD), "little") >> 2 | 1
        self.place = Board(os.getpid(), ctypes.addressof(self.words), self.words[0])

    def __del__(self) -> None:
        self.words[0] = 0  # who still reads here learns that this rank is gone


class NeighboursMailbox:
    """The ``Mailbox`` of rank ``rank`` among ranks that can all read each other's memory.

    Payloads move when either side is in a call of its mailbox; the one that receives copies.
    """

    def __init__(self, rank: int, own: OwnBoard, boards: Sequence[Board], timeout_s: float) -> None:
        self.rank = rank
        self.world = len(boards)
        self._timeout_s = timeout_s
        for neighbour in list(_talking):  # of engines that have ended
            neighbour.look()
        self._neighbours = {
            peer: _Neighbour(peer, own, board, rank) for peer, board in enumerate(boards) if peer != rank
        }

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Offer:
        """See ``Mailbox.send``."""
        offer = _Offer(self, self._neighbours[peer], tensor, tag)
        offer.neighbour.offer(offer)
        self._look_after(offer)
        return offer

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> _Request:
        """See ``Mailbox.receive``."""
        request = _Request(self, self._neighbours[peer], tensor)
        request.neighbour.request(request, tag)
        self._look_after(request)
        return request

    def _look_after(self, message: _Offer | _Request) -> None:
        if message.nbytes > _EAGER_BYTES:  # headers need not be looked at one by one
            message.neighbour.look()

    def look(self) -> None:
        """Move what can be moved now."""
        for neighbour in self._neighbours.values():
            neighbour.look()

    def wait(self, message: _Offer | _Request, timeout_s: float | None) -> None:
        """Look until ``message`` is done.

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
            if looks % _ROUND == 0:
                self.look()  # the others may wait for what this rank has yet to take
            if looks < _SPINS:
                os.sched_yield()  # the other rank may need this core
            else:
                time.sleep(min(looks * 1e-6, _LONGEST_PAUSE_S))


class _Message:
    """A message under way, sent or expected."""

    def __init__(self, mailbox: NeighboursMailbox, neighbour: _Neighbour, tensor: torch.Tensor) -> None:
        self.mailbox = mailbox
        self.neighbour = neighbour
        self.tensor: torch.Tensor | None = tensor  # keeps the memory at ``address``
        self.nbytes = tensor.numel() * tensor.element_size()
        self.address = tensor.data_ptr()
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


class _Request(_Message):
    """A message that this rank expects."""


class _Offer(_Message):
    """A message that this rank sends; ``done`` is that its buffer is free."""

    def __init__(self, mailbox: NeighboursMailbox, neighbour: _Neighbour, tensor: torch.Tensor, tag: int) -> None:
        super().__init__(mailbox, neighbour, tensor)
        self.tag = tag
        self.number = 0
        self.copied = None
        if self.nbytes <= _EAGER_BYTES:
            self.copied = ctypes.create_string_buffer(ctypes.string_at(self.address, self.nbytes), max(1, self.nbytes))
            self.address = ctypes.addressof(self.copied)
            self.finish()

    def withdraw(self) -> None:
        """See ``_Message.withdraw``. Who has seen the offer finds it gone when the payload is copied."""
        self.neighbour.withdraw(self)


class _Neighbour:
    """The conversation with one other rank."""

    def __init__(self, peer: int, own: OwnBoard, board: Board, rank: int) -> None:
        self.rank = peer
        self.lost = ""
        """Why this rank can no longer be read; empty while it can."""
        self.own = own
        self._row = 1 + peer * _ROW
        self._board = board
        self._seen = (ctypes.c_int64 * (1 + _ROW))()
        here = ctypes.addressof(self._seen)
        self._theirs = board.address + (1 + rank * _ROW) * _WORD
        """Where on the other side's board the row for this rank starts."""
        row = (self._theirs, _ROW * _WORD)
        self._glance = Reading(board.pid, [(board.address, _WORD), row], [(here, _WORD * (1 + _ROW))])
        self._offered = 0
        self._queue: deque[_Offer] = deque()
        self._offers: deque[_Offer] = deque()
        self._next = 1
        """Number of the next offer from the other side."""
        self._arrived: dict[int, deque[tuple[int, int, int]]] = defaultdict(deque)
        """By tag: number, address and bytes of offers that nobody has asked for."""
        self._requests: dict[int, deque[_Request]] = {}

    def offer(self, offer: _Offer) -> None:
        """Queue a message; it goes on the board when its slot is free. Whom nothing reaches any more gets nothing."""
        if self.lost:
            offer.finish()
            return
        self._offered += 1
        offer.number = self._offered
        self._queue.append(offer)
        _talking.add(self)
        self._publish()

    def withdraw(self, offer: _Offer) -> None:
        """Take a message from the board."""
        if offer in self._offers:
            self.own.words[self._slot(offer.number)] = 0

    def request(self, request: _Request, tag: int) -> None:
        """Expect a message; of those with the same tag the first asked for gets the first that comes."""
        self._requests.setdefault(tag, deque()).append(request)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to wait for."""
        return not (self._requests or self._offers or self._queue) or bool(self.lost)

    def look(self) -> None:
        """Read the other side's board, see what it has taken, take what is expected."""
        if self.idle:
            return
        try:
            self._read(self._glance)
            self._see_taken()
            self._publish()
            self._see_offers()
            for tag in [tag for tag in self._requests if tag in self._arrived]:
                self._take(tag)
        except RuntimeError as error:
            self.lost = f"Connection closed by rank {self.rank}: {error}"
            _talking.discard(self)
            for offer in (*self._offers, *self._queue):  # nobody reads them; that the rank is lost, a receive will tell
                offer.finish()

    def _read(self, reading: Reading) -> None:
        reading.run()
        if self._seen[0] != self._board.nonce:
            raise RuntimeError("it has ended its engine, or its process")

    def _see_taken(self) -> None:
        seen = self._seen
        while self._offers and seen[1 + self._offers[0].number % _SLOTS] == self._offers[0].number:
            self._offers.popleft().finish()
        for offer in self._offers:  # taken out of order
            if seen[1 + offer.number % _SLOTS] == offer.number:
                offer.finish()
        if not self._offers and not self._queue:
            _talking.discard(self)

    def _publish(self) -> None:
        words = self.own.words
        while self._queue and (not self._offers or self._queue[0].number - self._offers[0].number < _SLOTS):
            offer = self._queue.popleft()
            at = self._slot(offer.number)
            words[at + 1 : at + _FIELDS] = (offer.tag, offer.address, offer.nbytes, self.own.place.nonce ^ _mix(offer))
            words[at] = offer.number  # last: this is what the other side looks for
            self._offers.append(offer)

    def _slot(self, number: int) -> int:
        """Where on this rank's board an offer to the neighbour stands."""
        return self._row + _SLOTS + number % _SLOTS * _FIELDS

    def _see_offers(self) -> None:
        while True:
            at = 1 + _SLOTS + self._next % _SLOTS * _FIELDS
            number, tag, address, nbytes, check = self._seen[at : at + _FIELDS]
            if number != self._next or check != self._board.nonce ^ number ^ tag ^ address ^ nbytes:
                return  # not there, or not yet whole
            self._arrived[tag].append((number, address, nbytes))
            self._next += 1

    def _take(self, tag: int) -> None:
        arrived, requests = self._arrived[tag], self._requests[tag]
        while arrived and requests:
            (number, address, nbytes), request = arrived.popleft(), requests.popleft()
            if nbytes != request.nbytes:
                raise RuntimeError(f"it sends {nbytes} bytes where {request.nbytes} are expected")
            self._copy(number, address, request)
            self.own.words[self._row + number % _SLOTS] = number
            request.finish()
        if not arrived:
            del self._arrived[tag]
        if not requests:
            del self._requests[tag]

    def _copy(self, number: int, address: int, request: _Request) -> None:
        """Read a payload between two looks at the board: it is the neighbour's, and still on offer afterwards."""
        here, seen = ctypes.addressof(self._seen), self._seen
        offer = self._theirs + (_SLOTS + number % _SLOTS * _FIELDS) * _WORD
        for source, target in zip(
            pieces(address, request.nbytes), pieces(request.address, request.nbytes), strict=True
        ):
            nonce, still = (self._board.address, _WORD), (offer, _WORD)
            self._read(Reading(self._board.pid, (nonce, source, still), ((here, _WORD), target, (here + _WORD, _WORD))))
            if seen[1] != number:
                raise RuntimeError("it has given up what it was sending")


def _mix(offer: _Offer) -> int:
    return offer.number ^ offer.tag ^ offer.address ^ offer.nbytes


def readable(board: Board) -> int:
    """0 when the board can be read and is the one meant, otherwise the errno."""
    nonce = ctypes.c_int64()
    try:
        Reading(board.pid, [(board.address, _WORD)], [(ctypes.addressof(nonce), _WORD)]).run()
    except ProcessMemoryError as error:
        return error.code
    return 0 if nonce.value == board.nonce else errno.ESRCH


@atexit.register
def _linger() -> None:
    """What was said last (why this rank fails) must be heard: it lies in this process's memory."""
    deadline = time.monotonic() + _LINGER_S
    while time.monotonic() < deadline:
        # A child that was forked has a copy of the conversations and no part in them.
        _talking.difference_update([n for n in _talking if n.own.place.pid != os.getpid()])
        for neighbour in list(_talking):
            neighbour.look()
        if not _talking:
            return
        time.sleep(0.002)
