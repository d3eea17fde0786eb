"""When memory runs out in a run: the ledger at that moment and the remedies, told before the error goes on.

The error keeps its type, so that a training loop that catches it still does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from shardledger.ledger import CATEGORIES
from shardledger.ledger.amounts import gib
from shardledger.ledger.remedies import Remedy, listing
from shardledger.ledger.row import Row

Advise = Callable[[Row, int], Sequence[Remedy]]
"""From what was live, with what was asked for on top, and the bytes there are, to what would help."""

_ASKED = re.compile(r"tried to allocate ([\d.]+)\s*(bytes|[KMGT]?i?B)?", re.IGNORECASE)
_SIZES = {"": 1, "bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_ON_CPU = ("not enough memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """The ledger at the moment when memory ran out: attribute ``shortage`` of the error. Bytes of this rank."""

    rank: int
    step: int
    """Optimizer step that was being made, from 1."""
    phase: str
    """``forward``, ``backward`` or ``step``."""
    unit: str
    """Label of the unit at work."""
    asked_bytes: int | None
    """What the allocation that failed wanted; None where the error does not say."""
    live: Mapping[str, int]
    """By category; activations hold everything beside states and communication."""
    predicted: Mapping[str, int | None]
    remedies: tuple[Remedy, ...]

    def __str__(self) -> str:
        asked = "" if self.asked_bytes is None else f"; {gib(self.asked_bytes)} more were asked for"
        lines = [
            f"shardledger: rank {self.rank} ran out of memory in {self.phase}, unit {self.unit}, step {self.step}{asked}.",
            f"  {'':<14}{'predicted':>12}{'live':>12}",
        ]
        for category in (*CATEGORIES, "total"):
            predicted = self.predicted.get(category)
            shown = "-" if predicted is None else gib(predicted)
            lines.append(f"  {category:<14}{shown:>12}{gib(self.live.get(category, 0)):>12}")
        return "\n".join([*lines, "what would help:", listing(self.remedies)])


@contextmanager
def telling_shortage(explain: Callable[[BaseException], Shortage]) -> Iterator[None]:
    """Print and attach the ledger when the block runs out of memory; the error goes on as it is."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error) and not hasattr(error, "shortage"):
            with suppress(Exception):  # telling must not hide the error it tells about
                _tell(error, explain(error))
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return type(error) is RuntimeError and any(words in str(error).lower() for words in _ON_CPU)


def asked_bytes(error: BaseException) -> int | None:
    """How much the failed allocation wanted, as its message says."""
    found = _ASKED.search(str(error))
    size = _SIZES.get((found.group(2) or "").lower()) if found else None
    return int(float(found.group(1).rstrip(".")) * size) if found and size else None


def _tell(error: BaseException, shortage: Shortage) -> None:
    error.shortage = shortage  # type: ignore[attr-defined]
    print(shortage, file=sys.stderr, flush=True)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"(rank {shortage.rank}: the ledger of this moment is printed above and in error.shortage)")
