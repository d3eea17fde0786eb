"""The predicted side of a run's ledger: a dry run of what was trained, which knows nothing of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardledger.cli.settings import RunSettings
from shardledger.ledger import STATE_CATEGORIES

if TYPE_CHECKING:
    from shardledger.runtime.dryrun import DryRun

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
    from shardledger.forecast import Question, describe_model, model_maker, rehearse

    kind = "cpu" if device == "cpu" else "cuda"
    question = Question(model=settings.model, world=settings.world, seq_len=settings.seq_len, device=kind)
    try:
        make_model = model_maker(question)
        found = rehearse(question, config, describe_model(make_model), make_model)
    except ShardledgerError as error:
        return str(error)
    run = found.run
    for ledger in ledgers:
        if "process" in ledger:
            more = _at_the_peak(ledger["predicted"], run)
            peaks = {**run.peaks, "checkpoint": found.while_saving(question)}
            ledger["predicted_phases"] = {
                phase: peaks[phase].total + (more if peaks[phase].by_category["optimizer"] else 0)
                for phase in ledger["phases"]
            }
        else:
            _over_the_run(ledger["predicted"], ledger["measured"], run)
    return ""


def _at_the_peak(predicted: dict[str, int | None], run: DryRun) -> int:
    """The highest moment: the counterpart of counted live bytes. Returns what this rank holds more than rank 0.

    Ranks differ by the step counters of the pieces they hold; before the first step there are none.
    """
    peak, more = run.highest, (predicted["optimizer"] or 0) - run.account["optimizer"]
    now = more if peak.by_category["optimizer"] else 0
    predicted.update(peak.by_category)
    predicted["optimizer"] = peak.by_category["optimizer"] + now
    predicted["total"] = peak.total + now
    return more


def _over_the_run(predicted: dict[str, int | None], measured: Mapping[str, int | None], run: DryRun) -> None:
    """Each category's own highest moment, and the process: the counterpart of what the system measures."""
    states = [predicted[category] or 0 for category in STATE_CATEGORIES]
    more = sum(states) - sum(run.account[category] for category in STATE_CATEGORIES)  # this rank's than rank 0's
    peak = run.highest.total + more
    predicted["activations"] = run.account["activations"]
    predicted["communication"] = run.account["communication"]
    predicted["temporary"] = max(0, peak - sum(states) - run.account["activations"] - run.account["communication"])
    predicted["framework"] = measured["framework"]
    predicted["total"] = (measured["framework"] or 0) + peak
