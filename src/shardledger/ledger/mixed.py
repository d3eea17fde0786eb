"""A budget met unit by unit: which units shard less than the others, and which are recomputed.

A plan that shards every unit alike wastes what a budget leaves over. Here the units of the cheapest stage that fits are
lowered, one after the other, to the next cheaper stage, as long as the peak stays under the budget; then recomputation is
taken back likewise. A unit lowered from stage 3 keeps its parameters on every rank, between forward and backward too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardledger.errors import DoesNotFitError
from shardledger.ledger.choose import cheapest, cost
from shardledger.ledger.row import Row


@dataclass(frozen=True, kw_only=True)
class Mix:
    """One choice for every unit; units by label."""

    stage: int
    """Of the units that ``lowered`` does not name."""
    lowered_stage: int
    lowered: tuple[str, ...]
    recomputed: tuple[str, ...]

    @property
    def unit_stages(self) -> dict[str, int]:
        """What ``shardledger.unit_stages`` says."""
        return dict.fromkeys(self.lowered, self.lowered_stage)


Price = Callable[[Mix], Row]
"""Plans one choice: a dry run."""


def cheapest_mix(rows: Iterable[Row], budget: int, units: Sequence[str], price: Price) -> Row:
    """Fewest bytes sent, then fewest units recomputed, among ``rows`` and mixtures of their stages; offload comes last.

    Units are lowered in the order in which that costs the peak least: first the root, which is gathered during the whole
    pass anyway, then blocks from the last one backwards, which is at work when the peak is reached as a rule. They are
    recomputed from the first one forwards: its activations wait the longest.

    Args:
        rows: one for each stage and recomputation, all units alike.
        budget: bytes of one rank's device.
        units: labels, the root first, blocks in the order of the model.
        price: called about twice the logarithm of the number of units.

    Raises:
        DoesNotFitError: not even the leanest choice is within the budget.
    """
    rows = list(rows)
    runnable = [row for row in rows if row.offload == "none"]
    root, blocks = units[0], tuple(units[1:])
    order = (root, *reversed(blocks))
    everything = blocks if any(row.checkpointing for row in runnable) else ()
    try:
        best = cheapest(runnable, budget)
    except DoesNotFitError:
        best = _last_resort(
            [*runnable, *(row for row in rows if row.offload != "none")], budget, root, everything, price
        )
        if best.offload != "none":
            return best
    base = min((row for row in runnable if row.sent_bytes_per_step >= best.sent_bytes_per_step), key=_leanness(best))
    cheaper = [row for row in runnable if row.sent_bytes_per_step < best.sent_bytes_per_step]
    if not blocks or not cheaper and not best.checkpointing:
        return best
    lowered: tuple[str, ...] = ()
    lower = base.stage
    if cheaper:
        most = max(row.sent_bytes_per_step for row in cheaper)
        above = min((row for row in cheaper if row.sent_bytes_per_step == most), key=lambda row: row.total)
        if above.stage < base.stage:
            lower = above.stage

            def lowering(count: int) -> Row:
                return price(_mix(base.stage, lower, order[:count], everything))

            lowered = order[: _most(len(order), lowering, budget)]

    def sparing(count: int) -> Row:
        return price(_mix(base.stage, lower, lowered, everything[: len(everything) - count]))

    free = len(everything) if any(not row.checkpointing for row in runnable) else 0
    found = sparing(_most(free, sparing, budget))
    return min((row for row in (best, found) if row.total <= budget), key=cost)


def _mix(stage: int, lower: int, lowered: tuple[str, ...], recomputed: tuple[str, ...]) -> Mix:
    return Mix(stage=stage, lowered_stage=lower, lowered=lowered, recomputed=recomputed)


def _leanness(best: Row) -> Callable[[Row], tuple[int, int]]:
    """Of the rows that send as much as ``best``, the leanest."""
    return lambda row: (row.sent_bytes_per_step, row.total)


def _last_resort(rows: Sequence[Row], budget: int, root: str, everything: tuple[str, ...], price: Price) -> Row:
    """A whole root, since fp32 weights that are whole are their own masters, which saves its shard; else offload.

    Raises:
        DoesNotFitError: that does not fit either.
    """
    leanest = min((row for row in rows if row.offload == "none"), key=lambda row: row.total)
    if leanest.stage == 3:
        found = price(_mix(3, 2, (root,), everything if leanest.checkpointing else ()))
        if found.total <= budget:
            return found
    return cheapest(rows, budget)


def _most(count: int, row_of: Callable[[int], Row], budget: int) -> int:
    """The largest number up to ``count`` whose row is within the budget, where larger numbers cost more; at least 0.

    Interpolates and bisects in turn, since bytes grow almost evenly with the units.
    """
    if count == 0:
        return 0
    most = row_of(count).total
    if most <= budget:
        return count
    low, low_total, high, high_total = 0, row_of(0).total, count, most
    if low_total > budget:
        return 0
    halving = False
    while high - low > 1:
        share = 0.5 if halving or high_total <= low_total else (budget - low_total) / (high_total - low_total)
        middle = min(high - 1, max(low + 1, low + int((high - low) * share)))
        total = row_of(middle).total
        if total <= budget:
            low, low_total = middle, total
        else:
            high, high_total = middle, total
        halving = not halving
    return low
