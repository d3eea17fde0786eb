"""``"stage": "auto"``: dry runs, and the cheapest choice for every unit that keeps the peak under the memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from shardledger.config import Config
from shardledger.errors import ConfigError, PlanError
from shardledger.forecast import (
    Forecast,
    Question,
    Rehearsed,
    base_config,
    describe_model,
    forecast,
    model_maker,
    rehearse,
    row_of,
    variant,
)
from shardledger.ledger import state_bytes
from shardledger.ledger.choose import choice
from shardledger.ledger.mixed import Mix, Price, cheapest_mix
from shardledger.ledger.recommend import Recommendation
from shardledger.ledger.row import Row

NO_BATCH = (
    'zero_optimization.stage is "auto", and what a step needs depends on the batch: pass initialize(training_data=...), or '
    "choose before with shardledger plan --memory-budget ... --write ds_config.json."
)


def decide(
    config: Config, model: nn.Module | Callable[[], nn.Module], batch: Sequence[Any], *, world: int, device: str
) -> Config:
    """Fill in the stage of every unit and which are recomputed; a config without open stage comes back as it is.

    Every rank decides alike: the dry run needs nobody else, and the bytes are those of the rank that holds the most.

    Args:
        config: the configuration; ``shardledger.activation_checkpointing`` true keeps recomputation on.
        model: the module, on any device, or a function that makes it; neither is changed.
        batch: the arguments of one micro-batch; their values are not read.
        world: ranks.
        device: ``"cpu"`` or ``"cuda"``: how ranks talk.

    Raises:
        DoesNotFitError: no choice keeps the peak under the budget.
        PlanError: the model cannot be run without values.
    """
    budget = config.shardledger.memory_budget
    if not config.stage_is_open or budget is None:
        return config
    recompute = (True,) if config.shardledger.activation_checkpointing else (False, True)
    question = Question(
        model=model, config=config, world=world, batch=tuple(batch), device=device, checkpointing=recompute
    )
    found = forecast(question)
    rows = rows_to_choose_from(found)
    row = cheapest_mix(rows, budget, units_of(found), pricing(question))
    return decided(config, row, choice(row, rows, budget))


def within(question: Question, found: Forecast, budget: int) -> Forecast:
    """``found`` with the cheapest choice for every unit under ``budget`` recommended; its row joins the others.

    Raises:
        DoesNotFitError: nothing fits.
    """
    host = question.host_memory
    here = min(question.world, question.links.ranks_per_machine)
    rows = [row for row in rows_to_choose_from(found) if host is None or row.host_bytes * here <= host]
    row = cheapest_mix(rows, budget, units_of(found), pricing(question))
    answer = Recommendation(row=row, reasons=(choice(row, rows, budget),))
    return replace(found, rows=found.rows if row in found.rows else (*found.rows, row), recommended=answer)


def foreseen(
    config: Config, model: nn.Module | Callable[[], nn.Module], batch: Sequence[Any], *, world: int, device: str
) -> Row | None:
    """The highest moment of a run of ``config`` with batches like this one, for the rank that holds the most.

    None where it cannot be foreseen: a model that cannot be run without values, or whose output is no loss.
    """
    question = Question(model=model, config=config, world=world, batch=tuple(batch), device=device)
    try:
        make_model = model_maker(question)
        found = rehearse(question, config, describe_model(make_model), make_model)
    except (PlanError, ConfigError):
        return None
    return _of_the_heaviest_rank(row_of(question, found), found)


def decided(config: Config, row: Row, why: str = "chosen by the memory budget") -> Config:
    """``config``, whose stage is open, with the choice of ``row``."""
    return config.decided(
        stage=row.stage,
        activation_checkpointing=row.checkpointing,
        unit_stages=dict(row.unit_stages),
        recomputed_units=row.recomputed_units,
        offload=row.offload,
        why=why,
    )


def rows_to_choose_from(found: Forecast) -> list[Row]:
    """Stage by recomputation by offload, each for the rank that holds the most."""
    return [
        row
        if row.offload != "none"  # step counters, in which ranks differ, are away
        else _of_the_heaviest_rank(row, found.runs[row.stage, row.checkpointing, row.micro_batch])
        for row in found.rows
    ]


def units_of(found: Forecast) -> tuple[str, ...]:
    """Labels of the units, the root first."""
    return tuple(unit.label for unit in next(iter(found.runs.values())).plan.units)


def pricing(question: Question) -> Price:
    """A dry run of each choice that is asked for, for the rank that holds the most. Raises as ``forecast`` does."""
    base, make_model = base_config(question), model_maker(question)
    spec = describe_model(make_model)
    micro_batch = question.micro_batches[0] if question.micro_batches else base.train_micro_batch_size_per_gpu
    known: dict[Mix, Row] = {}

    def price(mix: Mix) -> Row:
        if mix not in known:
            by_unit = {"unit_stages": mix.unit_stages or None, "recomputed_units": list(mix.recomputed) or None}
            config = variant(base, question.world, mix.stage, bool(mix.recomputed), micro_batch, by_unit)
            found = rehearse(question, config, spec, make_model)
            known[mix] = _of_the_heaviest_rank(row_of(question, found, "none"), found)
        return known[mix]

    return price


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
