"""What transports that watch another one share."""

from __future__ import annotations

from shardledger.transport.port import Transport


class WrappedTransport:
    """Is ``inner`` to everyone who looks; subclasses pass its collectives on."""

    def __init__(self, inner: Transport) -> None:
        self.wire = inner.wire
        self.rank = inner.rank
        self.world = inner.world
        self.counters = inner.counters
        self._inner = inner

    @property
    def where(self) -> str:
        """See ``Transport.where``."""
        return self._inner.where

    @where.setter
    def where(self, where: str) -> None:
        self._inner.where = where
        self._entered(where)

    def close(self) -> None:
        """See ``Transport.close``."""
        self._inner.close()

    def give_up(self, reason: str) -> None:
        """See ``Transport.give_up``."""
        self._inner.give_up(reason)

    def _entered(self, where: str) -> None:
        """Training stands elsewhere now."""
