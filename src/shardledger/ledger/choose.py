"""A budget instead of a stage: the cheapest planned row whose peak stays under it."""

from __future__ import annotations

from collections.abc import Iterable

from shardledger.errors import DoesNotFitError
from shardledger.ledger.amounts import gib
from shardledger.ledger.fit import OFFLOAD_ORDER
from shardledger.ledger.recommend import describe
from shardledger.ledger.remedies import listing, remedies, table
from shardledger.ledger.row import Row


def cheapest(rows: Iterable[Row], budget: int) -> Row:
    """Fewest bytes sent, then least recomputation, then the lowest stage, among rows whose peak is within ``budget``.

    Args:
        rows: planned for one micro-batch. Offload comes last, host memory alone: a disk needs a folder to be named.
        budget: bytes of one rank's device.

    Raises:
        DoesNotFitError: the leanest row exceeds the budget; with its bytes and what would help.
    """
    runnable = [row for row in rows if "nvme" not in row.offload]
    fitting = [row for row in runnable if row.total <= budget]
    if fitting:
        return min(fitting, key=cost)
    leanest = min(runnable, key=lambda row: row.total)
    found = remedies(leanest, runnable, budget)
    raise DoesNotFitError(
        f"memory budget {gib(budget)}: no stage fits it. The leanest choice is {describe(leanest)}, whose peak is in "
        f"{leanest.peak_phase}:\n{table(leanest, budget)}\nwhat would help:\n{listing(found)}"
    )


def choice(row: Row, rows: Iterable[Row], budget: int) -> str:
    """A sentence on what was chosen and what the others would have cost."""
    sentence = (
        f"memory budget {gib(budget)}: {describe(row)}, predicted peak {gib(row.total)} in {row.peak_phase}, "
        f"{gib(row.sent_bytes_per_step)} sent per rank and step"
    )
    cheaper = [o for o in rows if "nvme" not in o.offload and o.total > budget and cost(o) < cost(row)]
    if cheaper:
        nearest = min(cheaper, key=lambda other: other.total)
        sentence += f"; the next cheaper, {describe(nearest)}, would need {gib(nearest.total)}"
    return sentence


def cost(row: Row) -> tuple[int, int, float, int]:
    """What is least wanted first: offload, bytes sent, units recomputed, the stage."""
    recomputed = float(len(row.recomputed_units) or "inf") if row.checkpointing else 0.0
    offload = 0 if row.offload == "none" else 1 + OFFLOAD_ORDER.index(row.offload)
    return offload, row.sent_bytes_per_step, recomputed, row.stage
