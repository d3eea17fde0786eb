"""Which wire do the ranks use? They agree on it: all on shared memory, or all on gloo."""

from __future__ import annotations

import errno
import logging
import os

import torch

from shardledger.transport.gloo import GlooMailbox
from shardledger.transport.neighbours import Board, NeighboursMailbox, Place, Seat
from shardledger.transport.peers import PeerTransport
from shardledger.transport.process_memory import ProcessMemoryError, let_others_read

_log = logging.getLogger("shardledger")
WIRES = ("auto", "shared_memory", "gloo")


def meet(engine: int, wire: str, timeout_s: float) -> PeerTransport:
    """The transport of a gloo process group: through shared memory where every rank wants it and can read every other.

    Collective, whatever ``wire`` says, so that ranks that were configured differently come to the point where they are
    told so. ``engine`` counts alike on all ranks; ``timeout_s`` is in seconds.

    Raises:
        PeerLostError: another rank did not come.
    """
    gloo = PeerTransport(GlooMailbox(), engine)
    if wire == "shared_memory":
        let_others_read()
    seat, board = Seat(), _make_board(gloo)
    file = board.file if board else -1
    try:
        seen = seat.place
        mine = [WIRES.index(wire), file, seen.pid, seen.address, seen.nonce]
        rows = gloo.exchange(torch.tensor(mine, dtype=torch.int64), "meeting of ranks").tolist()
        places = [Place(*row[2:]) for row in rows]
        refusal = _look_around([row[0] for row in rows], places)
        if board is None and not refusal[1]:
            board, refusal = _find_board(gloo.world, places[0].pid, int(rows[0][1]))
        verdicts = gloo.exchange(torch.tensor(refusal, dtype=torch.int64), "agreement on a wire").tolist()
    finally:
        if file >= 0:
            os.close(file)  # all have it, or nobody needs it
    reasons = [(rank, *verdict) for rank, verdict in enumerate(verdicts) if verdict[1]]
    if board is not None and not reasons:
        return PeerTransport(NeighboursMailbox(gloo.rank, board, seat, places, timeout_s), engine)
    if gloo.rank == 0 and wire != "gloo":
        _log.log(logging.WARNING if wire == "shared_memory" else logging.INFO, _why_not(*reasons[0]))
    return gloo


def _make_board(gloo: PeerTransport) -> Board | None:
    try:
        return Board(gloo.world) if gloo.rank == 0 else None
    except (AttributeError, OSError):  # not Linux, or no memory for it
        return None


def _find_board(world: int, pid: int, file: int) -> tuple[Board | None, tuple[int, int]]:
    """The board that rank 0 made, or (0, errno)."""
    try:
        return Board(world, (pid, file)), (0, 0)
    except OSError as error:
        return None, (0, error.errno or errno.EIO)


def _look_around(wires: list[int], places: list[Place]) -> tuple[int, int]:
    """The first rank that does not take part or cannot be read, and the errno of that; (0, 0) when there is none."""
    for rank, (wire, place) in enumerate(zip(wires, places, strict=True)):
        if wire == WIRES.index("gloo"):
            return rank, errno.ECANCELED
        try:
            place.check()
        except ProcessMemoryError as error:
            return rank, error.code
    return 0, 0


def _why_not(rank: int, peer: int, code: int) -> str:
    if code == errno.ECANCELED:
        return f"rank {peer} was told to use gloo, so all ranks do."
    why = {
        errno.ESRCH: "they are on different machines or in different containers",
        errno.EPERM: 'the kernel forbids it (with ptrace_scope 1, "transport": "shared_memory" asks for permission)',
        errno.ENOSYS: "that needs Linux on x86-64",
    }
    return f"rank {rank} cannot read the memory of rank {peer}: {why.get(code, os.strerror(code))}. All ranks use gloo."
