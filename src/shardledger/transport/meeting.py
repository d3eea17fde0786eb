"""Which wire do the ranks use? They agree on it: all on shared memory, or all on gloo."""

from __future__ import annotations

import errno
import logging
import os

import torch

from shardledger.transport.gloo import GlooMailbox
from shardledger.transport.neighbours import Board, NeighboursMailbox, OwnBoard, readable
from shardledger.transport.peers import PeerTransport
from shardledger.transport.process_memory import let_others_read

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
    own = OwnBoard(gloo.world)
    mine = [WIRES.index(wire), own.place.pid, own.place.address, own.place.nonce]
    rows = gloo.exchange(torch.tensor(mine, dtype=torch.int64), "meeting of ranks").tolist()
    boards = [Board(*row[1:]) for row in rows]
    refusals = [
        errno.ECANCELED if rows[peer][0] == WIRES.index("gloo") else readable(b) for peer, b in enumerate(boards)
    ]
    peer, code = next(((peer, code) for peer, code in enumerate(refusals) if code), (0, 0))
    verdicts = gloo.exchange(torch.tensor([peer, code], dtype=torch.int64), "agreement on a wire").tolist()
    reasons = [(rank, *verdict) for rank, verdict in enumerate(verdicts) if verdict[1]]
    if not reasons:
        return PeerTransport(NeighboursMailbox(gloo.rank, own, boards, timeout_s), engine)
    if gloo.rank == 0 and wire != "gloo":
        _log.log(logging.WARNING if wire == "shared_memory" else logging.INFO, _why_not(*reasons[0]))
    return gloo


def _why_not(rank: int, peer: int, code: int) -> str:
    if code == errno.ECANCELED:
        return f"rank {peer} was told to use gloo, so all ranks do."
    why = {
        errno.ESRCH: "they are on different machines or in different containers",
        errno.EPERM: 'the kernel forbids it (with ptrace_scope 1, "transport": "shared_memory" asks for permission)',
        errno.ENOSYS: "that needs Linux on x86-64",
    }
    return f"rank {rank} cannot read the memory of rank {peer}: {why.get(code, os.strerror(code))}. All ranks use gloo."
