"""A rank that raises tells the others why before it ends, so that each of them can name the first cause."""

from __future__ import annotations

import sys
from types import TracebackType

from shardledger.runtime.assemble import Parts, take_apart
from shardledger.runtime.gathered import live, withdraw
from shardledger.transport import Transport

_installed: list[object] = []


def listen_for_the_end() -> None:
    """From now on an exception that nobody catches is told to the ranks of every live engine, then handled as before."""
    before = sys.excepthook
    if before in _installed:  # looked up each time: programs replace the hook, too
        return

    def tell_and_go_on(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A bare loss.backward() that ran out of memory, say: of several engines the one that it left in the middle.
        for parts in sorted(live(), key=lambda parts: not parts.schedule.in_backward):
            parts.tell_shortage(error, "between passes")
        before(kind, error, trace)
        tell_of(error)

    sys.excepthook = tell_and_go_on
    _installed.append(tell_and_go_on)


def tell_of(error: BaseException) -> None:
    """Tell the ranks of every live engine that ``error`` ends this one."""
    for parts in live():
        part_with(parts.transport, error)


def end(parts: Parts, error: BaseException | None) -> None:
    """End an engine: finish what is under way with the other ranks, or tell them of ``error``; then let go of all memory.

    Raises:
        TransportError: there is no ``error``, and another rank does something else, or is gone.
    """
    withdraw(parts)
    try:
        if error is None:
            parts.executor.settle()
        if parts.saver is not None:
            parts.saver.close(abandon=error is not None)
        part_with(parts.transport, error)
    finally:
        take_apart(parts)
        if parts.on_destroy is not None:
            parts.on_destroy()


def part_with(transport: Transport, error: BaseException | None) -> None:
    """End an engine's conversation with the other ranks: with a reason, or in good order.

    Raises:
        RanksDisagreeError: there is no ``error``, and another rank runs a collective.
    """
    if error is None:
        transport.close()
    else:
        transport.give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
