"""Which network interface leads to the other machines: gloo asks for one before it connects ranks.

Left alone gloo resolves the machine's own name, and where that fails, or gives an address of loopback as in many
``/etc/hosts``, it tells ranks of other machines to connect to 127.0.0.1. The route to rank 0 is known better.
"""

from __future__ import annotations

import os
import socket
from typing import Protocol

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"


class Board(Protocol):
    """Where ranks leave words for each other: a ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Leave a word."""

    def get(self, key: str) -> bytes:
        """Wait for a word."""


def choose_interface(board: Board, rank: int, world: int, host: str, port: int) -> None:
    """Set GLOO_SOCKET_IFNAME, unless the user has, to the interface of the route to rank 0 at ``host``.

    On rank 0's own machine ``host`` may be a name for loopback; then another rank's address shows the way. Collective.
    """
    own = address_towards(host, port)
    board.set(f"address/{rank}", own)
    if is_loopback(own):
        others = (board.get(f"address/{other}").decode() for other in reversed(range(world)))
        outside = next((address for address in others if address and not is_loopback(address)), None)
        own = own if outside is None else address_towards(outside, port)
    name = interface_of(own)
    if name is not None:
        os.environ.setdefault(VARIABLE, name)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to ``host``; empty when there is no way."""
    try:
        ways = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, where in ways:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # a datagram's socket sends nothing yet: it only looks up the route
                return str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
    return ""


def interface_of(address: str) -> str | None:
    """The name of the interface with this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == address for item in addresses):
            return str(name)
    return None


def is_loopback(address: str) -> bool:
    """Whether an address leads to this machine only."""
    return address.startswith("127.") or address == "::1"
