"""Ranks go through the phases of a save or a load together: an error on one of them is the same error on all."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardledger.errors import CheckpointError, PeerLostError, RanksDisagreeError, ShardledgerError
from shardledger.transport import Transport

_T = TypeVar("_T")


class Meeting:
    """The agreements of one save or load. ``doing`` names it in messages, as ``"save_checkpoint"``."""

    def __init__(self, transport: Transport, device: torch.device, doing: str) -> None:
        self.rank = transport.rank
        self.world = transport.world
        self.doing = doing
        self._transport = transport
        self._device = device

    def start(self, call: str, check: Callable[[], _T]) -> _T | None:
        """The first phase: every rank has called, with the same arguments, and ``check`` passes on all; its result.

        Raises:
            RanksDisagreeError: the calls differ.
            PeerLostError: a rank did not call in time.
        """
        try:
            own = self._exchange([float(zlib.crc32(call.encode()))], "start (every rank must call it)")
        except PeerLostError as error:
            raise PeerLostError(
                f"{self.doing} waits for rank {error.peer}: every rank must call it, not rank 0 alone. {error}",
                error.peer,
            ) from error
        others = [rank for rank, row in enumerate(own) if row != own[self.rank]]
        if others:
            raise RanksDisagreeError(
                f"{self.doing} on rank {self.rank}: ranks {others} call it with other arguments. Here: {call}."
            )
        return self.together("start", check)

    def together(self, phase: str, action: Callable[[], _T], *, ranks: range | None = None) -> _T | None:
        """Run ``action`` on all ranks (or on ``ranks``) and wait until all have.

        Raises:
            CheckpointError: it failed somewhere; the same message on every rank.
        """
        result, error = None, None
        if ranks is None or self.rank in ranks:
            try:
                result = action()
            except (OSError, RuntimeError, ValueError, ShardledgerError) as problem:
                error = problem
        self.agree(phase, error)
        return result

    def agree(self, phase: str, error: BaseException | None) -> None:
        """Go on when no rank has an error.

        Raises:
            ShardledgerError: all ranks have this one.
            CheckpointError: some have; names them, the same message on every rank.
        """
        text = b"" if error is None else describe(error).encode()[:2000]
        lengths = [int(row[0]) for row in self._exchange([float(len(text))], phase)]
        if not any(lengths):
            return
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else padded[:0]
        rows = self._transport.exchange(padded, f"{self.doing}: errors")
        found = [
            f"rank {rank}: {bytes(row[:length].tolist()).decode(errors='replace')}"
            for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))
            if length
        ]
        if isinstance(error, ShardledgerError) and all(torch.equal(row, rows[0]) for row in rows):
            raise error  # the same mistake on every rank needs no list of ranks
        raise CheckpointError(f"{self.doing} failed on all ranks, because of " + "; ".join(found)) from error

    def numbers(self, values: list[float], phase: str) -> list[list[float]]:
        """Every rank's ``values``, by rank."""
        return self._exchange(values, phase)

    def collect(self, content: bytes, phase: str) -> list[bytes]:
        """Every rank's ``content`` on rank 0, ``[]`` elsewhere."""
        lengths = [int(row[0]) for row in self._exchange([float(len(content))], phase)]
        own = torch.zeros(max(lengths), dtype=torch.uint8, device=self._device)
        own[: len(content)].copy_(_tensor(content))
        rows = own.new_empty(self.world * own.numel()) if self.rank == 0 else None
        if own.numel():
            self._transport.gather_to(0, rows, own, f"{self.doing}: {phase}")
        if rows is None:
            return []
        table = rows.view(self.world, -1).cpu()
        return [table[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def spread(self, content: bytes, phase: str) -> bytes:
        """Rank 0's ``content`` on every rank."""
        length = int(self._exchange([float(len(content))], phase)[0][0])
        shared = _tensor(content).to(self._device) if self.rank == 0 else None
        if shared is None:
            shared = torch.empty(length, dtype=torch.uint8, device=self._device)
        if length:
            self._transport.broadcast(shared, 0, f"{self.doing}: {phase}")
        return bytes(shared.cpu().numpy().tobytes())

    def _exchange(self, values: list[float], phase: str) -> list[list[float]]:
        rows: Any = self._transport.exchange(torch.tensor(values, dtype=torch.float64), f"{self.doing}: {phase}")
        return [list(map(float, row)) for row in rows.tolist()]


def describe(error: BaseException) -> str:
    """One line for people: what the system said and about which file, or the message of an error of ours."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    if isinstance(error, ShardledgerError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
