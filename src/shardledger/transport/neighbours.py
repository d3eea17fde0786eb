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
from dataclasses import dataclass

import torch

from shardledger.transport.process_memory import read_memory

_RECORD = struct.Struct("=iiqqqq")
"""Rank that writes, kind, number of the message, tag, address, bytes."""
_OFFERED, _TAKEN, _GIVEN_UP = range(3)
_INLINE_BYTES = 4096 - _RECORD.size
"""Messages up to this size (headers, last words) lie in their record: the kernel does not mix writes of up to 4 KiB."""
_PIPE_BYTES = 1 << 16

_lines: weakref.WeakSet[Lines] = weakref.WeakSet()


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
        self.inbox, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(writer)
        self.outboxes: dict[int, int] = {}
        self._proof = ctypes.c_int64(int.from_bytes(os.urandom(8), "little") >> 1)
        self.address = Address(os.getpid(), self.inbox, ctypes.addressof(self._proof), self._proof.value)
        _lines.add(self)

    def close(self) -> None:
        """The others notice."""
        for file in (self.inbox, *self.outboxes.values()):
            if file >= 0:
                os.close(file)
        self.inbox = -1
        self.outboxes = {}

    __del__ = close


def _close_all() -> None:
    for lines in list(_lines):
        lines.close()


if hasattr(os, "register_at_fork"):  # a child must not keep the inbox of a parent that has ended open
    os.register_at_fork(after_in_child=_close_all)


class NeighboursMailbox:
    """The ``Mailbox`` of rank ``rank`` of those at ``addresses``, all of whose inboxes ``lines`` has open.

    Payloads move when the receiver is in a call of its mailbox.
    """

    def __init__(self, rank: int, addresses: list[Address], lines: Lines, timeout_s: float) -> None:
        self.rank = rank
        self.world = len(addresses)
        self._lines = lines
        self._timeout_s = timeout_s
        self._poll = select.poll()
        self._poll.register(lines.inbox, select.POLLIN)
        self._neighbours = {
            peer: _Neighbour(rank, peer, addresses[peer].pid, file) for peer, file in lines.outboxes.items()
        }
        self._by_file = {neighbour.file: neighbour for neighbour in self._neighbours.values()}
        for file in self._by_file:
            self._poll.register(file, 0)  # reports when nobody can read it any more
        self._rest = b""
        """Start of a record whose end has not been read."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        """See ``Mailbox.send``."""
        neighbour = self._neighbours[peer]
        message = _Message(self, neighbour, tensor)
        neighbour.offer(message, tag)
        self._watch(neighbour)
        return message

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> _Message:
        """See ``Mailbox.receive``."""
        neighbour = self._neighbours[peer]
        message = _Message(self, neighbour, tensor)
        neighbour.requests[tag].append(message)
        self._listen(0)
        self._take()
        return message

    def wait(self, message: _Message, timeout_s: float | None) -> None:
        """Take what arrives until ``message`` is done.

        Raises:
            RuntimeError: its neighbour has ended, sent something else, or ``timeout_s`` seconds went by.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            self._take()  # from all: they may wait for it before they send what this rank waits for
            if message.done:
                return
            if message.neighbour.lost:
                raise RuntimeError(f"Connection closed by rank {message.neighbour.rank}: {message.neighbour.lost}")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                message.neighbour.give_up(message)
                raise RuntimeError(f"Timed out waiting {limit_s:g} s for rank {message.neighbour.rank}")
            self._listen(left_s)

    def _watch(self, neighbour: _Neighbour) -> None:
        if neighbour.file in self._by_file:
            self._poll.modify(neighbour.file, select.POLLOUT if neighbour.unsent else 0)

    def _listen(self, limit_s: float) -> None:
        """Wait for records or the end of a rank, at most ``limit_s`` seconds, and note them."""
        ended = []
        for file, event in self._poll.poll(limit_s * 1000):
            neighbour = self._by_file.get(file)
            if neighbour is not None and event & select.POLLERR:
                ended.append(neighbour)
            elif neighbour is not None:
                neighbour.flush()
                self._watch(neighbour)
        self._read()
        for neighbour in ended:  # only now: what it wrote before counts
            self._poll.unregister(neighbour.file)
            del self._by_file[neighbour.file]
            neighbour.lose("it has ended")
            neighbour.end()

    def _read(self) -> None:
        try:
            while got := os.read(self._lines.inbox, _PIPE_BYTES):
                self._rest = self._note(self._rest + got)
        except BlockingIOError:
            pass

    def _note(self, records: bytes) -> bytes:
        """File what is written; returns what is left of an incomplete record."""
        at = 0
        while at + _RECORD.size <= len(records):
            rank, kind, number, tag, address, nbytes = _RECORD.unpack_from(records, at)
            end = at + _RECORD.size + (nbytes if kind == _OFFERED and nbytes <= _INLINE_BYTES else 0)
            if end > len(records):
                break
            neighbour = self._neighbours[rank]
            if kind == _OFFERED:
                neighbour.arrived[tag].append(_Arrived(number, address, nbytes, records[at + _RECORD.size : end]))
            elif kind == _TAKEN:
                neighbour.offers.pop(number).finish()
            else:
                neighbour.given_up.add(number)
            at = end
        return records[at:]

    def _take(self) -> None:
        for neighbour in self._neighbours.values():
            for tag in [tag for tag in neighbour.requests if tag in neighbour.arrived]:
                requests, arrived = neighbour.requests[tag], neighbour.arrived[tag]
                while requests and arrived and self._fill(neighbour, arrived[0], requests[0]):
                    arrived.popleft()
                    requests.popleft().finish()
                for waiting in (neighbour.requests, neighbour.arrived):
                    if not waiting[tag]:
                        del waiting[tag]

    def _fill(self, neighbour: _Neighbour, message: _Arrived, request: _Message) -> bool:
        """Copy what has arrived, unless it cannot be had any more."""
        if message.nbytes != request.nbytes:
            neighbour.lose(f"it sends {message.nbytes} bytes where {request.nbytes} are expected")
        elif message.nbytes <= _INLINE_BYTES:
            ctypes.memmove(request.address, message.content, message.nbytes)
            return True
        if neighbour.lost:
            return False
        try:
            read_memory(neighbour.pid, message.address, request.address, message.nbytes)
        except OSError as error:
            neighbour.lose(str(error))
        self._listen(0)  # it counts if its rank was there and had it on offer to the end
        if message.number in neighbour.given_up:
            neighbour.lose("it has given up what it was sending")
        if neighbour.lost:
            return False
        neighbour.write(_TAKEN, message.number)
        self._watch(neighbour)
        return True


class _Message:
    """A message that this rank sends or expects."""

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


@dataclass(frozen=True)
class _Arrived:
    """A message that another rank offers; ``content`` is empty where it lies in that rank's memory."""

    number: int
    address: int
    nbytes: int
    content: bytes


class _Neighbour:
    """What this rank (``me``) and another one have to say to each other."""

    def __init__(self, me: int, rank: int, pid: int, file: int) -> None:
        self.rank = rank
        self.pid = pid
        self.file = file
        self.lost = ""
        """Why the rank is gone; empty while it is not."""
        self.unsent: deque[tuple[bytes, _Message | None]] = deque()
        """Records for which its inbox had no room, and the message that is done with them."""
        self.offers: dict[int, _Message] = {}
        """By number: large messages that it has yet to take."""
        self.arrived: dict[int, deque[_Arrived]] = defaultdict(deque)
        """By tag: messages of that rank for which nobody has asked."""
        self.requests: dict[int, deque[_Message]] = defaultdict(deque)
        """By tag: messages that this rank expects; the first asked for gets the first that comes."""
        self.given_up: set[int] = set()
        self._me = me
        self._count = 0

    def offer(self, message: _Message, tag: int) -> None:
        """Send a small message, say where a large one lies."""
        self._count += 1
        record = _RECORD.pack(self._me, _OFFERED, self._count, tag, message.address, message.nbytes)
        small = message.nbytes <= _INLINE_BYTES
        if small:
            record += ctypes.string_at(message.address, message.nbytes)
        else:
            self.offers[self._count] = message
        self.unsent.append((record, message if small else None))
        self.flush()

    def give_up(self, message: _Message) -> None:
        """Tell that a payload is no longer what it was meant to be."""
        for number in [number for number, offer in self.offers.items() if offer is message]:
            self.write(_GIVEN_UP, number)

    def write(self, kind: int, number: int) -> None:
        """Tell what has become of a message."""
        self.unsent.append((_RECORD.pack(self._me, kind, number, 0, 0, 0), None))
        self.flush()

    def flush(self) -> None:
        """Write as many records as there is room for."""
        try:
            while self.unsent:
                os.write(self.file, self.unsent[0][0])
                done = self.unsent.popleft()[1]
                if done is not None:
                    done.finish()
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.end()

    def lose(self, why: str) -> None:
        """Nothing more is taken from the rank, for the first reason given."""
        self.lost = self.lost or why

    def end(self) -> None:
        """Nobody reads what this rank sends, so its buffers are free. That the other is lost, a receive will tell."""
        for message in (*self.offers.values(), *(message for _, message in self.unsent)):
            if message is not None:
                message.finish()
        self.offers.clear()
        self.unsent.clear()
