"""When memory runs out in a run: the ledger at that moment and the remedies, told before the error goes on.

The error keeps its type, so that a training loop that catches it still does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from shardledger.ledger import CATEGORIES, STATE_CATEGORIES
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
    """Optimizer step that was being made, from 1; 0 in initialize."""
    phase: str
    """``initialize``, ``forward``, ``backward``, ``step``, or ``between passes``: in code of the user's own."""
    unit: str
    """Label of the unit at work; empty in initialize."""
    asked_bytes: int | None
    """What the allocation that failed wanted; None where the error does not say."""
    live: Mapping[str, int]
    """By category; activations hold everything beside states and communication."""
    predicted: Mapping[str, int | None]
    remedies: tuple[Remedy, ...]

    def __str__(self) -> str:
        asked = "" if self.asked_bytes is None else f"; {gib(self.asked_bytes)} more were asked for"
        where = (
            f"in {self.phase}"
            + (f", unit {self.unit}" if self.unit else "")
            + (f", step {self.step}" if self.step else "")
        )
        lines = [
            f"shardledger: rank {self.rank} ran out of memory {where}{asked}.",
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
        tell_shortage(error, explain)
        raise


def tell_shortage(error: BaseException, explain: Callable[[BaseException], Shortage]) -> None:
    """Print and attach the ledger if ``error`` says that memory ran out and that has not been told yet."""
    if is_out_of_memory(error) and not hasattr(error, "shortage"):
        with suppress(Exception):  # telling must not hide the error it tells about
            _tell(error, explain(error))


def tell_at_birth(
    error: BaseException,
    *,
    rank: int,
    needed: Row,
    live: Mapping[str, int],
    advise: Callable[[Row, int], Sequence[Remedy]],
) -> None:
    """As ``tell_shortage``, while the engine is made.

    Args:
        error: what initialize ends with.
        rank: this process's.
        needed: states and the largest unit.
        live: bytes by category; what has been placed of the model counts as params.
        advise: as ``Advise``.
    """

    def explain(error: BaseException) -> Shortage:
        held, wanted = sum(live.values()), asked_bytes(error)
        framework = live.get("framework", 0)
        asked = replace(needed, framework=framework, total=max(needed.total + framework, held + (wanted or 0)))
        return Shortage(
            rank=rank,
            step=0,
            phase="initialize",
            unit="",
            asked_bytes=wanted,
            live={**dict.fromkeys(CATEGORIES, 0), **live, "total": held},
            predicted={
                **{name: getattr(needed, name) for name in STATE_CATEGORIES},
                "communication": needed.communication,
                "framework": framework,
                "total": needed.total + framework,
            },
            remedies=tuple(advise(asked, held)),
        )

    tell_shortage(error, explain)


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
