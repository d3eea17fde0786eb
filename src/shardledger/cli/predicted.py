"""The predicted side of a run's ledger: a dry run of what was trained, which knows nothing of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardledger.cli.settings import RunSettings
from shardledger.ledger import STATE_CATEGORIES

Ledger = dict[str, dict[str, int | None]]


def predict_ledgers(settings: RunSettings, config: Any, device: str, ledgers: Sequence[Ledger]) -> str:
    """Fill in what ``ledgers`` do not predict yet; returns why not, or nothing.

    States are each rank's own. Activations and communication are what a forward pass keeps and what is gathered or
    unreduced at most, as in the measured column. The framework is the process as the run found it, before its model. The
    total is the framework and the highest moment of the dry run.
    """
    if all(ledger["predicted"]["total"] is not None for ledger in ledgers):
        return ""
    from shardledger.errors import ShardledgerError
    from shardledger.forecast import Question, describe_model, highest, model_maker, rehearse
    from shardledger.ledger.offload import offloaded

    kind = "cpu" if device == "cpu" else "cuda"
    question = Question(model=settings.model, world=settings.world, seq_len=settings.seq_len, device=kind)
    try:
        make_model = model_maker(question)
        rehearsed = rehearse(question, config, describe_model(make_model), make_model)
    except ShardledgerError as error:
        return str(error)
    run = rehearsed.run
    one_memory = kind == "cpu"
    moved = offloaded(rehearsed.plan, rehearsed.layout, run.optimizer_bytes, question.rank, one_memory=one_memory)
    held, _, _ = highest(run, moved)
    at_rest = sum(run.account[category] - moved.device[category] for category in STATE_CATEGORIES)
    communication = run.account["communication"] - moved.device["communication"]
    for ledger in ledgers:
        predicted, measured = ledger["predicted"], ledger["measured"]
        states = [predicted[category] or 0 for category in STATE_CATEGORIES]
        peak = sum(held.values()) + sum(states) - at_rest  # this rank's states instead of rank 0's
        framework = max(0, (measured["framework"] or 0) - run.arrived)
        predicted["activations"] = run.account["activations"]
        predicted["communication"] = communication
        predicted["temporary"] = max(0, peak - sum(states) - run.account["activations"] - communication)
        predicted["framework"] = framework
        predicted["total"] = framework + peak
    return ""
