"""Messages between ranks of one machine without sockets: payloads are copied once, out of the sender's memory.

Every rank has an *inbox*, a pipe into which the others write records: a message is offered, was taken, is given up. A small
message lies in its record, so that it arrives though its sender ends, as with a socket. A large one is read from the
sender's memory, where it lies until it is taken. The kernel wakes who waits for a record, and who waits for one of a rank
whose inbox has closed, which is how a rank that has ended is noticed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import time
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch

from shardledger.transport.process_memory import read_memory

_RECORD = struct.Struct("=iiqqqq")
"""Rank that writes, kind, number of the message, tag, address, bytes."""
_OFFERED, _TAKEN, _GIVEN_UP = range(3)
_INLINE_BYTES = 4096 - _RECORD.size
"""Messages up to this size (headers, last words) lie in their record: the kernel does not mix writes of up to 4 KiB."""
_INBOX_BYTES = 1 << 20
"""More than a pipe holds, so that one read empties it and ends with a record."""

_in_use: weakref.WeakSet[Lines] = weakref.WeakSet()


@dataclass(frozen=True)
class Address:
    """Where a rank's inbox is, and a random number in its memory by which its process is known."""

    pid: int
    file: int
    proof_at: int
    proof: int

    def open(self) -> int:
        """The inbox, for writing.

        Raises:
            OSError: the process is not there, or may not be read.
        """
        seen = ctypes.c_int64()
        read_memory(self.pid, self.proof_at, ctypes.addressof(seen), 8)
        if seen.value != self.proof:  # another process under the same number: of another machine or container
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        return os.open(f"/proc/{self.pid}/fd/{self.file}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class Lines:
    """The open files of one mailbox: its own inbox, and by rank those of others. They close with the object."""

    def __init__(self) -> None:
        self.outboxes: dict[int, int] = {}
        self.inbox, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(writer)
        self._proof = ctypes.c_int64(int.from_bytes(os.urandom(8), "little") >> 1)
        self.address = Address(os.getpid(), self.inbox, ctypes.addressof(self._proof), self._proof.value)
        _in_use.add(self)

    def close(self) -> None:
        """The others notice."""
        for file in (self.inbox, *self.outboxes.values()):
            if file >= 0:
                os.close(file)
        self.inbox = -1
        self.outboxes = {}

    __del__ = close


if hasattr(os, "register_at_fork"):  # a child would keep the inbox open after its parent has ended
    os.register_at_fork(after_in_child=lambda: [lines.close() for lines in list(_in_use)])


class NeighboursMailbox:
    """The ``PeekingMailbox`` of rank ``rank`` of those at ``addresses``, all of whose inboxes ``lines`` has open.

    Payloads move when the receiver is in a call of its mailbox.
    """

    wire = "shared_memory"

    def __init__(self, rank: int, addresses: list[Address], lines: Lines, timeout_s: float) -> None:
        self.rank = rank
        self.world = len(addresses)
        self._lines = lines
        self._timeout_s = timeout_s
        files = lines.outboxes.items()
        self._neighbours = {peer: _Neighbour(rank, peer, addresses[peer].pid, file) for peer, file in files}
        self._by_file = {file: self._neighbours[peer] for peer, file in files}
        self._poll = select.poll()
        self._poll.register(lines.inbox, select.POLLIN)
        for file in self._by_file:
            self._poll.register(file, 0)  # reports when nobody can read it any more
        self._buffer = memoryview(bytearray(_INBOX_BYTES))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        """See ``Mailbox.send``."""
        message = _Message(self, self._neighbours[peer], tensor.numel() * tensor.element_size(), tensor)
        message.neighbour.offer(message, tag)
        return message

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        """See ``Mailbox.receive``."""
        return self.peek(tensor.numel() * tensor.element_size(), peer, tag, tensor)

    def peek(self, nbytes: int, peer: int, tag: int, target: torch.Tensor | None = None) -> _Message:
        """See ``PeekingMailbox.peek``; with ``target`` the message is copied there when it comes."""
        message = _Message(self, self._neighbours[peer], nbytes, target)
        message.neighbour.requests[tag].append(message)
        self.listen(0)
        self._match()
        return message

    def wait(self, message: _Message, timeout_s: float | None) -> None:
        """Take what arrives until ``message`` is done.

        Raises:
            RuntimeError: its neighbour has ended, sent something else, or ``timeout_s`` seconds went by.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            while self._match():  # for all: they may wait for it before they send what this rank waits for
                pass  # and again: what came meanwhile wakes nobody any more
            if message.done:
                return
            message.neighbour.check()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                message.neighbour.give_up(message)
                raise RuntimeError(f"Timed out waiting {limit_s:g} s for rank {message.neighbour.rank}")
            self.listen(left_s)

    def listen(self, limit_s: float) -> None:
        """Wait for records or the end of a rank, at most ``limit_s`` seconds, and note them."""
        for neighbour in self._by_file.values():
            self._poll.modify(neighbour.file, select.POLLOUT if neighbour.unsent else 0)
        events = self._poll.poll(limit_s * 1000)
        self._read()
        for file, event in events:
            if file != self._lines.inbox and not event & select.POLLERR:
                self._by_file[file].flush()
            elif file != self._lines.inbox:  # what it wrote before has been read, and counts
                self._poll.unregister(file)
                neighbour = self._by_file.pop(file)
                neighbour.lost = neighbour.lost or "it has ended"

    def _read(self) -> None:
        try:
            while nbytes := os.readv(self._lines.inbox, [self._buffer]):
                self._note(bytes(self._buffer[:nbytes]))
        except BlockingIOError:
            pass

    def _note(self, records: bytes) -> None:
        at = 0
        while at < len(records):
            rank, kind, number, tag, address, nbytes = _RECORD.unpack_from(records, at)
            neighbour, at = self._neighbours[rank], at + _RECORD.size
            if kind == _OFFERED:
                content = records[at : at + nbytes] if nbytes <= _INLINE_BYTES else b""
                neighbour.arrived[tag].append(_Arrived(number, address, nbytes, content))
                at += len(content)
            elif kind == _GIVEN_UP:
                neighbour.given_up.add(number)
            else:
                neighbour.offers.pop(number).done = True

    def _match(self) -> bool:
        """Give each request the message it asks for. Returns whether there was any."""
        found = False
        for neighbour in self._neighbours.values():
            for tag in [tag for tag in neighbour.requests if tag in neighbour.arrived]:
                requests, arrived = neighbour.requests[tag], neighbour.arrived[tag]
                while requests and arrived and requests[0].fill(arrived[0]):
                    requests.popleft().done = found = True
                    arrived.popleft()
                for waiting in (neighbour.requests, neighbour.arrived):
                    if not waiting[tag]:
                        del waiting[tag]
        return found


@dataclass(frozen=True)
class _Arrived:
    """A message that another rank offers; ``content`` is empty where it lies in that rank's memory."""

    number: int
    address: int
    nbytes: int
    content: bytes


@dataclass(eq=False)
class _Message:
    """A message that this rank sends or expects; without a tensor one that it reads where it lies."""

    mailbox: NeighboursMailbox
    neighbour: _Neighbour
    nbytes: int
    tensor: torch.Tensor | None
    done: bool = False
    """It has arrived, or has been taken."""
    source: _Arrived | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """See ``Pending.wait``."""
        if not self.done:
            self.mailbox.wait(self, timeout_s)

    def fill(self, arrived: _Arrived) -> bool:
        """Take what has arrived, if it can still be had."""
        self.source = arrived
        try:
            if arrived.nbytes != self.nbytes:
                self.neighbour.check(f"it sends {arrived.nbytes} bytes where {self.nbytes} are expected")
            if self.tensor is not None:
                self.read(self.tensor, 0)
                self.release()
        except RuntimeError:  # who waits for it is told why
            return False
        return True

    def read(self, tensor: torch.Tensor, at: int) -> None:
        """See ``Peeked.read``."""
        nbytes = tensor.numel() * tensor.element_size()
        if self.nbytes <= _INLINE_BYTES:
            ctypes.memmove(tensor.data_ptr(), self.source.content[at : at + nbytes], nbytes)
            return
        self.neighbour.check()
        try:
            read_memory(self.neighbour.pid, self.source.address + at, tensor.data_ptr(), nbytes)
        except OSError as error:
            self.neighbour.check(str(error.strerror))

    def release(self) -> None:
        """See ``Peeked.release``. What was read counts if its rank was there, and had it on offer, to the end."""
        if self.nbytes > _INLINE_BYTES:
            self.mailbox.listen(0)
            gone = self.source.number in self.neighbour.given_up
            self.neighbour.check("it has given up what it was sending" if gone else "")
            self.neighbour.write(_TAKEN, self.source.number, 0, 0, 0)


@dataclass(eq=False)
class _Neighbour:
    """What this rank (``me``) and another one have to say to each other."""

    me: int
    rank: int
    pid: int
    file: int
    lost: str = ""
    """Why nothing more is taken from the rank; empty while that is not so."""
    unsent: deque[tuple[bytes, _Message | None]] = field(default_factory=deque)
    """Records for which its inbox had no room, and the message that is done with them."""
    count: int = 0
    """Messages sent to it."""
    offers: dict[int, _Message] = field(default_factory=dict)
    """By number: large messages that it has yet to take."""
    arrived: dict[int, deque[_Arrived]] = field(default_factory=lambda: defaultdict(deque))
    """By tag: messages of that rank for which nobody has asked."""
    requests: dict[int, deque[_Message]] = field(default_factory=lambda: defaultdict(deque))
    """By tag: messages that this rank expects; the first asked for gets the first that comes."""
    given_up: set[int] = field(default_factory=set)
    """Numbers of messages of that rank that are no longer to be had."""

    def check(self, problem: str = "") -> None:
        """Raises ``RuntimeError`` if the rank is lost: for the first ``problem`` that there was."""
        self.lost = self.lost or problem
        if self.lost:
            raise RuntimeError(f"Connection closed by rank {self.rank}: {self.lost}")

    def offer(self, message: _Message, tag: int) -> None:
        """Send a small message, say where a large one lies."""
        self.count += 1
        address = message.tensor.data_ptr()
        place = (self.count, tag, address, message.nbytes)
        if message.nbytes <= _INLINE_BYTES:
            self.write(_OFFERED, *place, content=ctypes.string_at(address, message.nbytes), small=message)
        else:
            self.offers[self.count] = message
            self.write(_OFFERED, *place)

    def give_up(self, message: _Message) -> None:
        """Tell that a payload is no longer what it was meant to be."""
        for number in [number for number, offer in self.offers.items() if offer is message]:
            self.write(_GIVEN_UP, number, 0, 0, 0)

    def write(self, kind: int, *fields: int, content: bytes = b"", small: _Message | None = None) -> None:
        """Put a record in its inbox; ``small`` is the message that leaves with it."""
        self.unsent.append((_RECORD.pack(self.me, kind, *fields) + content, small))
        self.flush()

    def flush(self) -> None:
        """Write as many records as there is room for."""
        try:
            while self.unsent:
                os.write(self.file, self.unsent[0][0])
                _, small = self.unsent.popleft()
                if small is not None:
                    small.done = True
        except (BlockingIOError, BrokenPipeError):
            pass  # who waits is woken when there is room, or told that the rank has ended
