"""``"stage": "auto"``: a dry run of every stage, and the cheapest that keeps the peak under the memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from shardledger.config import Config
from shardledger.errors import ConfigError
from shardledger.forecast import Question, Rehearsed, forecast
from shardledger.ledger import state_bytes
from shardledger.ledger.choose import cheapest, choice
from shardledger.ledger.row import Row

NO_BATCH = (
    'zero_optimization.stage is "auto", and what a step needs depends on the batch: pass initialize(training_data=...), or '
    "choose before with shardledger plan --memory-budget ... --write ds_config.json."
)


def decide(
    config: Config, model: nn.Module | Callable[[], nn.Module], batch: Sequence[Any], *, world: int, device: str
) -> Config:
    """Fill in the stage and whether activations are recomputed; a config without open stage comes back as it is.

    Every rank decides alike: the dry run needs nobody else, and the bytes are those of the rank that holds the most.

    Args:
        config: the configuration; ``shardledger.activation_checkpointing`` true keeps recomputation on.
        model: the module, on any device, or a function that makes it; neither is changed.
        batch: the arguments of one micro-batch; their values are not read.
        world: ranks.
        device: ``"cpu"`` or ``"cuda"``: how ranks talk.

    Raises:
        DoesNotFitError: no stage keeps the peak under the budget.
        PlanError: the model cannot be run without values.
    """
    budget = config.shardledger.memory_budget
    if not config.stage_is_open or budget is None:
        return config
    recompute = (True,) if config.shardledger.activation_checkpointing else (False, True)
    rows = rows_without_offload(
        Question(model=model, config=config, world=world, batch=tuple(batch), device=device, checkpointing=recompute)
    )
    row = cheapest(rows, budget)
    return config.decided(stage=row.stage, activation_checkpointing=row.checkpointing, why=choice(row, rows, budget))


def rows_without_offload(question: Question) -> list[Row]:
    """Stage by recomputation, each for the rank that holds the most."""
    found = forecast(question)
    return [
        _of_the_heaviest_rank(row, found.runs[row.stage, row.checkpointing, row.micro_batch])
        for row in found.rows
        if row.offload == "none"
    ]


def _of_the_heaviest_rank(row: Row, made: Rehearsed) -> Row:
    """Ranks differ by the step counters of the optimizer: one that holds pieces of more parameters has more of them."""
    kept = [
        sum(state_bytes(made.plan, made.layout, made.run.optimizer_bytes, rank).values())
        for rank in range(made.plan.world)
    ]
    more = max(kept) - kept[0]
    return replace(row, optimizer=row.optimizer + more, total=row.total + more)


def batch_of(data: Any, collate: Callable[..., Any] | None, micro_batch: int) -> tuple[Any, ...]:
    """The first micro-batch of a map-style dataset, as the arguments of the module.

    Raises:
        ConfigError: there is no dataset, or it is empty.
    """
    if data is None:
        raise ConfigError(NO_BATCH)
    size = len(data)
    if size == 0:
        raise ConfigError("training_data is empty: there is no batch to plan with.")
    made = (collate or default_collate)([data[index % size] for index in range(micro_batch)])
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)
