"""What a run needs at least, at its own stage and at the others, and the refusal of a run that cannot fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardledger.layout.build import build_layout
from shardledger.ledger.amounts import gib
from shardledger.ledger.lower_bound import at_least, in_place_of
from shardledger.ledger.predict import OptimizerBytes
from shardledger.ledger.remedies import Remedy, listing, remedies, table
from shardledger.ledger.row import Row
from shardledger.plan.plan import Plan
from shardledger.plan.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds of one rank, counted when they are asked for."""

    stage: int
    rank: int
    model: ModelSpec
    optimizer: OptimizerBytes
    make_plans: Callable[[], Sequence[Plan]]
    """Plans of stages 0 to 3."""
    one_memory: bool = True
    """Whether ranks compute in host memory."""

    @cached_property
    def plans(self) -> Sequence[Plan]:
        """By stage."""
        return self.make_plans()

    @cached_property
    def row(self) -> Row:
        """The bound of the stage that was asked for."""
        return self._row(self.plans[self.stage])

    @cached_property
    def rows(self) -> list[Row]:
        """Bounds of all stages that the optimizer can work at."""
        return [self.row] if self.optimizer.whole else [self._row(plan) for plan in self.plans]

    def advise(self, row: Row, budget: int) -> tuple[Remedy, ...]:
        """What would help ``row``: this run, its activations measured (or 0: not known yet)."""
        numel = self.plans[self.stage].communication.reduce_bucket_numel if row.activations else None
        return remedies(row, in_place_of(row, self.rows), budget, buckets_numel=numel)

    def refusal(self, budget: int, where: str, foreseen: Row | None = None) -> str:
        """The message for a device with ``budget`` bytes (``where`` says who said so).

        ``foreseen``: the highest moment of a dry run, where one was made; the bound exceeds the budget where it does not.
        """
        row = self.row
        what = (
            f"its states and the largest unit ({row.peak_unit or 'none'}) alone need {gib(row.total)} of {gib(budget)} "
            f"({where}), before any activation"
        )
        if row.total <= budget and foreseen is not None:
            row = foreseen
            what = f"it is predicted to need {gib(row.total)} in {row.peak_phase} of {gib(budget)} ({where})"
        return (
            f"rank {self.rank}: stage {row.stage} cannot fit: {what}.\n{table(row, budget)}\n"
            f"what would help:\n{listing(self.advise(row, budget))}"
        )

    def _row(self, plan: Plan) -> Row:
        layout = build_layout(plan, self.model)
        return at_least(plan, layout, self.optimizer, self.rank, one_memory=self.one_memory)
