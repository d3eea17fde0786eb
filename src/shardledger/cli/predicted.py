"""The predicted side of a run's ledger: a dry run of what was trained, which knows nothing of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardledger.cli.settings import RunSettings
from shardledger.ledger import STATE_CATEGORIES
from shardledger.ledger.offload import Offloaded, offloaded

Ledger = dict[str, dict[str, int | None]]


def predict_ledgers(settings: RunSettings, config: Any, device: str, ledgers: Sequence[Ledger]) -> str:
    """Fill in what ``ledgers`` do not predict yet; returns why not, or nothing.

    Where live bytes were counted, each category is what it has at the highest moment. Elsewhere states are each rank's own,
    activations and communication what a forward pass keeps and what is gathered or unreduced at most, the framework is the
    process as the run found it, and the total is that and the highest moment of the dry run.
    """
    if all(ledger["predicted"]["total"] is not None for ledger in ledgers):
        return ""
    from shardledger.errors import ShardledgerError
    from shardledger.forecast import Question, describe_model, highest, model_maker, rehearse

    kind = "cpu" if device == "cpu" else "cuda"
    question = Question(model=settings.model, world=settings.world, seq_len=settings.seq_len, device=kind)
    try:
        make_model = model_maker(question)
        found = rehearse(question, config, describe_model(make_model), make_model)
    except ShardledgerError as error:
        return str(error)
    moved = offloaded(
        found.plan, found.layout, found.run.optimizer_bytes, question.rank, one_memory=question.device == "cpu"
    )
    held, _, _ = highest(found.run.peaks, moved)
    peaks = {**found.run.peaks, "checkpoint": found.while_saving(question)}
    for ledger in ledgers:
        if "process" in ledger:
            more = _at_the_peak(ledger["predicted"], found.run.account, moved, held)
            ledger["predicted_phases"] = {
                phase: sum(held.values()) + (more if held["optimizer"] else 0)
                for phase in ledger["phases"]
                for held, _, _ in (highest({phase: peaks[phase]}, moved),)
            }
        else:
            _over_the_run(ledger, found.run.account, moved, held)
    return ""


def _at_the_peak(
    predicted: dict[str, int | None], account: Mapping[str, int], moved: Offloaded, held: Mapping[str, int]
) -> int:
    """The highest moment (``held``): the counterpart of counted live bytes. Returns what this rank holds more than rank 0.

    Ranks differ by the step counters of the pieces they hold; before the first step there are none.
    """
    more = (predicted["optimizer"] or 0) - (account["optimizer"] - moved.device["optimizer"])
    now = more if held["optimizer"] else 0
    predicted.update(held)
    predicted["optimizer"] = held["optimizer"] + now
    predicted["total"] = sum(held.values()) + now
    return more


def _over_the_run(ledger: Ledger, account: Mapping[str, int], moved: Offloaded, held: Mapping[str, int]) -> None:
    """Each category's own highest moment, and the process: the counterpart of what the system measures."""
    predicted, measured = ledger["predicted"], ledger["measured"]
    states = [predicted[category] or 0 for category in STATE_CATEGORIES]
    at_rest = sum(account[category] - moved.device[category] for category in STATE_CATEGORIES)
    peak = sum(held.values()) + sum(states) - at_rest  # this rank's states instead of rank 0's
    communication = account["communication"] - moved.device["communication"]
    predicted["activations"] = account["activations"]
    predicted["communication"] = communication
    predicted["temporary"] = max(0, peak - sum(states) - account["activations"] - communication)
    predicted["framework"] = measured["framework"]
    predicted["total"] = (measured["framework"] or 0) + peak
