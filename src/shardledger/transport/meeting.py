"""Which wire do the ranks use? They agree on it: all on shared memory, or all on gloo."""

from __future__ import annotations

import errno
import logging
import os
import signal
from dataclasses import astuple

import torch

from shardledger.transport.gloo import GlooMailbox
from shardledger.transport.neighbours import Address, Lines, NeighboursMailbox
from shardledger.transport.peers import PeerTransport
from shardledger.transport.process_memory import let_read

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
    lines = None if wire == "gloo" else _lines(wire)
    mine = [WIRES.index(wire), *(astuple(lines.address) if lines else (0, 0, 0, 0))]
    rows = gloo.exchange(torch.tensor(mine, dtype=torch.int64), "meeting of ranks").tolist()
    addresses = [Address(*row[1:]) for row in rows]
    refusal = _connect(gloo.rank, lines, addresses, [WIRES[row[0]] for row in rows])
    verdicts = gloo.exchange(torch.tensor(refusal, dtype=torch.int64), "agreement on a wire").tolist()
    reasons = [(rank, *verdict) for rank, verdict in enumerate(verdicts) if verdict[1]]
    if gloo.rank == 0 and wire != "gloo":
        text = _why_not(*reasons[0]) if reasons else f"{gloo.world} ranks exchange payloads through shared memory."
        _log.log(logging.WARNING if reasons and wire == "shared_memory" else logging.INFO, text)
    if reasons or lines is None:
        return gloo
    return PeerTransport(NeighboursMailbox(gloo.rank, addresses, lines, timeout_s), engine)


def _lines(wire: str) -> Lines | None:
    """This rank's inbox, and leave for the others to find it: for ``"auto"``, for what the same launcher has started."""
    launcher = os.getppid() if os.getppid() > 1 else 0  # init has started everybody
    let_read(-1 if wire == "shared_memory" else launcher)
    try:
        return Lines() if signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN else None
    except (AttributeError, OSError):  # not Linux, or no file free
        return None


def _connect(rank: int, lines: Lines | None, addresses: list[Address], wires: list[str]) -> tuple[int, int]:
    """Open the others' inboxes. Returns the first rank that keeps this one from it, and the errno of that, or (0, 0)."""
    if "gloo" in wires:
        return wires.index("gloo"), errno.ECANCELED
    if lines is None:
        return rank, errno.ENOSYS
    for peer, address in enumerate(addresses):
        try:
            if peer != rank:
                lines.outboxes[peer] = address.open()
        except OSError as error:
            return peer, error.errno or errno.EIO
    return 0, 0


def _why_not(rank: int, peer: int, code: int) -> str:
    if code == errno.ECANCELED:
        return f"rank {peer} was told to use gloo, so all ranks do."
    why = {
        errno.ESRCH: "they are on different machines or in different containers",
        errno.EPERM: 'the kernel forbids it (with ptrace_scope 1, "transport": "shared_memory" asks for permission)',
        errno.ENOSYS: "that needs Linux, a free file, and SIGPIPE ignored as Python has it",
    }
    return f"rank {rank} cannot read the memory of rank {peer}: {why.get(code, os.strerror(code))}. All ranks use gloo."
