"""The dry run behind ``shardledger plan --model``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardledger.cli.plan_question import Planned, Question
from shardledger.ledger.amounts import gib
from shardledger.ledger.plot import Moment
from shardledger.ledger.row import Row

if TYPE_CHECKING:
    from shardledger.forecast import Rehearsed


def run_planner(question: Question) -> Planned:
    """Plan one micro-batch under every stage, offload and recomputation.

    Raises:
        ConfigError: the model's name or the configuration is wrong.
        PlanError: the model cannot be run without values.
    """
    from shardledger.budget import pricing, rows_to_choose_from, units_of
    from shardledger.forecast import Question as DryQuestion
    from shardledger.forecast import forecast
    from shardledger.ledger.mixed import cheapest_mix
    from shardledger.telemetry.memory import before_the_model

    batch = {
        "train_micro_batch_size_per_gpu": question.micro_batch,
        "gradient_accumulation_steps": question.accumulation,
    }
    content = {key: value for key, value in question.config.items() if key != "train_batch_size"}
    framework, note = question.framework_bytes, ()
    if framework is None:
        framework, why = before_the_model(question.device)
        note = (f"framework: {gib(framework)} {why}; --framework says otherwise",)
    asked = DryQuestion(
        model=question.model,
        config={**content, **batch},
        world=question.world,
        micro_batches=(question.micro_batch,),
        seq_len=question.seq_len,
        device=question.device,
        framework_bytes=framework,
        trainable=question.trainable,
    )
    found = forecast(asked)
    first = next(iter(found.runs.values()))

    def within(budget: int, host: int | None) -> Row:
        rows = [row for row in rows_to_choose_from(found) if host is None or row.host_bytes <= host]
        return cheapest_mix(rows, budget, units_of(found), pricing(asked))

    return Planned(
        rows=found.rows,
        parameters=found.spec.numel,
        trained=sum(p.numel for p in found.spec.parameters if p.trainable),
        timeline=_timeline(first, framework),
        timelines={(stage, again): _timeline(made, framework) for (stage, again, _), made in found.runs.items()},
        notes=(*note, _saves(first), *found.notes),
        within=within,
    )


def _timeline(made: Rehearsed, framework: int) -> list[Moment]:
    return [(phase, unit, nbytes + framework) for phase, unit, nbytes in made.run.timeline]


def _saves(made: Rehearsed) -> str:
    """A sentence on checkpoints, which are alike at every stage."""
    ranks = [made.saves(rank) for rank in range(made.plan.world)]
    copied = max(rank.copied for rank in ranks)
    how = "everything, since it is asynchronous" if made.config.shardledger.checkpoint.asynchronous else "one unit"
    return (
        f"checkpoint: a save writes up to {gib(max(rank.written for rank in ranks))} per rank, "
        f"{gib(sum(rank.written for rank in ranks))} in all, and holds {gib(copied)} of host memory per rank meanwhile ({how})"
    )
