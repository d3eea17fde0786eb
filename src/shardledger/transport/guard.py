"""Every collective is announced to the other ranks, so that ranks which run different ones are told and not hung.

Beside each collective every rank sends every other one a header of 16 bytes: its number, and a digest of what it moves.
Payloads carry tags that only the same collective on another rank has. So where ranks part, headers meet and payloads do
not: both sides raise within a round trip, after a second message in which each says what it runs and where in training
it stands. A rank that leaves (``farewell``) or fails (``give_up``) sends a header that says so in place of the next
collective's.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from contextlib import suppress

import torch

from shardledger.errors import PeerLostError, RanksDisagreeError, TransportError
from shardledger.transport.port import Mailbox, Pending

HEADER_BYTES = 16
TEXT_BYTES = 1024
TAGS = 0x7FFFFFFF
"""Largest tag that the wire takes."""

_RUNS, _LEAVES, _FAILS = 0, 1, 2
_KINDS = 4
_PATIENCE_S = 5.0
"""How long a rank that stops waits for another one to come and hear why."""
_BRIEFLY_S = 0.5
"""How long a rank that another one has failed looks for that one's last words."""
_CURE = (
    "All ranks must run the same modules, in the same order, equally often. Where branches or experts depend on the data, "
    "declare the module with shardledger.utils.set_z3_leaf_modules; where a loop depends on it, let all ranks agree on "
    "its length; give every rank the same number of batches, and call methods that need all ranks on all of them."
)


class Notice:
    """The headers of one collective under way."""

    def __init__(self, number: int, what: str, header: torch.Tensor) -> None:
        self.number = number
        """How many collectives this engine has announced, this one included."""
        self.what = what
        self.header = header
        self.sent: list[tuple[int, Pending]] = []
        self.expected: list[tuple[int, Pending, torch.Tensor]] = []


class Guard:
    """Compares this rank's collectives with those of the others, in the order in which they are launched."""

    def __init__(self, mailbox: Mailbox, engine: int) -> None:
        self.where = "initialize"
        """Step and phase, for messages."""
        self._mailbox = mailbox
        self._engine = engine
        self._tag = _tag_of(f"headers of engine {engine}")
        self._text_tag = _tag_of(f"texts of engine {engine}")
        self._sequence = 0
        self._under_way: deque[Notice] = deque()
        self._last: list[str] = ["nothing yet"] * mailbox.world
        """Of each rank, the last collective that was agreed on."""
        self._broken: TransportError | None = None

    def announce(self, what: str, payload: str) -> tuple[Notice, int]:
        """Tell the others of the next collective. Returns its notice and the tag that its messages carry.

        Raises:
            TransportError: an earlier collective failed; this engine's ranks are out of step for good.
        """
        self._refuse_if_broken(what)
        notice = self._send(_RUNS, f"{what} ({payload})")
        return notice, _tag_of(f"{self._engine}|{self._sequence}|{what}|{payload}")

    def check(self, notice: Notice) -> None:
        """Wait for the headers of ``notice`` and of all before it.

        Raises:
            RanksDisagreeError: another rank runs another collective, or has left.
            PeerLostError: another rank has failed, or its header does not come.
        """
        self._refuse_if_broken(notice.what)  # its payload may never come
        while notice in self._under_way:
            first = self._under_way.popleft()
            for peer, pending, header in first.expected:
                self._wait(peer, pending, first.what)
                if not torch.equal(header, first.header):
                    self._part(peer, first, int(header[0]) % _KINDS)
                self._last[peer] = first.what
            for peer, pending in first.sent:
                self._wait(peer, pending, first.what)

    def farewell(self) -> None:
        """Tell the others that this rank's engine ends, and wait until theirs do too.

        Raises:
            RanksDisagreeError: another rank runs a collective meanwhile.
        """
        if self._broken is not None or self._mailbox.world == 1:
            return
        try:
            self.check(self._send(_LEAVES, "the end of the engine"))
        except PeerLostError:
            return  # a peer that is gone has nothing more to hear, and has said itself what there was to say
        self._broken = TransportError("the engine has ended")

    def give_up(self, reason: str, patience_s: float = _PATIENCE_S) -> None:
        """Tell the others that this rank fails because of ``reason``.

        Waits up to ``patience_s`` seconds per rank until they have come to listen: a process that ends before takes the
        message with it.
        """
        if self._broken is not None or self._mailbox.world == 1:
            return
        self._broken = TransportError(reason)
        with suppress(RuntimeError):  # whom the wire does not reach hears nothing
            notice = self._send(_FAILS, reason)
            told = self._tell(reason)
            for peer, pending, header in notice.expected if patience_s else ():
                with suppress(RuntimeError):  # that one is gone or does not come; one that fails too need not hear
                    pending.wait(patience_s)
                    if int(header[0]) % _KINDS != _FAILS:
                        told[peer].wait(patience_s)

    def lose(self, peer: int, what: str, error: BaseException) -> PeerLostError:
        """The error for a message that failed; from now on nothing else runs."""
        words = self._last_words(peer) if self._broken is None else None
        if words is not None:
            lost = self._failed(peer, what, *words)
        else:
            lost = PeerLostError(
                f"rank {self._mailbox.rank}: the {what} at {self.where} failed at rank {peer}. Rank {peer} died, raised, is "
                f"stuck, or its machine cannot be reached: look at its output. The last it took part in: "
                f"{self._last[peer]}. {self._also_gone(peer)}(The wire says: {_first_line(error)})",
                peer,
            )
        self.give_up(_first_line(lost), 0.0)
        self._broken = self._broken if isinstance(self._broken, (PeerLostError, RanksDisagreeError)) else lost
        return lost

    def _refuse_if_broken(self, what: str) -> None:
        if self._broken is not None:
            raise type(self._broken)(
                f"{what} at {self.where} cannot run, an earlier collective failed: {self._broken}"
            ) from self._broken

    def _send(self, kind: int, what: str) -> Notice:
        self._sequence += 1
        digest = "" if kind else what
        header = torch.tensor([self._sequence * _KINDS + kind, _digest(digest)], dtype=torch.int64)
        notice = Notice(self._sequence, what, header)
        for peer in self._others(-1):
            buffer = torch.empty_like(header)
            notice.expected.append((peer, self._try(peer, what, self._mailbox.receive, buffer), buffer))
        for peer in self._others(1):
            notice.sent.append((peer, self._try(peer, what, self._mailbox.send, header)))
        self._under_way.append(notice)
        return notice

    def _tell(self, what: str) -> dict[int, Pending]:
        """Say in words what this rank runs, to whoever has noticed that it is not what they run."""
        text = torch.frombuffer(bytearray(_pack(self.where, what)), dtype=torch.uint8)
        return {peer: self._mailbox.send(text, peer, self._text_tag) for peer in self._others(1)}

    def _hear(self, peer: int) -> tuple[str, str]:
        """Where ``peer`` stands and what it runs, in its own words."""
        text = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        with suppress(RuntimeError):
            self._mailbox.receive(text, peer, self._text_tag).wait(_PATIENCE_S)
        return _unpack(bytes(text.tolist()))

    def _last_words(self, peer: int) -> tuple[str, str] | None:
        """Where ``peer`` failed and why, if that is the last it said: it may have ended over the loss of another rank."""
        under_way = [one for notice in self._under_way for one in notice.expected if one[0] == peer]
        header = torch.zeros(2, dtype=torch.int64)
        with suppress(RuntimeError):
            for _, pending, said in under_way:
                pending.wait(_BRIEFLY_S)
                if int(said[0]) % _KINDS == _FAILS:
                    return self._hear(peer)
            self._mailbox.receive(header, peer, self._tag).wait(_BRIEFLY_S)
            if int(header[0]) % _KINDS == _FAILS:
                return self._hear(peer)
        return None

    def _also_gone(self, peer: int) -> str:
        """Other ranks whose connections are broken too: any of them may be the cause of the rest."""
        gone = []
        for other in self._others(1):
            try:
                if other != peer:
                    self._mailbox.receive(torch.zeros(2, dtype=torch.int64), other, self._tag)
            except RuntimeError:
                gone.append(str(other))
        return f"Gone too, perhaps before it: rank {', '.join(gone)}. " if gone else ""

    def _failed(self, peer: int, what: str, where: str, reason: str) -> PeerLostError:
        rank = self._mailbox.rank
        return PeerLostError(
            f"rank {peer} failed at {where}: {reason}. Rank {rank} was at {self.where}, in {what}. Look at the output of "
            f"rank {peer}, which failed before this one.",
            peer,
        )

    def _part(self, peer: int, mine: Notice, kind: int) -> None:
        """Tell each other what the two ranks run, and raise."""
        rank = self._mailbox.rank
        if kind == _FAILS:
            error: TransportError = self._failed(peer, mine.what, *self._hear(peer))
            self.give_up(_first_line(error), 0.0)
        else:
            told = self._tell(mine.what)
            where, what = self._hear(peer)
            for other, pending in told.items():
                with suppress(RuntimeError):  # that one is gone, or has found nothing amiss
                    pending.wait(_PATIENCE_S if other == peer else 1.0)
            error = RanksDisagreeError(
                f"ranks {rank} and {peer} run different collectives. Expected by rank {rank} at {self.where}: "
                f"{mine.what}. Got from rank {peer} at {where}: {what}. {_CURE}"
            )
        self._broken = error
        raise error

    def _others(self, direction: int) -> list[int]:
        """The other ranks, nearest first, so that no two ranks write to the same one at once."""
        rank, world = self._mailbox.rank, self._mailbox.world
        return [(rank + direction * k) % world for k in range(1, world)]

    def _try(self, peer: int, what: str, call, tensor: torch.Tensor) -> Pending:  # type: ignore[no-untyped-def]
        try:
            return call(tensor, peer, self._tag)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise self.lose(peer, what, error) from error

    def _wait(self, peer: int, pending: Pending, what: str) -> None:
        try:
            pending.wait()
        except RuntimeError as error:
            raise self.lose(peer, what, error) from error


def _pack(where: str, what: str) -> bytes:
    """A text of fixed size; one that is too long is cut at its end."""
    text = f"{where}\n{' '.join(what.replace(chr(0), ' ').split())}".encode()
    return text[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


def _unpack(text: bytes) -> tuple[str, str]:
    where, _, what = text.rstrip(b"\0").decode(errors="ignore").partition("\n")
    return where or "an unknown place", what or "a collective that it did not name"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _tag_of(text: str) -> int:
    return zlib.crc32(text.encode()) & TAGS


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
